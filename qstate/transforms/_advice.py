"""What a factory checks of its arguments, and the choices it warns of."""

from qstate import theory
from qstate.numerics import Storage
from qstate.precision import is_narrow
from qstate.state import Adaptive, Every, warn


def check_hyperparameters(**hyperparameters) -> None:
    """Refuses hyperparameters that arrive as 16-bit arrays.

    Raises:
      ValueError: 0.999 in bfloat16 is 1.0, so a second moment would never move.
    """
    for name, value in hyperparameters.items():
        if is_narrow(value):
            raise ValueError(
                f"{name} arrives as {value.dtype}, in which 0.999 is 1.0; hyperparameters must be "
                "float32: optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)"
            )


def check_first_moment(storage: Storage, name: str) -> None:
    """Refuses a storage that cannot hold what may be negative.

    Raises:
      ValueError: for an unsigned format or the square-root domain.
    """
    if not storage.format.signed or storage.domain == "sqrt":
        raise ValueError(
            f"{name} has values of both signs, which {storage} cannot hold; use a signed format "
            'in the linear domain: qstate.Storage(qstate.E4M3, qstate.Block(128), "stochastic")'
        )


def warn_of_nearest(storage: Storage, decay) -> None:
    """Warns where nearest rounding makes a second moment a ratchet."""
    if storage.rounding != "nearest" or storage.exact or not isinstance(decay, float):
        return
    ratio = theory.precision_ratio(storage.format, decay)
    if ratio > 1:
        stalled = theory.stall_probability(storage.format, decay)
        warn(
            f"a second moment in {storage.format.name} with decay {decay} and nearest rounding "
            f"only ever rises: the grid is {ratio:.3g} times too coarse for its steps, so it "
            f"stalls in {stalled:.1%} of them and never follows a fall of the gradients. Use "
            'rounding="stochastic".',
        )


def warn_of_hard_alone(mu: Every | Adaptive | None, nu: Every | Adaptive | None) -> None:
    """Warns where the second moment is reset to zero while the first is not."""
    if nu is None or nu.kind != "hard":
        return
    together = (
        isinstance(mu, Every)
        and isinstance(nu, Every)
        and mu.kind == "hard"
        and nu.period % mu.period == 0
    )
    if not together:
        warn(
            "a hard reset of the second moment alone divides an old first moment by a single "
            "squared gradient: the step after it is some hundred times too large. Reset only the "
            'past\'s weight, qstate.every(period, kind="soft"), or reset both moments together.',
        )
