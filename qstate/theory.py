"""How often a stored second moment stalls, and when resetting it pays: closed forms.

The average v ← βv + (1-β)g² is kept on a floating-point grid whose spacing at v is εv/m: ε is the
format's spacing at 1.0, m in [1, 2) the mantissa of v. A step too small for the grid leaves the
stored code as it was: it stalls. For gradients g ~ N(0, σ²), z = g²/σ² ~ χ²₁ with distribution
function F, and how often it stalls follows from the precision ratio ρ of format and decay, and
from φ_j = 1 - β^j, the share of its final mass that the average has j steps after it was zero.

A format is any object with a float `epsilon`, or with a `format` that has one: of a `Storage` only
the grid counts here, neither its scaling nor its domain. The module is also the reset policy that
uses these formulas: see `TheoryReset`.
"""

import bisect
import dataclasses
import math
import numbers
import sys
import types
from typing import Any, Protocol

mean_mantissa = 1 / math.log(2)
"""m̄ = E[m] of a log-uniform mantissa, density 1/(m ln 2) on [1, 2)."""

mean_abs_deviation = 4 * math.exp(-1 / 2) / math.sqrt(2 * math.pi)
"""E|z - 1| = 4 N(1), N the standard normal density."""


class Grid(Protocol):
    """A format: `epsilon` is its spacing at 1.0."""

    @property
    def epsilon(self) -> float: ...


class StoredOnGrid(Protocol):
    """A storage: something that names its format."""

    @property
    def format(self) -> Grid: ...


def precision_ratio(format: Grid | StoredOnGrid, decay: float) -> float:
    """Half the grid's spacing in units of the average's typical step.

    ρ = ε / (2 (1-β) m̄), because a step (1-β)(z-1)v is to be compared with half a spacing εv/(2m).

    Args:
      format: an object with a float `epsilon`, or a storage with such a `format`.
      decay: β, in (0, 1).

    Returns:
      ρ. Well above 1, nearest rounding loses every decrease of the average.

    Raises:
      TypeError, ValueError: a format without spacing, or a decay outside (0, 1).

    Example:
      >>> from types import SimpleNamespace
      >>> round(precision_ratio(SimpleNamespace(epsilon=2**-7), 0.999), 2)
      2.71

    References:
      https://arxiv.org/abs/2603.16731, sections 3.1 and A.1.
    """
    return _epsilon(format) / (2 * (1 - _fraction("decay", decay)) * mean_mantissa)


def stall_probability(
    format: Grid | StoredOnGrid, decay: float, rounding: str = "nearest", age: int | None = None
) -> float:
    """The probability that one step leaves a stored second moment's code unchanged.

    With W = z/φ_j:

      nearest     P(j) = Pr[|W-1| < ρ] = F((1+ρ)φ_j) - F(max(0, 1-ρ)φ_j)
      stochastic  P(j) = E[max(0, 1 - |W-1|/(2ρ))], near 1 - E|z-1|/(2ρ) for large ρ at rest

    Args:
      format: an object with a float `epsilon`, or a storage with such a `format`.
      decay: β, in (0, 1).
      rounding: "nearest" or "stochastic".
      age: j, the steps since the average was zero; None for the average at rest, φ = 1.

    Returns:
      P, in [0, 1].

    Raises:
      TypeError, ValueError: a bad format or decay, an unknown rounding, an age that is not an
        integer of at least 1.

    Example:
      >>> from types import SimpleNamespace
      >>> round(stall_probability(SimpleNamespace(epsilon=2**-7), 0.999, "stochastic"), 3)
      0.825

    References:
      https://arxiv.org/abs/2603.16731, sections 3.2, 5.1, A.2, A.3 and A.7.
    """
    rho = precision_ratio(format, decay)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {rounding!r}")
    if age is not None and not (isinstance(age, numbers.Integral) and age >= 1):
        raise ValueError(f"age must be an integer of at least 1, or None for at rest; got {age!r}")
    stall = _stall_nearest if rounding == "nearest" else _stall_stochastic
    return stall(rho, 1.0 if age is None else _mass(decay, age))


def effective_decay(format: Grid | StoredOnGrid, decay: float, rounding: str = "nearest") -> float:
    """The decay of an average at rest that takes only the steps that do not stall.

    β_eff = 1 - (1-β)(1-P)

    Args:
      format: an object with a float `epsilon`, or a storage with such a `format`.
      decay: β, in (0, 1).
      rounding: "nearest" or "stochastic".

    Returns:
      β_eff in [β, 1]; 1/(1-β_eff) is the number of steps that the stored average looks back. Under
      stochastic rounding a step that is taken makes up for those that are not, so the mean of the
      average still decays by β.

    Raises:
      TypeError, ValueError: as `stall_probability`.

    Example:
      >>> from types import SimpleNamespace
      >>> round(1 / (1 - effective_decay(SimpleNamespace(epsilon=2**-7), 0.999)))
      18462

    References:
      https://arxiv.org/abs/2603.16731, section 4.1.
    """
    return 1 - (1 - _fraction("decay", decay)) * (1 - stall_probability(format, decay, rounding))


def startup_window(
    format: Grid | StoredOnGrid, decay: float, threshold: float, floor: float = 0.0
) -> int | None:
    """The age at which an average that started from zero has largely stalled, nearest rounding.

    min{j ≥ 1 : P_total(j) ≥ P₀},  P_total(j) = P_init + (1 - P_init) P(j)

    Args:
      format: an object with a float `epsilon`, or a storage with such a `format`.
      decay: β, in (0, 1).
      threshold: P₀, in (0, 1).
      floor: P_init, the stalled fraction measured right after a start, in [0, 1).

    Returns:
      The smallest such age; 0 where the floor alone reaches the threshold; None where the average
      at rest does not.

    Raises:
      TypeError, ValueError: a bad format, or an argument outside its interval.

    Example:
      >>> from types import SimpleNamespace
      >>> startup_window(SimpleNamespace(epsilon=2**-3), 0.999, threshold=0.8, floor=0.53)
      15

    References:
      https://arxiv.org/abs/2603.16731, sections 4.2, A.6 and A.7.
    """
    rho = precision_ratio(format, decay)
    threshold = _fraction("threshold", threshold)
    floor = _fraction("floor", floor, zero=True)

    def total(age: float) -> float:
        return floor + (1 - floor) * _stall_nearest(rho, _mass(decay, age))

    if threshold <= floor:
        return 0
    if total(math.inf) < threshold:
        return None
    # P rises with j for every ρ, so doubling brackets the age and bisection finds it.
    late = 1
    while total(late) < threshold:
        late *= 2
    return bisect.bisect_left(range(late), threshold, key=total)


def reset_period(format: Grid | StoredOnGrid, decay: float, tolerance: float = 0.6) -> int:
    """The number of steps after which resetting a second moment costs less than its staleness.

    K* = min{K ≥ 1 : S̄(K) ≥ E(K)}, where, with P under nearest rounding,

      S(j) = P(j)/P(∞)                                  how much of the stalling has built up
      S̄(K) = (1/K) Σ_{j≤K} max(0, (S(j)-s₀)/(1-s₀))     its excess over s₀, mean over a cycle
      E(K) = 2β^K/(1+β^K)                               1 - N_eff(K)/N_eff(∞), the averaging that
                                                        K bias-corrected steps still lack

    Args:
      format: an object with a float `epsilon`, or a storage with such a `format`.
      decay: β, in (0, 1).
      tolerance: s₀ in [0, 1), the share of the final stalling that does no harm.

    Returns:
      K*, found in O(K*) time. It is relative to P(∞), so it exists even for a format that hardly
      stalls; whether to reset at all is for `stall_probability` to say.

    Raises:
      TypeError, ValueError: a bad format, or an argument outside its interval.

    Example:
      >>> from types import SimpleNamespace
      >>> reset_period(SimpleNamespace(epsilon=2**-3), 0.999)
      320

    References:
      https://arxiv.org/abs/2603.16731, sections 5.2 and A.9.
    """
    rho = precision_ratio(format, decay)
    tolerance = _fraction("tolerance", tolerance, zero=True)
    at_rest = _stall_nearest(rho, 1.0)
    period, excess = 0, 0.0
    while True:
        period += 1
        mass = _mass(decay, period)
        staleness = _stall_nearest(rho, mass) / at_rest
        excess += max(0.0, (staleness - tolerance) / (1 - tolerance))
        error = 2 * (1 - mass) / (2 - mass)
        if excess / period >= error:
            return period


@dataclasses.dataclass(frozen=True)
class TheoryReset:
    """A reset policy whose period follows from the storage and the decay: see `reset_period`.

    Args:
      tolerance: s₀ in [0, 1), the share of the final stalling that does no harm.
      kind: "hard" (the average and its mass to zero) or "soft" (both scaled down).

    Raises:
      TypeError, ValueError: a tolerance outside [0, 1), or an unknown kind.

    Example:
      >>> from types import SimpleNamespace
      >>> TheoryReset(kind="soft").period(SimpleNamespace(epsilon=2**-2), 0.999)
      224
    """

    tolerance: float = 0.6
    kind: str = "hard"

    def __post_init__(self) -> None:
        _fraction("tolerance", self.tolerance, zero=True)
        if self.kind not in ("hard", "soft"):
            raise ValueError(f"kind must be 'hard' or 'soft', got {self.kind!r}")

    def period(self, format: Grid | StoredOnGrid, decay: float) -> int:
        """K* for an average of this decay kept in this format."""
        return reset_period(format, decay, self.tolerance)


def _chi2_cdf(x: float) -> float:
    """F(x) = Pr[z ≤ x] = erf(√(x/2))."""
    return math.erf(math.sqrt(x / 2))


def _chi2_cdf_integral(x: float) -> float:
    """∫₀ˣ F = xF(x) - ∫₀ˣ z dF, whose partial expectation is F(x) - √(2x/π) e^(-x/2)."""
    return (x - 1) * _chi2_cdf(x) + math.sqrt(2 * x / math.pi) * math.exp(-x / 2)


def _stall_nearest(rho: float, mass: float) -> float:
    if rho < 1e-5:
        # The difference of two nearly equal F would cancel; 2ρφ F'(φ) is exact to ρ²/4 here.
        return rho * math.sqrt(2 * mass / math.pi) * math.exp(-mass / 2)
    return _chi2_cdf((1 + rho) * mass) - _chi2_cdf(max(0.0, 1 - rho) * mass)


def _stall_stochastic(rho: float, mass: float) -> float:
    """Stochastic rounding is nearest rounding with a threshold uniform on [0, 2ρ].

    The mean over that threshold is a second difference of ∫F, of width 2ρφ.
    """
    if rho < 1e-2:
        # That difference cancels for small ρ; the two-point Gauss rule for the same mean does not.
        offset = rho / math.sqrt(3)
        return (_stall_nearest(rho - offset, mass) + _stall_nearest(rho + offset, mass)) / 2
    width = 2 * rho * mass
    above, below = mass + width, max(0.0, mass - width)
    integral = _chi2_cdf_integral
    return (integral(above) - 2 * integral(mass) + integral(below)) / width


def _mass(decay: float, age: float) -> float:
    """φ_j = 1 - β^j, accurate where β^j is near 1."""
    return -math.expm1(age * math.log(decay))


def _epsilon(format: Any) -> float:
    grid: Any = format if hasattr(format, "epsilon") else getattr(format, "format", None)
    if not hasattr(grid, "epsilon"):
        raise TypeError(
            "format must have a float attribute `epsilon`, its spacing at 1.0, "
            f"or a `format` that has one; got {format!r}"
        )
    epsilon = _real("epsilon", grid.epsilon)
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be positive and finite, got {epsilon} of {format!r}")
    return epsilon


def _fraction(name: str, value: float, zero: bool = False) -> float:
    value = _real(name, value)
    if not (0 < value < 1 or (zero and value == 0)):
        raise ValueError(f"{name} must lie in {'[' if zero else '('}0, 1), got {value}")
    return value


def _real(name: str, value: float) -> float:
    # Also turns away tracers: a period is a Python number, known before anything is compiled.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {value!r}")
    return float(value)


# A reset policy is written `reset=qstate.theory()`, beside `qstate.every(300)`, and its formulas
# `qstate.theory.reset_period(...)`: for one name to serve both, the module has to be callable.
class _CallableModule(types.ModuleType):
    def __call__(self, tolerance: float = 0.6, kind: str = "hard") -> TheoryReset:
        """The policy that resets every `reset_period(format, decay, tolerance)` steps."""
        return TheoryReset(tolerance, kind)


sys.modules[__name__].__class__ = _CallableModule
