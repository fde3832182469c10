"""Best-response layers match their definition, and torch's layers if nothing responds."""

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from hyper_cases import BATCH, CASES, PROPORTIONS, Call, by_definition, drawn, shift
from torch import nn

import partnets
from partnets import hyper, stn
from partnets.stn.converting import vector_of
from partnets.subnetworks.parameters import partitioned_parameters
from partnets.subnetworks.state import partitioned_modules

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# partnets.partition refuses responding batch norms.
PARTITIONED = {name: case for name, case in CASES.items() if "batch norm" not in name}
each_partitioned_case = pytest.mark.parametrize("case", PARTITIONED.values(), ids=PARTITIONED)


def gradients(y, weights, inputs):
    found = torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, found, strict=True)]


def close(first, second):
    torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)


@each_case
@pytest.mark.parametrize("centred", [False, True])
def test_each_example_has_the_weights_of_its_own_hyperparameters(case, centred):
    dense, model = case.pair(centred=centred)
    x, value = case.input(), drawn(model)
    inputs = [value, *(p for p in model.layer.parameters())]
    if x.is_floating_point():
        inputs.append(x.requires_grad_())
    with vector_of(model).at(value):
        y = model(x)
    expected, weights = by_definition(dense, model, x, value), torch.randn_like(y)
    close(y, expected)
    close(gradients(y, weights, inputs), gradients(expected, weights, inputs))
    with vector_of(model).at(value[0].detach()):
        one = model(x)
    with vector_of(model).at(value[0].detach().expand(BATCH, -1)):
        close(model(x), one)


@each_partitioned_case
def test_partitioned_layers_have_outputs_and_gradients_of_the_subnetwork(case):
    dense, model = case.pair()
    partnets.partition(model, PROPORTIONS, defaults="stored")
    shift(model)
    x, value = case.input(), drawn(model)
    merged = partnets.merge(model, 1)
    assert not partitioned_modules(merged)
    with partnets.subnetwork(model, 1, 1), vector_of(model).at(value):
        y = model(x)
        y.backward(torch.randn_like(y))
    close(y, by_definition(dense, merged, x, value))
    owned = partitioned_parameters(model)
    assert {one.parameter for one in owned} == set(model.layer.parameters())
    for one in owned:
        assert (grad := one.gradient(1)) is not None and grad.any()
        if one.is_vector:
            assert one.gradient(2) is None
        else:
            assert not grad[one.partition.mask(2)].any()


@each_partitioned_case
@pytest.mark.parametrize("scheme", ["weight", "node"])
def test_a_response_is_partitioned_like_its_weight(case, scheme):
    """Check that W_hyper has the map of W; with scheme 'node', a row of V belongs to the partition of its output."""
    _, model = case.pair()
    partnets.partition(model, PROPORTIONS, defaults="stored", scheme=scheme)
    ids = {path: partition.ids() for path, partition in partnets.partitions(model).items()}
    for layer in model.modules():
        for name in layer.names() if isinstance(layer, stn.HyperLayer) else ():
            path = next(path for path, p in model.named_parameters() if p is layer._parameters[name])
            owner = path.removesuffix(name)
            assert f"{path}_scale" in ids
            assert (
                (path in ids) == (f"{owner}hyper_{name}" in ids) == (f"{path}_rows" not in dict(model.named_buffers()))
            )
            if path not in ids:
                continue
            assert torch.equal(ids[path], ids[f"{owner}hyper_{name}"])
            if scheme == "node":
                of_outputs = ids[path].movedim(layer.rows(name), 0).flatten(1)[:, -1]  # the first row may be padding
                assert torch.equal(ids[f"{path}_scale"], of_outputs[:, None].expand_as(ids[f"{path}_scale"]))


@each_case
def test_conversion_and_freezing_change_no_output(case):
    layer = case.make().to(case.dtype)
    model = Call(layer).to(case.dtype).eval()
    x = case.input()
    for buffer in layer.buffers():  # running statistics
        buffer += 1
    before, parameters, kind = model(x), dict(layer.named_parameters()), type(layer)
    stn.convert(model, [model.dropout, model.mask], batch_dim=case.batch_dim)
    close(model(x), before)
    assert all(model.layer.get_parameter(name) is parameter for name, parameter in parameters.items())
    shift(model)
    frozen = stn.freeze(model)
    assert type(frozen.layer) is kind and type(layer) is not kind
    assert dict(frozen.named_parameters()).keys() == {f"layer.{name}" for name in parameters}
    close(frozen(x), model(x))
    elsewhere, there = stn.freeze(model, {"dropout.rate": 0.6, "mask.1": 0.2}), vector_of(model).present().detach()
    there[0] = hyper.interval(0.0, 0.9).transform.inv(torch.tensor(0.6, dtype=there.dtype))
    there[2] = torch.tensor(0.2, dtype=there.dtype).logit()
    with vector_of(model).at(there):
        close(elsewhere(x), model(x))
    assert model.dropout.values()["rate"] != 0.6


@pytest.mark.parametrize("is_shared", [False, True])
def test_attention_to_other_inputs(is_shared):
    dense, model = CASES["attention"].pair()
    query, key = torch.randn(BATCH, 4, 8).double(), torch.randn(BATCH, 3, 8).double()
    others = key, key if is_shared else torch.randn_like(key), torch.arange(3) > torch.tensor([[1], [2], [0], [2], [1]])
    value = drawn(model)
    with vector_of(model).at(value):
        close(model(query, *others), by_definition(dense, model, query, value, *others))


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.ones(4, 4).triu(1).bool(), "is_causal": True, "need_weights": False},
        {"attn_mask": torch.arange(4.0).double() * torch.ones(2 * BATCH, 4, 1), "average_attn_weights": False},
        {"key_padding_mask": torch.arange(4) == torch.ones(BATCH, 1), "attn_mask": torch.ones(4, 4).triu(2).bool()},
    ],
)
def test_masks_of_attention_are_those_of_torch(options):
    _, model = CASES["attention"].pair()
    x, frozen = CASES["attention"].input(), stn.freeze(model)
    for mine, theirs in zip(model.layer(x, x, x, **options), frozen.layer(x, x, x, **options), strict=True):
        close(mine, theirs)


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "linear of sequences", "conv2d", "conv2d of few positions", "conv1d", "embedding"),
        *("layer norm", "batch norm 2d", "attention"),
    ],
)
def test_gradcheck(name):
    _, model = CASES[name].pair()
    model.train()
    x, value = CASES[name].input(), drawn(model)
    parameters = [p.requires_grad_() for p in model.layer.parameters()]

    def compute(value, *inputs):
        with vector_of(model).at(value):
            return model(inputs[-1])

    inputs = value, *parameters, x.requires_grad_() if x.is_floating_point() else x
    torch.autograd.gradcheck(compute, inputs, fast_mode=True)
    torch.autograd.gradgradcheck(compute, inputs, fast_mode=True)


@each_case
def test_the_backward_pass_saves_little_more_than_the_input(case):
    """Check that at most 1.1 times the memory of torch's layer is saved, besides parameters and hyperparameters."""
    dense, model = case.pair()
    x = case.input()
    value = drawn(model).detach()
    given = torch.cat([x] * 8, case.batch_dim)

    def kept(module, context):
        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        saved = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context:
            y = module(given.clone())
        del y
        return sum(saved.values())

    hypers = torch.cat([value] * 8)
    own = hypers.untyped_storage().nbytes() + 8 * sum(p.numel() for p in model.parameters() if p.shape[-1:] == (3,))
    assert kept(model, vector_of(model).at(hypers)) <= 1.1 * kept(dense, nullcontext()) + 2 * own


@pytest.mark.full
@pytest.mark.parametrize("name", ["linear", "linear of sequences", "conv2d", "conv2d of few positions", "layer norm"])
def test_compiles_as_one_graph(name):
    case = CASES[name]
    _, model = case.pair()
    x, value = case.input(), drawn(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with vector_of(model).at(value):
        close(compiled(x), model(x))
    close(compiled(x), model(x))


@pytest.mark.parametrize("name", ["linear", "linear of sequences", "conv2d", "conv2d of few positions"])
def test_autocast(name):
    case = CASES[name]
    dense, model = case.pair()
    dense, model = dense.float(), model.float()
    x, value = case.input().float(), drawn(model).detach()
    exact = by_definition(dense.double(), copy.deepcopy(model).double(), x.double(), value.double())
    with torch.autocast("cpu", torch.bfloat16), vector_of(model).at(value):
        y = model(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() < 0.03 * exact.abs().max()
    assert all(p.grad.dtype == torch.float32 for p in model.layer.parameters())


@each_case
def test_states_copies_and_pickles(case):
    _, model = case.pair()
    x = case.input()
    expected = model(x)
    _, other = case.pair()
    other.load_state_dict(model.state_dict())
    for copied in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(copied(x), expected)
        assert vector_of(copied).learned[0] is copied.dropout.rate  # not the original's
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    close(torch.load(file, weights_only=False)(x), expected)


def test_conversion_takes_at_most_2_02_times_the_parameters():
    for layer in (nn.Linear(256, 256), nn.Conv2d(64, 64, 3), nn.Embedding(1000, 64), nn.LSTM(128, 128)):
        before = sum(p.numel() for p in layer.parameters())
        model = Call(layer)
        stn.convert(model, [model.dropout])
        assert sum(p.numel() for p in model.layer.parameters()) < 2.02 * before


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "conv2d", "embedding", "layer norm", "lstm", "lstm with the examples second"),
        *("attention", "attention with the examples second"),
    ],
)
@pytest.mark.parametrize("examples", [1, BATCH])
def test_other_examples_are_refused(name, examples):
    """Check that one row for all examples, such as position embeddings, is not one example for each either."""
    case = CASES[name]
    _, model = case.pair()
    x = case.input().narrow(case.batch_dim, 0, examples)
    with vector_of(model).at(drawn(model, BATCH + 1)), pytest.raises(ValueError, match=r"each of 6 examples.*skip="):
        model(x)


def test_empty_batches():
    for name in ("linear", "linear of sequences", "conv2d", "embedding"):
        case = CASES[name]
        _, model = case.pair()
        x = case.input()[:0]
        with vector_of(model).at(drawn(model, 0)):
            y = model(x)
        y.sum().backward()
        assert y.shape[0] == 0
        assert all(not p.grad.any() for p in model.layer.parameters())


def test_packed_sequences_with_per_example_hyperparameters_are_refused():
    _, model = CASES["lstm"].pair()
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(BATCH, 4, 4, dtype=torch.float64), [4] * BATCH, True)
    model.layer(packed)
    with vector_of(model).at(drawn(model)), pytest.raises(ValueError, match="packed"):
        model.layer(packed)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear of sequences", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
        ("linear of sequences", lambda x: torch.cat([x, x], -1)[..., ::2]),
        ("conv2d", lambda x: x.contiguous(memory_format=torch.channels_last)),
        ("conv3d", lambda x: x.contiguous(memory_format=torch.channels_last_3d)),
    ],
)
def test_strides_of_the_input_and_the_weights_change_no_result(name, change):
    _, model = CASES[name].pair()
    value, x = drawn(model), change(CASES[name].input())
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    other = copy.deepcopy(model) if last is None else copy.deepcopy(model).to(memory_format=last)
    with vector_of(model).at(value):
        expected = model(x.contiguous())
    with vector_of(other).at(value):
        y = other(x)
    close(y, expected)
    for mine, theirs in ((value, value), *zip(model.layer.parameters(), other.layer.parameters(), strict=True)):
        gradient = torch.autograd.grad(expected.square().sum(), mine, retain_graph=True)
        close(torch.autograd.grad(y.square().sum(), theirs, retain_graph=True), gradient)
