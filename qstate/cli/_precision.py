"""In what dtypes a demo's run computes, and what that takes around its optimizer."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import jmp
import optax

import qstate

_FULL = jmp.get_policy("full")


@dataclasses.dataclass(frozen=True)
class Precision:
    """A jmp policy, a loss scale and how master weights are kept.

    Attributes:
      policy: dtypes of parameters, computation and output.
      loss_scale: a jmp loss scale.
      remainder: as for `qstate.with_master_weights`.
    """

    policy: jmp.Policy = _FULL
    loss_scale: jmp.LossScale = jmp.NoOpLossScale()  # noqa: RUF009 - frozen
    remainder: int | None = None

    @property
    def mixed(self) -> bool:
        """Whether it differs from float32 throughout."""
        return self.policy != _FULL or self._scales

    @property
    def _scales(self) -> bool:
        return not isinstance(self.loss_scale, jmp.NoOpLossScale)

    def wrap(
        self, tx: optax.GradientTransformationExtraArgs
    ) -> optax.GradientTransformationExtraArgs:
        """The optimizer in what this precision takes: master weights, then the loss scale."""
        if jnp.dtype(self.policy.param_dtype).itemsize < 4:
            tx = qstate.with_master_weights(tx, self.remainder)
        return qstate.with_loss_scale(tx, self.loss_scale) if self.mixed else tx

    def scale_in(self, opt_state: Any) -> jmp.LossScale:
        """The loss scale in a state of the wrapped optimizer."""
        return qstate.loss_scale(opt_state) if self.mixed else self.loss_scale

    def __str__(self) -> str:
        names = ("param_dtype", "compute_dtype", "output_dtype")
        dtypes = [jnp.dtype(getattr(self.policy, name)).name for name in names]
        scale = {jmp.NoOpLossScale: "none", jmp.StaticLossScale: "static"}
        held = scale.get(type(self.loss_scale), "dynamic")
        master = f", {self.remainder}-bit remainders" if self.remainder else ""
        return (
            f"parameters in {dtypes[0]}{master}, computed in {dtypes[1]}, output in {dtypes[2]}, "
            f"loss scale {held}"
        )


def parse_precision(policy: str | None, loss_scale: str, remainder: int | None) -> Precision:
    """What the command line's words stand for.

    Args:
      policy: a jmp policy such as ``"params=bfloat16,compute=bfloat16,output=float32"``, or None.
      loss_scale: ``"none"``, ``"dynamic"`` or a number.
      remainder: None, 16 or 8.

    Raises:
      ValueError: for words that stand for nothing.
    """
    parsed = _FULL
    if policy is not None:
        try:
            parsed = jmp.get_policy(policy)
        except ValueError as error:
            raise ValueError(
                f"--policy {policy}: {error}; such as "
                "params=bfloat16,compute=bfloat16,output=float32"
            ) from error
    if remainder is not None and jnp.dtype(parsed.param_dtype).itemsize >= 4:
        raise ValueError("--remainder is for parameters in 16 bits: --policy params=bfloat16,...")
    return Precision(parsed, _parse_loss_scale(loss_scale), remainder)


def _parse_loss_scale(word: str) -> jmp.LossScale:
    if word == "none":
        return jmp.NoOpLossScale()
    if word == "dynamic":
        return jmp.DynamicLossScale(jnp.float32(2.0**15))
    try:
        number = float(word)
        if not 0 < number < 2.0**126:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--loss-scale must be none, dynamic or a positive number, got {word}"
        ) from None
    return jmp.StaticLossScale(jnp.float32(number))
