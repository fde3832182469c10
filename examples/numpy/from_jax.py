"""A subnetwork's linear layer in JAX, through jax.pure_callback, for compiled, differentiated and batched programs.

usage: python from_jax.py          (on a CPU, with jax installed)
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import partkernels_numpy as pkn


def _call(function, shape: tuple[int, ...], dtype, *arrays):
    """Call a function of numpy arrays that returns an array of known shape and dtype."""
    result = jax.ShapeDtypeStruct(shape, dtype)
    return jax.pure_callback(
        lambda *given: function(*map(np.asarray, given)), result, *arrays, vmap_method="sequential"
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def linear(x, weight, partition: pkn.Partition, active: int, update: int | None):
    """Compute x @ w_s^(active).T. The weight's gradient covers partition `update` only, and is 0 if update is None.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features], x's dtype.
        partition, active, update: as in partkernels; static when a program is traced.
    """
    if update is not None and update > active:
        raise ValueError(f"update={update} is inactive in subnetwork {active}; pass an int from 1 to {active}.")
    shape = *x.shape[:-1], weight.shape[0]
    return _call(lambda x, w: pkn.linear(x, w, partition, active), shape, x.dtype, x, weight)


def _forward(x, weight, partition, active, update):
    return linear(x, weight, partition, active, update), (x, weight)


def _backward(partition, active, update, saved, grad):
    x, weight = saved
    grad_x = _call(lambda g, w: pkn.linear_grad_input(g, w, partition, active), x.shape, x.dtype, grad, weight)
    if update is None:
        return grad_x, jnp.zeros_like(weight)
    own = _call(lambda g, x: pkn.linear_grad_weight(g, x, partition, update), weight.shape, x.dtype, grad, x)
    return grad_x, own


linear.defvjp(_forward, _backward)


def main() -> None:
    partition = pkn.Partition.random((4, 6), (0.5, 0.3, 0.2), seed=0, defaults=pkn.Uniform(0.5, seed=1))
    key = jax.random.key(0)
    x, weight = jax.random.normal(key, (3, 6)), jax.random.normal(key, (4, 6))

    @jax.jit
    def loss(x, weight):
        return (linear(x, weight, partition, 2, 2) ** 2).sum()

    def defined(x, weight):
        """Compute the same loss with masks, in JAX only."""
        live, own = jnp.asarray(partition.ids() <= 2), jnp.asarray(partition.mask(2))
        learning = jnp.where(own, weight, jax.lax.stop_gradient(weight))
        return ((x @ jnp.where(live, learning, partition.defaults.values((4, 6))).T) ** 2).sum()

    for found, expected in zip(*(jax.grad(f, argnums=(0, 1))(x, weight) for f in (loss, defined)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    batched = jax.vmap(lambda x: linear(x, weight, partition, 2, None))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batched[1], 2 * linear(x, weight, partition, 2, None), rtol=1e-5)
    print(f"loss {loss(x, weight):.3f}; its gradients are those of masks in JAX")


if __name__ == "__main__":
    main()
