"""fp8 activations and gradients: e4m3 forward, e5m2 backward, a delayed scale for each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qstate.numerics import E4M3, E5M2, Delayed, Format, Storage, decode, encode


class Fp8Scales(NamedTuple):
    """What `fp8_cast` knows of one tensor: scales in use, and histories of largest magnitudes."""

    forward: jax.Array  # float32[1 + history], of the tensor
    backward: jax.Array  # float32[1 + history], of its gradient

    @classmethod
    def start(cls, history: int = 16) -> "Fp8Scales":
        """Scales of a tensor that has not been seen.

        Args:
          history: how many of the last magnitudes count, 1 or more.
        """
        blank = jnp.zeros(1 + Delayed(history).history, jnp.float32)
        return cls(blank, blank)

    @staticmethod
    def merge(seen: Any, gradients: Any) -> Any:
        """The scales for the next step.

        Args:
          seen: the scales that `fp8_cast` returned, or any tree of them.
          gradients: the loss's gradient with respect to the scales, the same tree.

        Returns:
          The same tree.
        """
        return jax.tree.map(
            lambda s, g: Fp8Scales(s.forward, g.backward),
            seen,
            gradients,
            is_leaf=lambda node: isinstance(node, Fp8Scales),
        )


def fp8_cast(x: jax.Array, scales: Fp8Scales, *, margin: int = 0) -> tuple[jax.Array, Fp8Scales]:
    r"""A tensor as fp8 holds it, whose gradient is held in fp8 as well.

    The tensor is rounded to e4m3, which has the precision that weights and activations want, and in
    the backward pass its gradient to e5m2, which has the range that gradients want; each with one
    scale from the largest magnitudes of the steps before (`Delayed`). It is loss scaling gone
    local: one scale a tensor instead of one for the whole backward pass.

    Args:
      x: a weight or activation, of any floating dtype and shape.
      scales: its scales from the step before, or ``Fp8Scales.start()``.
      margin: powers of two left free above the largest magnitude, 0 or more.

    Returns:
      The rounded tensor in the dtype of ``x``, and scales with the new history of the forward pass.
      That of the backward pass is handed out as the loss's gradient with respect to ``scales``:
      `Fp8Scales.merge` puts both together.

    Numerics:
      Rounded to nearest, saturating. A gradient with NaN or infinity becomes NaN whole, for
      `with_loss_scale` to skip the step, and does not enter the history. The values are those of
      fp8; whether a product of two of them runs on fp8 units is up to XLA. Batches belong inside:
      `jax.vmap` and sums of gradients over micro batches would add the scales up.

    Example:
      >>> import jax, jax.numpy as jnp, qstate
      >>> scales = {"x": qstate.Fp8Scales.start(), "w": qstate.Fp8Scales.start()}
      >>> def loss(w, scales, x):
      ...     x, seen_x = qstate.fp8_cast(x, scales["x"])
      ...     w, seen_w = qstate.fp8_cast(w, scales["w"])
      ...     return jnp.sum((x @ w) ** 2), {"x": seen_x, "w": seen_w}
      >>> step = jax.grad(loss, argnums=(0, 1), has_aux=True)
      >>> (grad, scale_grads), seen = step(jnp.ones((4, 2)), scales, jnp.full((3, 4), 1.03))
      >>> scales = qstate.Fp8Scales.merge(seen, scale_grads)
      >>> scales["x"].forward[:2], scales["w"].backward[:2]
      (Array([1.03, 1.03], dtype=float32), Array([25.4616, 25.4616], dtype=float32))

    References:
      Micikevicius et al., `FP8 Formats for Deep Learning <https://arxiv.org/abs/2209.05433>`_, 2022

      NVIDIA, `Transformer Engine, DelayedScaling
      <https://nvidia.github.io/TransformerEngine/api/common.html>`_
    """
    rounded: Any = _cast(x, scales.forward, scales.backward, margin)
    y, forward = rounded
    return y, Fp8Scales(forward, scales.backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _cast(x: jax.Array, forward: jax.Array, backward: jax.Array, margin: int) -> Any:
    del backward
    return _through(x, E4M3, forward, margin)


def _cast_forward(x, forward, backward, margin):
    return _cast(x, forward, backward, margin), backward


def _cast_backward(margin, backward, cotangents):
    gradient, _ = cotangents
    gradient, backward = _through(gradient, E5M2, backward, margin)
    return gradient, jnp.zeros_like(backward), backward


_cast.defvjp(_cast_forward, _cast_backward)


def _through(
    x: jax.Array, format: Format, scales: jax.Array, margin: int
) -> tuple[jax.Array, jax.Array]:
    """A tensor as a format holds it, and its scales after that."""
    storage = Storage(format, Delayed(scales.size - 1, margin))
    previous = scales.reshape((1,) * (x.ndim - 1) + (-1,))
    codes, new = encode(x, storage, previous=previous)
    assert isinstance(new, jax.Array)
    return decode(codes, new, storage, x.shape).astype(x.dtype), new.reshape(-1)
