"""When an average starts over, and what it keeps.

An average has an age, the applied steps since it last started over, and a mass, the sum of the
weights that it has given to what it averaged. Bias correction divides by the mass::

    mass = 1 - decay^age (1 - mass at age 0)

- A **hard** reset sets the average, its age and its mass to zero.
- A **soft** reset multiplies the average and its mass by 2^-5 and sets the age to zero: the
  corrected average is the same as before, but the next values weigh as much as after a hard reset.
"""

import dataclasses
import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from qstate import theory
from qstate.numerics import Storage

SOFT = 2.0**-5
KINDS = ("hard", "soft")


@dataclasses.dataclass(frozen=True)
class Every:
    """A reset whenever the age reaches ``period``; see `every`."""

    period: int
    kind: str = "hard"

    def __post_init__(self):
        if isinstance(self.period, bool) or not isinstance(self.period, int) or self.period < 1:
            raise ValueError(f"a reset period is a number of steps, 1 or more; got {self.period!r}")
        _check_kind(self.kind)


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """A reset once measured stalling outweighs averaging; see `adaptive`."""

    tolerance: float = 0.6
    kind: str = "hard"

    def __post_init__(self):
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be in [0, 1), got {self.tolerance!r}")
        _check_kind(self.kind)


Policy = Every | Adaptive | theory.TheoryReset | None


def every(period: int, kind: str = "hard") -> Every:
    """Resets an average every ``period`` applied steps.

    Args:
      period: steps from one reset to the next; skipped steps do not count.
      kind: ``"hard"``, all to zero: for both moments together. ``"soft"``, only what the past
        weighs: for the second moment alone.

    Example:
      >>> import qstate
      >>> qstate.every(300)
      Every(period=300, kind='hard')
    """
    return Every(period, kind)


def adaptive(tolerance: float = 0.6, kind: str = "hard") -> Adaptive:
    r"""Resets an average once the stalling measured since the last reset outweighs averaging on.

    At age :math:`k`, with the measured share of unchanged codes :math:`P(j)` and
    :math:`S(j) = (P(j) - P(1)) / (1 - P(1))`,

    .. math::
       \bar S(k) = \frac1k \sum_{j \le k} \max\left(0, \frac{S(j) - s_0}{1 - s_0}\right)
       > E(k) = \frac{2 \beta^k}{1 + \beta^k}.

    The share is one sum over all leaves: on a mesh, one small collective. The reset is carried out
    at the end of the step after the one that met the condition.

    Args:
      tolerance: :math:`s_0`, the share of stalling that is tolerated.
      kind: as for `every`.

    Example:
      >>> import qstate
      >>> qstate.adaptive(0.5)
      Adaptive(tolerance=0.5, kind='hard')

    References:
      Topollai and Choromanska, `Understanding Quantization of Optimizer States in LLM Pre-training
      <https://arxiv.org/abs/2603.16731>`_, 2026
    """
    return Adaptive(tolerance, kind)


def resolve(policy: Policy, storage: Storage, decay) -> Every | Adaptive | None:
    """The policy with its numbers filled in: `qstate.theory` becomes `every`.

    Raises:
      TypeError: for what is no policy, or where the theory would need a decay that is traced.
    """
    if policy is None or isinstance(policy, Every | Adaptive):
        return policy
    if isinstance(policy, theory.TheoryReset):
        if not isinstance(decay, float):
            raise TypeError(
                "qstate.theory() computes the period from the decay, which has to be a "
                f"Python float (got {decay!r}); give a period instead: qstate.every(300)"
            )
        return Every(policy.period(storage.format, decay), policy.kind)
    raise TypeError(
        "a reset policy is qstate.every(300), qstate.theory(), qstate.adaptive() or None; "
        f"got {policy!r}"
    )


class Monitor(NamedTuple):
    """What an adaptive policy has seen since the last reset."""

    floor: jax.Array  # float32[], share of unchanged codes at age 1
    excess: jax.Array  # float32[], sum of the shares above the tolerance

    @classmethod
    def start(cls) -> "Monitor":
        return cls(jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32))

    def observe(self, share: jax.Array, tick: "Tick", tolerance: float) -> "Monitor":
        """After a step that left ``share`` of the codes alone; a reset starts over."""
        floor = jnp.where(tick.age == 1, share, self.floor)
        stalling = (share - floor) / jnp.maximum(1 - floor, jnp.finfo(jnp.float32).tiny)
        excess = jnp.maximum(0, (stalling - tolerance) / (1 - tolerance))
        excess = jnp.where(tick.kept_age() <= 1, 0, self.excess + excess)
        return Monitor(floor, excess)

    def due(self, age: jax.Array, decay) -> jax.Array:
        remaining = jnp.float32(decay) ** age
        return (age > 0) & (self.excess > age * (2 * remaining / (1 + remaining)))


class Tick(NamedTuple):
    """Where an average's clock stands in a step: after the new value, before any reset."""

    age: jax.Array  # int32[]
    mass: jax.Array  # float32[], the mass at that age
    start_mass: jax.Array  # float32[], the mass at age 0
    due: jax.Array | None  # bool[], whether the step ends with a reset; None: never
    kind: str

    def kept(self, x: jax.Array) -> jax.Array:
        """What is kept of a new value."""
        return x if self.due is None else restarted(x, self.due, self.kind)

    def kept_age(self) -> jax.Array:
        return self.age if self.due is None else jnp.where(self.due, 0, self.age)

    def kept_mass(self) -> jax.Array:
        if self.due is None:
            return self.start_mass
        mass = self.mass * SOFT if self.kind == "soft" else jnp.zeros_like(self.mass)
        return jnp.where(self.due, mass, self.start_mass).astype(jnp.float32)


def restarted(x: jax.Array, due: jax.Array, kind: str) -> jax.Array:
    """A value, or what is left of it where a reset of a kind is due."""
    return jnp.where(due, x * SOFT if kind == "soft" else 0, x)


class Clock(Protocol):
    """What of an average a clock reads."""

    @property
    def age(self) -> jax.Array: ...

    @property
    def mass(self) -> jax.Array: ...

    @property
    def monitor(self) -> Monitor | None: ...


def tick(average: Clock, decay, policy: Every | Adaptive | None) -> Tick:
    """Advances an average's clock by one step."""
    age = jnp.asarray(optax.safe_increment(average.age))
    if isinstance(policy, Every):
        due = age >= policy.period
    elif isinstance(policy, Adaptive):
        assert average.monitor is not None
        due = average.monitor.due(average.age, decay)
    else:
        due = None
    mass = _mass(age, average.mass, decay)
    return Tick(age, mass, average.mass, due, policy.kind if policy else "hard")


def still(average: Clock) -> Tick:
    """The clock of an average that only takes other values, without a step."""
    return Tick(average.age, average.mass, average.mass, None, "hard")


# The next two are jitted in line as their twin in optax is, so that they give the same last bit.
@functools.partial(jax.jit, inline=True)
def bias_correction(moment, decay, age: jax.Array, start_mass: jax.Array):
    """A tree of averages divided by their mass at an age."""
    mass = _mass(age, start_mass, decay)
    return jax.tree.map(lambda t: t / mass, moment)


@functools.partial(jax.jit, inline=True)
def _mass(age: jax.Array, start_mass: jax.Array, decay) -> jax.Array:
    return 1 - decay**age * (1 - start_mass)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f'a reset is "hard" or "soft", got kind={kind!r}')
