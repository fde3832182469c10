"""Invalid arguments raise before anything changes; the messages give the value, the expectation and a fix."""

from __future__ import annotations

import numpy as np
import pytest

import partkernels_numpy as pkn

P = pkn.Partition.random((4, 6), (0.5, 0.5), seed=0)
Q = pkn.Partition.random((4, 2, 3, 3), (0.5, 0.5), seed=0)
F = np.float32


def ones(*shape, dtype=F):
    return np.ones(shape, dtype)


def linear(**changed):
    given = {"x": ones(3, 6), "weight": ones(4, 6), "partition": P, "active": 1, **changed}
    return pkn.linear(**given)


def conv2d(**changed):
    return pkn.conv2d(**{"x": ones(2, 2, 5, 5), "weight": ones(4, 2, 3, 3), "partition": Q, "active": 1, **changed})


def grad_input(input_shape):
    return pkn.conv2d_grad_input(ones(2, 4, 3, 3), ones(4, 2, 3, 3), Q, 1, input_shape)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: linear(x=[[1.0] * 6]), TypeError, r"x is a list; pass a numpy.ndarray"),
        (lambda: linear(x=np.ma.masked_array(ones(3, 6))), TypeError, "x is a MaskedArray"),
        (lambda: linear(x=ones(3, 6, dtype="f2")), TypeError, "x is float16; pass float32, float64 or ml_dtypes"),
        (lambda: linear(x=ones(3, 6, dtype=">f4")), TypeError, "x is >f4; pass .* byte order"),
        (lambda: linear(weight=ones(4, 6, dtype=">f4")), TypeError, "the weight is >f4"),
        (lambda: linear(x=ones(3, 6, dtype=float)), pkn.InputError, "x is float64 and the weight float32; cast"),
        (lambda: linear(x=ones(3, 5)), pkn.InputError, r"x has shape \(3, 5\); this weight takes \[..., 6\]"),
        (lambda: linear(x=np.array(1, F)), pkn.InputError, r"x has shape \(\)"),
        (lambda: linear(weight=ones(6, 4)), ValueError, r"shape \(6, 4\) and its partition \(4, 6\)"),
        (lambda: linear(partition=P.map), TypeError, "partition is a ndarray; pass a partkernels_numpy.Partition"),
        (lambda: linear(active=0), ValueError, r"active=0, but this partition has 2 parts; pass an int in 1..2"),
        (lambda: linear(bias=ones(6)), pkn.InputError, r"bias has shape \(6,\); this weight takes \[4\], or \[2, 4\]"),
        (lambda: linear(bias=ones(4, dtype=float)), pkn.InputError, "bias is float64 and the weight float32"),
        (lambda: linear(weight=ones(4, 2, 3, 3), partition=Q), ValueError, r"linear takes \[out_features, in_features"),
        (
            lambda: pkn.linear_grad_input(ones(3, 6), ones(4, 6), P, 1),
            pkn.InputError,
            r"grad_output has shape \(3, 6\)",
        ),
        (lambda: pkn.linear_grad_weight(ones(2, 4), ones(3, 6), P, 1), pkn.InputError, "last dimension may differ"),
        (
            lambda: pkn.linear_grad_weight(ones(3, 4), ones(3, 6), P, 3),
            ValueError,
            "update=3, but this partition has 2 parts",
        ),
        (lambda: pkn.linear_grad_weight(ones(3, 4), ones(3, 6), Q, 1), ValueError, "linear takes"),
        (lambda: conv2d(x=ones(2, 5, 5)), pkn.InputError, r"takes \[batch, 2, height, width\]"),
        (lambda: conv2d(x=ones(2, 3, 5, 5)), pkn.InputError, "this weight with groups=1 takes"),
        (lambda: conv2d(groups=3), ValueError, "groups=3; pass an int that divides the weight's 4"),
        (lambda: conv2d(stride=2**64), ValueError, r"each at least 1 and below 2\*\*63"),
        (lambda: grad_input(8), ValueError, "input_shape=8; pass x.shape"),
        (lambda: grad_input((1, 2, 5.0, 5)), ValueError, r"input_shape=\(1, 2, 5.0, 5\); pass x.shape"),
        (lambda: conv2d(weight=ones(4, 6), partition=P), ValueError, r"conv2d takes \[out, in / groups, height, width"),
        (
            lambda: pkn.conv2d_grad_input(ones(2, 4, 4, 4), ones(4, 2, 3, 3), Q, 1, (2, 2, 5, 5)),
            pkn.InputError,
            r"grad_output has shape \(2, 4, 4, 4\); this convolution makes \(2, 4, 3, 3\)",
        ),
        (
            lambda: pkn.conv2d_grad_weight(ones(2, 4, 4, 4), ones(2, 2, 5, 5), Q, 1),
            pkn.InputError,
            "this convolution makes",
        ),
        (lambda: pkn.Partition.random((), (1.0,), seed=0), ValueError, "is empty"),
        (lambda: pkn.Partition.random((1, 1, 1, 1, 1), (1.0,), seed=0), ValueError, "5 dimensions; pass 1 to 4"),
        (lambda: pkn.Partition.from_ids(ones(2, 2)), ValueError, "ids are float32; pass an array of numpy.uint8"),
        (lambda: pkn.Partition.from_ids([[1, 2]]), ValueError, "ids are list"),
        (lambda: pkn.Partition.from_ids(np.zeros((2, 2), np.uint8)), ValueError, "numbered from 1: pass ids in 1..C"),
        (lambda: pkn.Partition((4, 6), 2, P.map[:, :8]), ValueError, r"of shape \(4, 16\)"),
        (lambda: pkn.Partition((4, 6), 3, np.full((4, 16), 255, np.uint8)), ValueError, "id above 3"),
        (lambda: pkn.Partition((4, 6), 2, np.full((4, 16), 255, np.uint8)), ValueError, "padding that is not 0"),
        (lambda: pkn.Uniform(0.0, 1), ValueError, "scale=0.0 is out of range"),
        (lambda: pkn.Stored([1.0]), TypeError, "the array of Stored is a list"),
        (lambda: pkn.Stored(ones(2)).values((3,)), ValueError, "differs from the shape of the stored defaults"),
        (
            lambda: pkn.Partition.random((4, 6), (0.5, 0.5), seed=0, defaults=pkn.Stored(ones(6, 4))),
            ValueError,
            r"the stored defaults have shape \(6, 4\)",
        ),
        (
            lambda: linear(partition=pkn.Partition((4, 6), 2, P.map, pkn.Stored(ones(4, 6, dtype=float)))),
            TypeError,
            "the stored defaults are float64 and the weight is float32",
        ),
        (lambda: pkn.Uniform(0.1, 1).values((2, 2), np.float16), TypeError, "dtype is float16"),
        (lambda: pkn.Uniform(0.1, 1).values((2, 2), None), TypeError, "dtype is None"),
        (lambda: pkn.Zeros().values((3, 2, 2, 2, 5)), ValueError, "5 dimensions; pass 1 to 4"),
        (lambda: P.mask(3), ValueError, "partition=3, but this partition has 2 parts"),
        (lambda: pkn.Partition.random((2, 2), (1.0,), seed=0, defaults=False), TypeError, "defaults=False; pass Zeros"),
        (lambda: pkn.Partition.random((2, 2), 0.5, seed=0), TypeError, "proportions 0.5 are not a sequence of numbers"),
    ],
)
def test_calls_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def sgd(parameter, *rest, partition=P, update=1, **numbers):
    pkn.sgd_step(parameter, *(rest or (np.ones_like(parameter), None)), partition, update, **{"lr": 0.1, **numbers})


def adam(parameter, *rest, partition=P, **numbers):
    given = [*rest, *(np.ones_like(parameter) for _ in range(3 - len(rest)))]
    pkn.adam_step(parameter, *given, partition, 1, **{"step": 1, "lr": 0.1, **numbers})


def locked(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda p: sgd(locked(p)), ValueError, r"parameter is read-only; pass parameter.copy\(\)"),
        (lambda p: sgd(p, p, None), ValueError, "parameter and grad share memory"),
        (lambda p: sgd(p, ones(4, 6), p, momentum=0.9), ValueError, "parameter and momentum_buffer share memory"),
        (lambda p: sgd(p, ones(4, 6), None, momentum=0.9), ValueError, "without a momentum_buffer"),
        (lambda p: sgd(p, ones(6, 4), None), ValueError, r"grad has shape \(6, 4\) and the parameter \(4, 6\)"),
        (lambda p: sgd(p, ones(4, 6, dtype=float), None), pkn.InputError, "grad is float64 and the parameter float32"),
        (lambda p: sgd(p, None, None), TypeError, "grad is a NoneType"),
        (lambda p: sgd(p, update=None), ValueError, "update=None, but this partition has 2 parts"),
        (lambda p: sgd(p, lr=None), TypeError, "lr=None is a NoneType; pass a number"),
        (lambda p: sgd(p, ones(4, 6), ones(4, 6), momentum=0.9, nesterov="no"), TypeError, "nesterov='no'; pass True"),
        (lambda p: adam(p, decoupled="no"), TypeError, "decoupled='no'; pass True or False"),
        (lambda p: adam(p, betas=0.9), ValueError, "betas=0.9; pass two numbers"),
        (lambda p: adam(p, step=2**63), ValueError, "step=9223372036854775808; pass the number"),
        (
            lambda p: sgd(p, partition=pkn.Partition((4, 6), 2, P.map, pkn.Stored(p))),
            ValueError,
            "parameter and the array of Stored share memory",
        ),
        (
            lambda p: sgd(np.lib.stride_tricks.sliding_window_view(p.ravel(), 2, writeable=True), partition=None),
            ValueError,
            "several entries of parameter share memory",
        ),
        (lambda p: sgd(p, nesterov=True), ValueError, "nesterov=True with momentum=0"),
        (lambda p: sgd(p, partition=Q), ValueError, "its partition"),
        (lambda p: adam(p, ones(4, 6), moment := ones(4, 6), moment), ValueError, "exp_avg and exp_avg_sq share"),
        (lambda p: adam(p, ones(4, 6), locked(ones(4, 6))), ValueError, "exp_avg is read-only"),
        (
            lambda p: adam(p, ones(4, 6), np.lib.stride_tricks.as_strided(ones(6), (4, 6), (0, 4))),
            ValueError,
            "several entries of exp_avg share memory",
        ),
    ],
)
def test_steps_are_refused_and_change_nothing(step, error, message):
    parameter = ones(4, 6)
    with pytest.raises(error, match=message):
        step(parameter)
    np.testing.assert_array_equal(parameter, ones(4, 6))


def test_arrays_that_are_read_may_be_locked():
    x, weight, grad = locked(ones(3, 6)), locked(ones(4, 6)), locked(ones(4, 6))
    linear(x=x, weight=weight)
    sgd(ones(4, 6), grad, None)


def test_an_empty_parameter_and_one_with_any_stride_along_one_entry_are_stepped():
    empty = np.zeros((0, 3))
    pkn.sgd_step(empty, empty.copy(), None, None, None, lr=1.0)
    row = np.lib.stride_tricks.as_strided(np.zeros(4), (1, 4), (3, 8))
    pkn.sgd_step(row, np.ones((1, 4)), None, None, None, lr=1.0)
    assert (row == -1).all()


def test_values_of_stored_defaults_are_a_copy():
    stored = pkn.Stored(ones(2, 2))
    stored.values((2, 2))[:] = 7
    np.testing.assert_array_equal(stored.array, ones(2, 2))
