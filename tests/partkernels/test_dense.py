"""Dense products by the library's kernels and by PyTorch's agree within rounding."""

import pytest
import torch
import torch.nn.functional as F

import partkernels
from partkernels.operators import dense

SHAPES = [((5, 7), 3), ((2, 3, 16), 8), ((0, 7), 3), ((64, 96), 48)]


@pytest.fixture(params=[True, False], ids=["ours", "torch's"])
def ours(request, monkeypatch):
    if request.param and partkernels.backends()["cpu"] != "ready":
        pytest.skip("the C++ library is not built")
    monkeypatch.setattr(dense, "_is_faster", lambda: request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "out"), SHAPES)
def test_products_and_gradients(ours, dtype, shape, out):
    x, weight, bias = torch.randn(shape), torch.randn(out, shape[-1]), torch.randn(out)
    exact = [each.to(dtype).double().requires_grad_() for each in (x, weight, bias)]
    given = [each.to(dtype).requires_grad_() for each in (x, weight, bias)]
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    y, expected = dense.linear(*given), F.linear(*exact)
    torch.testing.assert_close(y.double(), expected, **tolerance)
    grad = torch.randn_like(expected)
    found = torch.autograd.grad(y, given, grad.to(dtype))
    for one, other in zip(found, torch.autograd.grad(expected, exact, grad), strict=True):
        torch.testing.assert_close(one.double(), other, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(dense.linear_grad_input(grad.to(dtype), given[1]), found[0], **tolerance)
        torch.testing.assert_close(dense.linear_grad_weight(grad.to(dtype), given[0]), found[1], **tolerance)


def test_any_strides(ours):
    x, weight = torch.randn(8, 6, 5).transpose(0, 2), torch.randn(8, 7).t()
    torch.testing.assert_close(dense.linear(x, weight), F.linear(x, weight))
    grad = torch.ones(()).expand(5, 6, 7)
    torch.testing.assert_close(dense.linear_grad_input(grad, weight), grad @ weight)
    torch.testing.assert_close(dense.linear_grad_weight(grad, x), torch.einsum("abi,abj->ij", grad, x))


def test_products_on_the_reference_backend_are_torchs(ours):
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    with partkernels.use_backend("reference"):
        assert torch.equal(dense.linear(x, weight), F.linear(x, weight))


def test_second_derivatives(ours):
    inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    torch.autograd.gradgradcheck(dense.linear, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_dense_convolutions_and_gradients_agree_with_float64(dtype, groups):
    """Include dilated convolutions, in which PyTorch's bfloat16 kernels fail (docs/torch-faults.md)."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator) for size in ((2, 6, 9, 8), (4, 6 // groups, 3, 2)))
    geometry = (1, 2), (2, 1), (2, 1), groups
    exact = [one.to(dtype).double().requires_grad_() for one in (x, weight)]
    expected = F.conv2d(*exact, None, *geometry)
    grad = torch.randn(expected.shape, generator=generator).to(dtype)
    grads = torch.autograd.grad(expected, exact, grad.double())
    x, weight = (one.detach().to(dtype).requires_grad_() for one in exact)
    y = dense.conv2d(x, weight, None, *geometry)
    ours = [dense.conv2d_grad_input(grad, weight, x.shape, *geometry)]
    ours.append(dense.conv2d_grad_weight(grad, x, weight.shape[2:], *geometry))
    through = torch.autograd.grad(y, (x, weight), grad)
    tolerance = {"rtol": 20 * torch.finfo(dtype).eps, "atol": 20 * torch.finfo(dtype).eps}
    for found, truth in zip((y, *ours, *through), (expected, *grads, *grads), strict=True):
        torch.testing.assert_close(found.double(), truth, **tolerance)


@pytest.mark.parametrize(
    "vendor, family, flags, is_faster",
    [
        ("AuthenticAMD", 26, "avx2 avx512f", True),
        ("AuthenticAMD", 25, "avx2 avx512f", False),
        ("AuthenticAMD", 26, "avx2", False),
        ("GenuineIntel", 26, "avx2 avx512f", False),
    ],
)
def test_products_are_ours_where_the_vendors_leave_half_of_the_processor_unused(vendor, family, flags, is_faster):
    cpuinfo = f"vendor_id\t: {vendor}\ncpu family\t: {family}\nflags\t\t: fpu {flags}\n"
    assert dense.leaves_half_unused(cpuinfo) is is_faster


def test_products_are_not_ours_on_an_unknown_processor():
    assert not dense.leaves_half_unused("processor\t: 0\nFeatures\t: fp asimd\n")
