"""Autocast: output and gradient dtypes match torch's, and results match those of a model in the lower precision."""

import copy

import pytest
import torch
from small_network import CASES, PROPORTIONS, dense, images, partitioned, perturbed

import partnets

DTYPES = [torch.bfloat16, torch.float16]


def seen(model, x, dtype):
    """Return the dtypes of each layer's output, and of the gradients of x and all parameters."""
    outputs, x = [], x.clone().requires_grad_()
    for layer in model:
        layer.register_forward_hook(lambda layer, inputs, output: outputs.append(output.dtype))
    with torch.autocast("cpu", dtype):
        y = model(x)
    y.float().sum().backward()
    return outputs, [x.grad.dtype, *(parameter.grad.dtype for parameter in model.parameters())]


@pytest.mark.parametrize("defaults", ["seed", "zero", "stored"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_and_gradients_have_torchs_dtypes(defaults, dtype):
    ours, x = partnets.partition(dense(), PROPORTIONS, defaults=defaults), images()
    with partnets.subnetwork(ours, 2, 1):
        found = seen(ours, x, dtype)
    assert found == seen(dense(), x, dtype)


@pytest.mark.parametrize("defaults", ["seed", "stored"])
def test_autocast_gives_the_outputs_of_a_bfloat16_layer(defaults):
    layer = perturbed(partnets.Linear(8, 4, proportions=PROPORTIONS, seed=0, defaults=defaults), 1.0)
    lowered, x = copy.deepcopy(layer).bfloat16(), torch.randn(3, 8)
    for active in (1, 2, 3):
        with partnets.subnetwork(layer, active), partnets.subnetwork(lowered, active), torch.autocast("cpu"):
            torch.testing.assert_close(layer(x), lowered(x.bfloat16()), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_of_another_subnetworks_weights_are_not_used(dtype):
    """Enter subnetworks within autocast, which keeps the casts of weights until it is left."""
    model, x = partitioned(), images()
    expected = {}
    for active, update in CASES:
        with partnets.subnetwork(model, active, update), torch.autocast("cpu", dtype):
            expected[active, update] = model(x)
    with torch.autocast("cpu", dtype):
        whole = model(x)
        for pair in CASES:
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
