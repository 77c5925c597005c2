"""A loss scale as it lives in an optimizer's state: one number, and the loop that moves it.

It has jmp's settings, but keeps those that a `jmp.DynamicLossScale` loses on its way through
`jax.jit`, and holds its number in float32 whatever dtype it was given in.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jmp
import numpy as np

from qstate.precision._dtypes import in_float32, is_inexact

LARGEST_SCALE = 2.0**126
"""The largest power of two whose reciprocal is a normal float32, which no machine flushes."""


@dataclasses.dataclass(frozen=True)
class ScalerSettings:
    """What does not change while a loss scale does.

    Attributes:
      kind: ``"none"``, ``"static"`` or ``"dynamic"``, for jmp's three types.
      period: clean steps in a row after which a dynamic scale grows.
      factor: by how much it grows, and falls on an overflow.
      smallest: where it stops falling.
      largest: where it stops growing.
    """

    kind: str
    period: int
    factor: float
    smallest: float
    largest: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scaler:
    """A loss scale.

    Attributes:
      value: float32[], the scale.
      counter: int32[], clean steps since it last moved.
      settings: static.
    """

    value: jax.Array
    counter: jax.Array
    settings: ScalerSettings = dataclasses.field(metadata={"static": True})

    def unscale(self, gradients: Any) -> Any:
        """Gradients in float32, divided by the scale there."""
        if self.settings.kind == "none":
            return jax.tree.map(in_float32, gradients)
        inverse = 1 / self.value
        return jax.tree.map(lambda g: in_float32(g) * inverse if is_inexact(g) else g, gradients)

    def adjust(self, finite: jax.Array) -> "Scaler":
        """The scale after a step.

        As `torch.amp.GradScaler` has it::

            if finite:
              counter += 1
              if counter == period:
                scale, counter = scale * factor if that is not too large, 0
            else:
              scale, counter = max(smallest, scale / factor), 0
        """
        if self.settings.kind != "dynamic":
            return self
        s = self.settings
        grown = self.value * s.factor
        grown = jnp.where(grown <= s.largest, grown, self.value)
        full = self.counter + 1 >= s.period
        value = jnp.where(
            finite,
            jnp.where(full, grown, self.value),
            jnp.maximum(self.value / s.factor, s.smallest),
        )
        counter = jnp.where(finite & ~full, self.counter + 1, 0)
        return Scaler(value.astype(jnp.float32), counter.astype(jnp.int32), s)

    def as_jmp(self) -> jmp.LossScale:
        """The jmp loss scale that this one stands for."""
        s = self.settings
        if s.kind == "none":
            return jmp.NoOpLossScale()
        if s.kind == "static":
            return jmp.StaticLossScale(self.value)
        return jmp.DynamicLossScale(
            self.value,
            counter=self.counter,
            period=s.period,
            factor=s.factor,  # pyright: ignore[reportArgumentType]
            min_loss_scale=np.float32(s.smallest),  # pyright: ignore[reportArgumentType]
        )


def scaler_of(loss_scale: jmp.LossScale, largest: float) -> Scaler:
    """A jmp loss scale as part of a state.

    Raises:
      TypeError: for what is no jmp loss scale.
      ValueError: for numbers that no loop can work with.
    """
    if isinstance(loss_scale, jmp.NoOpLossScale):
        return _scaler(1.0, 0, ScalerSettings("none", 1, 1.0, 1.0, 1.0))
    if isinstance(loss_scale, jmp.StaticLossScale):
        settings = ScalerSettings("static", 1, 1.0, 0.0, largest)
        return _checked(loss_scale.loss_scale, 0, settings)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        settings = ScalerSettings(
            "dynamic",
            int(loss_scale.period),
            float(loss_scale.factor),
            float(np.float32(loss_scale.min_loss_scale)),  # as the scale is compared with it
            float(largest),
        )
        return _checked(loss_scale.loss_scale, loss_scale.counter, settings)
    raise TypeError(
        "loss_scale is jmp.NoOpLossScale(), jmp.StaticLossScale(2.0**15) or "
        f"jmp.DynamicLossScale(jnp.float32(2.0**15)); got {loss_scale!r}"
    )


def _scaler(value: Any, counter: Any, settings: ScalerSettings) -> Scaler:
    # Copies: the state may be donated, and the caller's own arrays must not go with it.
    return Scaler(
        jnp.array(value, jnp.float32, copy=True), jnp.array(counter, jnp.int32, copy=True), settings
    )


def _checked(value: Any, counter: Any, settings: ScalerSettings) -> Scaler:
    s = settings
    if s.kind == "dynamic":
        if s.period < 1:
            raise ValueError(f"a loss scale grows after period >= 1 clean steps, got {s.period}")
        if not (math.isfinite(s.factor) and s.factor > 1):
            raise ValueError(f"a loss scale's factor is a number above 1, got {s.factor}")
        if not 0 < s.smallest <= s.largest:
            raise ValueError(
                f"the smallest loss scale ({s.smallest:g}) must be positive and at most the "
                f"largest ({s.largest:g})"
            )
    if not s.largest <= LARGEST_SCALE:
        raise ValueError(
            f"max_loss_scale is 2^126 at most, whose reciprocal is a normal float32; got "
            f"{s.largest:g}"
        )
    if not isinstance(value, jax.core.Tracer):
        number = float(value)
        if not (math.isfinite(number) and number > 0):
            raise ValueError(
                f"a loss scale is a positive finite number, got {number:g} "
                f"({jnp.result_type(value)}; float16 ends at 65504)"
            )
        if not s.smallest <= number <= s.largest:
            raise ValueError(
                f"the loss scale {number:g} is not between its smallest ({s.smallest:g}) and its "
                f"largest ({s.largest:g}); give jmp.DynamicLossScale a min_loss_scale, or "
                "with_loss_scale a max_loss_scale"
            )
    return _scaler(value, counter, settings)
