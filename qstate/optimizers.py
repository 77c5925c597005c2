"""Optimizers by one line: chains of transformations, no arithmetic."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from qstate import theory
from qstate.numerics import Storage
from qstate.numerics import storage as recipe
from qstate.state import Adaptive, Every, Exempt, Policy, every
from qstate.transforms import descend, scale_by_adam

Storages = str | tuple[Storage, Storage]
Reset = str | Policy | tuple[Policy, Policy]

_PAPER_PERIODS = {"bf16": 1000, "fp8": 300, "fp4": 200}


def adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    storage: Storages = "fp8",
    reset: Reset = "recipe",
    key: Any = 0,
    exempt: Exempt | None = None,
    shardings: Any = None,
    implementation: str | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Adam whose averages are stored as asked; `adamw` without weight decay.

    Args:
      learning_rate: a number or a schedule.
      b1, b2, eps, eps_root, nesterov: as in `scale_by_adam`.
      storage, reset, key, exempt, shardings, implementation: as in `adamw`.

    Returns:
      A `optax.GradientTransformationExtraArgs`.

    Example:
      >>> import qstate
      >>> tx = qstate.adam(1e-3, storage="int8")

    References:
      Kingma and Ba, `Adam: A Method for Stochastic Optimization
      <https://arxiv.org/abs/1412.6980>`_, 2015
    """
    return descend(
        _scale_by_adam(
            b1, b2, eps, eps_root, storage, reset, key, exempt, shardings, implementation, nesterov
        ),
        learning_rate,
    )


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    storage: Storages = "fp8",
    reset: Reset = "recipe",
    key: Any = 0,
    exempt: Exempt | None = None,
    shardings: Any = None,
    implementation: str | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """AdamW whose averages are stored as asked.

    Args:
      learning_rate: a number or a schedule.
      b1, b2, eps, eps_root, nesterov: as in `scale_by_adam`.
      weight_decay: decay of the weights, a number or a schedule.
      mask: which leaves decay, as in `optax.adamw`; by default all of a floating dtype.
      storage: a recipe's name (``"fp32"``, ``"bf16"``, ``"fp8"``, ``"fp4"``, ``"int8"``,
        ``"int4"``), or a pair of `Storage` for the first and the second moment.
      reset: ``"recipe"``, the recipe's own, which is None in all of them so far; None; ``"paper"``,
        the paper's hard resets of both moments (every 1000 steps in bf16, 300 in fp8, 200 in fp4);
        ``"theory"``, hard resets of both at the second moment's computed period; a policy, for both
        moments if it is hard and for the second alone if it is soft; or a pair of policies.
      key: seed of stochastic rounding: an integer or a JAX key.
      exempt: ``(path, leaf) -> bool``, which leaves stay float32; by default those of fewer than
        4096 elements.
      shardings, implementation: as in `scale_by_adam`.

    Returns:
      A `optax.GradientTransformationExtraArgs`. `qstate.step` updates the parameters in the same
      pass.

    Raises:
      ValueError, TypeError: for a name, a storage or a policy that is none.

    State:
      A chain's: `ScaleByAdamState`, then optax's. Bytes a parameter: fp32 8, bf16 4, fp8 2.06, int8
      2.03, fp4 1.06, int4 1.03.

    Numerics:
      See `scale_by_adam`. ``storage="fp32"`` equals `optax.adamw`.

    Example:
      >>> import jax.numpy as jnp, optax, qstate
      >>> tx = qstate.adamw(3e-4, weight_decay=0.1, storage="fp8")
      >>> params = {"kernel": jnp.ones((128, 256))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> qstate.nbytes(state) / params["kernel"].size < 2.07
      True

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2019
    """
    return descend(
        _scale_by_adam(
            b1, b2, eps, eps_root, storage, reset, key, exempt, shardings, implementation, nesterov
        ),
        learning_rate,
        weight_decay,
        _floating if mask is None else mask,
    )


def _scale_by_adam(
    b1, b2, eps, eps_root, storage, reset, key, exempt, shardings, implementation, nesterov
):
    mu_storage, nu_storage = storages(storage)
    mu_reset, nu_reset = resets(reset, storage)
    return scale_by_adam(
        b1,
        b2,
        eps,
        eps_root,
        mu_storage=mu_storage,
        nu_storage=nu_storage,
        mu_reset=mu_reset,
        nu_reset=nu_reset,
        key=key,
        exempt=exempt,
        shardings=shardings,
        implementation=implementation,
        nesterov=nesterov,
    )


def storages(storage: Storages) -> tuple[Storage, Storage]:
    """The pair of storages that a name or a pair stands for."""
    if isinstance(storage, str):
        return recipe(storage)
    if isinstance(storage, tuple) and [isinstance(s, Storage) for s in storage] == [True, True]:
        return storage
    raise TypeError(
        'storage is a recipe\'s name such as "fp8", or a pair of qstate.Storage for the first and '
        f"the second moment; got {storage!r}"
    )


def resets(reset: Any, storage: Storages) -> tuple[Policy, Policy]:
    """The pair of policies that a word, a policy or a pair (`Reset`) stands for."""
    if isinstance(reset, tuple) and len(reset) == 2:
        return reset
    if reset is None or reset == "recipe":
        return None, None
    if reset == "theory":
        reset = theory()  # pyright: ignore[reportCallIssue]
    elif reset == "paper":
        if not isinstance(storage, str) or storage not in _PAPER_PERIODS:
            raise ValueError(
                f'reset="paper" is for storage {", ".join(_PAPER_PERIODS)}, not {storage!r}; '
                'use "theory" or qstate.every(period)'
            )
        reset = every(_PAPER_PERIODS[storage])
    elif not isinstance(reset, Every | Adaptive | theory.TheoryReset):
        raise ValueError(
            'reset is "recipe", "paper", "theory", None, a policy such as qstate.every(300), or a '
            f"pair of policies for the first and the second moment; got {reset!r}"
        )
    return (reset if reset.kind == "hard" else None), reset


def _floating(params):
    return jax.tree.map(lambda p: jnp.issubdtype(p.dtype, jnp.floating), params)
