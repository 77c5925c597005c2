"""How one average is held between steps, and the recipes that have a name."""

import dataclasses

from qstate.numerics._format import Format
from qstate.numerics._formats import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    F32,
    UDYNAMIC8,
    UE2M2,
    ULINEAR4,
)
from qstate.numerics._minifloat import Minifloat
from qstate.numerics._scaling import Block, NoScale, Rank1, Scaling

ROUNDINGS = ("nearest", "stochastic")
DOMAINS = ("linear", "sqrt")
_LARGEST_SCALED_TOP = 2.0**64


@dataclasses.dataclass(frozen=True)
class Storage:
    """How one average is held between steps: on which grid, scaled how, rounded how.

    Args:
      format: the grid, such as ``qstate.E4M3``.
      scaling: ``NoScale()``, ``PerTensor()``, ``Delayed(history, margin)``,
        ``Block(size, scale)`` or ``Rank1()``.
      rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (unbiased; needs a key).
      domain: ``"linear"``, or ``"sqrt"`` to keep the square root of an average that is not
        negative:
        twice the range, half the relative precision. Stochastic rounding stays unbiased in the
        average itself.

    Raises:
      TypeError, ValueError: for settings that cannot work, with those that would.

    Example:
      >>> import qstate
      >>> print(qstate.Storage(qstate.E4M3, qstate.Block(128), rounding="stochastic"))
      e4m3, block 128, stochastic
    """

    format: Format
    scaling: Scaling = NoScale()  # noqa: RUF009 - frozen
    rounding: str = "nearest"
    domain: str = "linear"

    def __post_init__(self):
        if not isinstance(self.format, Format):
            raise TypeError(f"format must be a Format such as qstate.E4M3, got {self.format!r}")
        if not isinstance(self.scaling, Scaling):
            raise TypeError(
                "scaling must be NoScale(), PerTensor(), Delayed(...), Block(...) or Rank1(), "
                f"got {self.scaling!r}"
            )
        if self.rounding not in ROUNDINGS:
            raise ValueError(f"rounding must be one of {ROUNDINGS}, got {self.rounding!r}")
        if self.domain not in DOMAINS:
            raise ValueError(f"domain must be one of {DOMAINS}, got {self.domain!r}")
        if isinstance(self.scaling, NoScale):
            return
        if self.format.top > _LARGEST_SCALED_TOP:
            raise ValueError(
                f"{self.format.name} has float32's range and needs no scale: use NoScale()"
            )
        if self.scaling.scale == "power_of_two" and not isinstance(self.format, Minifloat):
            raise ValueError(
                f'scale="power_of_two" keeps the grid of a minifloat; {self.format.name} is a '
                'codebook: use scale="float32" or "bfloat16"'
            )

    @property
    def exact(self) -> bool:
        """Whether float32 values are kept as they are."""
        return self.format == F32 and self.domain == "linear"

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic" and not self.exact

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.format.bits <= 4

    @property
    def has_scales(self) -> bool:
        return not (isinstance(self.scaling, NoScale) and self.format.holds_nan)

    @property
    def layout(self) -> str:
        """A name for what has to agree for codes to be read: format, scaling and domain."""
        domain = "sqrt" if self.domain == "sqrt" else ""
        return "_".join(part for part in (self.format.name, self.scaling.layout, domain) if part)

    def without_zero(self) -> "Storage":
        """The same storage, in which what is not zero is never stored as zero.

        Zero is a scale of 0, or zero's own code where there is no scale; in a block that is not all
        zero it becomes the smallest code.
        """
        return dataclasses.replace(self, format=self.format.without_zero())

    def __str__(self) -> str:
        parts = [str(self.format), str(self.scaling), self.rounding]
        if self.exact:
            return self.format.name
        return ", ".join(parts + (["square root"] if self.domain == "sqrt" else []))


_RECIPES = {
    "fp32": (Storage(F32), Storage(F32)),
    "bf16": (Storage(BF16, NoScale(), "stochastic"), Storage(BF16, NoScale(), "stochastic")),
    "fp8": (Storage(E4M3, Block(128), "stochastic"), Storage(E4M3, Block(128), "stochastic")),
    "fp4": (
        Storage(E2M1, Block(128), "stochastic"),
        Storage(UE2M2, Block(128), "stochastic", domain="sqrt"),
    ),
    "int8": (
        Storage(DYNAMIC8, Block(256), "stochastic"),
        Storage(UDYNAMIC8, Block(256), "stochastic"),
    ),
    "int4": (Storage(DYNAMIC4, Block(128), "stochastic"), Storage(ULINEAR4, Rank1(), "stochastic")),
}


def storage(name: str) -> tuple[Storage, Storage]:
    """The recipe of that name: how the first and the second moment are stored.

    Args:
      name: ``"fp32"``, ``"bf16"``, ``"fp8"``, ``"fp4"``, ``"int8"`` or ``"int4"``.

    Returns:
      ``(mu_storage, nu_storage)``; the second moment's format has no zero (a number that is not
      zero rounds up to the smallest code).

    Raises:
      ValueError: for a name that is not a recipe's.

    Example:
      >>> import qstate
      >>> for storage in qstate.storage("fp4"): print(storage)
      e2m1, block 128, stochastic
      ue2m2 without zero, block 128, stochastic, square root

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022 (int8)

      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023 (int4)
    """
    if name not in _RECIPES:
        raise ValueError(f"no recipe is named {name!r}; the names are {', '.join(_RECIPES)}")
    mu, nu = _RECIPES[name]
    return mu, nu if nu.exact else nu.without_zero()
