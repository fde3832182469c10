"""Layers and models are compiled, autocast, exported, replicated and sharded as torch's are."""

import io
import tempfile

import pytest
import torch
import torch.distributed as dist
from layers import CASES
from small_network import CASES as PAIRS
from small_network import images, partitioned
from torch.utils._pytree import tree_leaves

import partnets
from partnets import hyper

# torch's compiler does not trace these.
NOT_TRACED = "RNN", "LSTM", "GRU"


def first(output):
    return tree_leaves(output)[0]


def learned(call, model, name):
    """Return the first output and the parameters' gradients of its sum of squares."""
    model.zero_grad()
    y = first(call(*CASES[name].arguments()))
    y.float().square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [y.detach(), *(grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads)]


def compiles(name):
    torch.compiler.reset()  # graphs of other layers would count towards the recompilation limit
    layer = CASES[name].partitioned()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with partnets.subnetwork(layer, 2, 1):
        torch.testing.assert_close(learned(compiled, layer, name), learned(layer, layer, name))


def autocasts(name):
    for lower in (torch.bfloat16, torch.float16):
        layer = CASES[name].partitioned()
        theirs, given = partnets.merge(layer, 2), CASES[name].arguments()
        with torch.autocast("cpu", dtype=lower), partnets.subnetwork(layer, 2, 1):
            try:
                expected = first(theirs(*given))
            except RuntimeError as error:  # some processors have no bfloat16 LSTM in torch
                with pytest.raises(RuntimeError, match=str(error)[:40]):
                    layer(*given)
                continue
            y = first(layer(*given))
            torch.testing.assert_close(y, expected)
            y.float().sum().backward()
        assert all(
            one.grad.dtype == one.dtype for one in (*layer.parameters(), *filter(torch.is_floating_point, given))
        )


def replicates(name, alone):
    from partnets import distributed

    layer = CASES[name].partitioned()
    with partnets.subnetwork(layer, 2, 1):
        expected = learned(layer, layer, name)
    call = distributed.DDP(layer)
    with partnets.subnetwork(layer, 2, 1):
        torch.testing.assert_close(learned(call, layer, name), expected)


def shards(name, alone):
    from partnets import distributed

    layer = CASES[name].partitioned()
    with partnets.subnetwork(layer, 2, 1):
        expected = learned(layer, layer, name)
    distributed.fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
    with partnets.subnetwork(layer, 2, 1):
        torch.testing.assert_close(learned(layer, layer, name), expected)


def exports(name):
    layer = CASES[name].partitioned().eval()
    with partnets.subnetwork(layer, 2):
        expected = first(layer(*CASES[name].arguments()))
    merged = partnets.merge(layer, 2)
    program = torch.export.export(merged, CASES[name].arguments())
    assert program.state_dict.keys() == merged.state_dict().keys() and not program.constants
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    torch.testing.assert_close(first(torch.export.load(file).module()(*CASES[name].arguments())), expected)


USES = {"compile": compiles, "autocast": autocasts, "DDP": replicates, "FSDP2": shards, "export": exports}


@pytest.fixture(scope="module")
def alone():
    """Create a process group with only this process."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.cases(usual=8)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler hides it, unless warnings are errors
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch warns of outputs that are views
@pytest.mark.filterwarnings(
    "ignore:.*torch.nn.utils.stateless|.*lstm.*|.*is using the experimental|.*self._flat_weights"
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("use", USES)
def test_a_layer_is_used_as_torchs_is(name, use, request):
    given = (name, request.getfixturevalue("alone")) if use in ("DDP", "FSDP2") else (name,)
    if use == "FSDP2" and name == "weights that a parent reads":  # they are gathered for their own module only
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            shards(*given)
        return
    if use != "compile" or name not in NOT_TRACED:
        USES[use](*given)
        return
    with pytest.raises(Exception, match=r"\S"):
        USES[use](*given)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"\S"):
        torch.compile(CASES[name].make(), fullgraph=True, backend="aot_eager")(*CASES[name].arguments())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_of_another_subnetworks_weights_are_not_used(dtype):
    """Enter subnetworks within autocast, which keeps the casts of weights until it is left."""
    model, x = partitioned(), images()
    expected = {}
    for active, update in PAIRS:
        with partnets.subnetwork(model, active, update), torch.autocast("cpu", dtype):
            expected[active, update] = model(x)
    with torch.autocast("cpu", dtype):
        whole = model(x)
        for pair in PAIRS:
            with partnets.subnetwork(model, *pair):
                assert torch.equal(model(x), expected[pair])
        assert torch.equal(model(x), whole)


def test_a_training_within_autocast_computes_with_the_stepped_parameters():
    torch.manual_seed(0)
    data = torch.randn(16, 4), torch.randint(2, (16,))
    dense, whole = partnets.single_chunk(torch.nn.Linear(4, 2), data)
    of_psi = partnets.hyper.Submodule(torch.nn.Linear(4, 4))
    partitioned = partnets.partition(torch.nn.Sequential(of_psi, torch.nn.Linear(4, 2)), (0.5, 0.5))
    for model, chunks, psi in ((dense, whole, []), (partitioned, partnets.chunk(data, (0.5, 0.5)), of_psi)):
        optimizer = partnets.optim.SGD(model, lr=1.0)
        trainer = partnets.Trainer(model, chunks, hyper=psi, optimizer=optimizer, batch_size=8)
        with torch.autocast("cpu", torch.bfloat16):
            trainer.fit(3)
            found = model(data[0])
            torch.clear_autocast_cache()
            assert torch.equal(found, model(data[0]))


@pytest.mark.full
def test_a_program_that_was_exported_inside_of_a_subnetwork_has_the_models_parameters():
    """Run the program inside: its parameters are the model's own, as those of any program."""
    model, x = partitioned(), images()
    with partnets.subnetwork(model, 1):
        program = torch.export.export(model, (x,)).module()
        torch.testing.assert_close(program(x), model(x))
    with partnets.subnetwork(model, 2):
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.full
@pytest.mark.parametrize("make", [hyper.Affine, hyper.ColourJitter])
def test_an_augmentation_is_exported_for_batches_of_any_size(make):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 5))
    model = hyper.Averaged(make(), network, samples=2).eval()
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.rand(4, 3, 8, 8),), dynamic_shapes=dynamic).module()
    x, results = torch.rand(7, 3, 8, 8), []
    for each in (program, model):
        torch.manual_seed(0)
        results.append(each(x))
    torch.testing.assert_close(*results)
