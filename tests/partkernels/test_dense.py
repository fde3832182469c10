"""Dense products by the library's kernels and by PyTorch's agree within rounding."""

import pytest
import torch
import torch.nn.functional as F

import partkernels
from partkernels.operators import dense


@pytest.fixture(params=[True, False], ids=["ours", "torch's"])
def ours(request, monkeypatch):
    if request.param and partkernels.backends()["cpu"] != "ready":
        pytest.skip("the C++ library is not built")
    monkeypatch.setattr(dense, "_is_faster", lambda: request.param)


def same(found, expected, tolerance):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def exact_and_given(dtype, *shapes):
    """Return random float64 numbers that the dtype can represent, and the same numbers in the dtype."""
    exact = [torch.randn(shape).to(dtype).double().requires_grad_() for shape in shapes]
    return exact, [each.detach().to(dtype).requires_grad_() for each in exact]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("shape", "out"), [((5, 7), 3), ((2, 3, 16), 8), ((0, 7), 3), ((64, 96), 48)])
def test_products_and_gradients(ours, dtype, shape, out):
    exact, given = exact_and_given(dtype, shape, (out, shape[-1]), (out,))
    y, expected = dense.linear(*given), F.linear(*exact)
    grad = torch.randn_like(expected).to(dtype)
    grads = torch.autograd.grad(expected, exact, grad.double())
    through = torch.autograd.grad(y, given, grad)
    backwards = dense.linear_grad_input(grad, given[1]), dense.linear_grad_weight(grad, given[0])
    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-4
    same((y, *through, *backwards), (expected, *grads, *grads[:2]), tolerance)


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
    geometry = (1, 2), (2, 1), (2, 1), groups
    exact, (x, weight) = exact_and_given(dtype, (2, 6, 9, 8), (4, 6 // groups, 3, 2))
    expected = F.conv2d(*exact, None, *geometry)
    grad = torch.randn(expected.shape).to(dtype)
    grads = torch.autograd.grad(expected, exact, grad.double())
    y = dense.conv2d(x, weight, None, *geometry)
    through = torch.autograd.grad(y, (x, weight), grad)
    backwards = [dense.conv2d_grad_input(grad, weight, x.shape, *geometry)]
    backwards.append(dense.conv2d_grad_weight(grad, x, weight.shape[2:], *geometry))
    same((y, *through, *backwards), (expected, *grads, *grads), 20 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "cpuinfo, is_faster",
    [
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nflags\t\t: fpu avx2 avx512f\n", True),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 25\nflags\t\t: fpu avx2 avx512f\n", False),
        ("vendor_id\t: AuthenticAMD\ncpu family\t: 26\nflags\t\t: fpu avx2\n", False),
        ("vendor_id\t: GenuineIntel\ncpu family\t: 26\nflags\t\t: fpu avx2 avx512f\n", False),
        ("processor\t: 0\nFeatures\t: fp asimd\n", False),
    ],
)
def test_products_are_ours_where_the_vendors_leave_half_of_the_processor_unused(cpuinfo, is_faster):
    assert dense.leaves_half_unused(cpuinfo) is is_faster
