"""Every layer is compiled, autocast, exported, replicated and sharded as torch's is."""

import io
import tempfile

import pytest
import torch
import torch.distributed as dist
from layers import CASES
from torch.utils._pytree import tree_leaves

import partnets

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
    layer, theirs = CASES[name].partitioned(), CASES[name].make()
    with torch.autocast("cpu", dtype=torch.bfloat16), partnets.subnetwork(layer, 2, 1):
        try:
            dtype = first(theirs(*CASES[name].arguments())).dtype
        except RuntimeError as error:  # some processors have no bfloat16 LSTM in torch
            with pytest.raises(RuntimeError, match=str(error)[:40]):
                layer(*CASES[name].arguments())
            return
        y = first(layer(*CASES[name].arguments()))
        assert y.dtype == dtype
        y.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in layer.parameters())


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
    program = torch.export.export(partnets.merge(layer, 2), CASES[name].arguments())
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
