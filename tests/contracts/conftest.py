"""The table of every transformation that the package has, and the fixture that walks it.

Lines that repeat the code of another one are marked slow: not that one of them takes long.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import qstate


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
      name: id of the line.
      factory: ``learning_rate, **settings -> transformation``.
      original: in float32 ``learning_rate -> transformation``.
      settings: of the factory.
      rate: a learning rate that suits the quadratic of `test_converges`.
      falls: how many times smaller that loss is after 100 steps, at least.
      near: how many times the float32 original's final loss it may end at.
      static: arguments that `optax.inject_hyperparams` must leave alone.
      slow: whether another line runs the same code.
      wide_updates: whether updates of 16-bit parameters are float32, so that `optax.apply_updates`
        lands on the right one.
    """

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    original: Callable[..., optax.GradientTransformation]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    rate: float = 0.1
    falls: float = 40.0
    near: float = 1.2
    static: tuple[str, ...] = ()
    slow: bool = False
    wide_updates: bool = False

    def make(self, learning_rate: optax.ScalarOrSchedule | None = None):
        rate = self.rate if learning_rate is None else learning_rate
        return self.factory(rate, **self.settings)

    @property
    def wraps(self) -> bool:
        """Whether it is an optax transformation inside of `quantize_state`."""
        return self.factory.__name__ == "quantized"


def scaled_by_adam(learning_rate, storage) -> optax.GradientTransformationExtraArgs:
    """The composed spelling."""
    mu, nu = qstate.storage(storage)
    adam = qstate.scale_by_adam(mu_storage=mu, nu_storage=nu)
    return optax.chain(adam, optax.scale_by_learning_rate(learning_rate))


def quantized(learning_rate, inner, storage, reset=None) -> optax.GradientTransformationExtraArgs:
    return qstate.quantize_state(inner(learning_rate), storage, reset=reset)


def scaled(learning_rate, loss_scale) -> optax.GradientTransformationExtraArgs:
    return qstate.with_loss_scale(qstate.adamw(learning_rate), loss_scale)


def mastered(learning_rate, remainder=None) -> optax.GradientTransformationExtraArgs:
    return qstate.with_master_weights(qstate.adamw(learning_rate), remainder)


def rounded(learning_rate, key) -> optax.GradientTransformationExtraArgs:
    return optax.chain(qstate.adamw(learning_rate), qstate.stochastic_round_params(key))


_COARSE = ("fp4", "int4")


def _adam_cases():
    for storage in ("fp32", "bf16", "fp8", "fp4", "int8", "int4"):
        near = 3.0 if storage in _COARSE else 1.2
        settings = {"storage": storage}
        yield Case(f"adamw-{storage}", qstate.adamw, optax.adamw, settings, near=near)
        for name, factory in (("adam", qstate.adam), ("scale_by_adam", scaled_by_adam)):
            yield Case(f"{name}-{storage}", factory, optax.adam, settings, near=near, slow=True)


def _reset_cases():
    hard, soft = qstate.every(7), qstate.every(7, kind="soft")
    policies = {
        "hard": (hard, hard),
        "soft": (None, soft),
        "apart": (qstate.every(5), qstate.every(10)),
        "theory": "theory",
        "theory-soft": qstate.theory(kind="soft"),
        "adaptive": qstate.adaptive(),
        "adaptive-soft": qstate.adaptive(kind="soft"),
    }
    for name, policy in policies.items():
        for storage in ("fp8", "fp4"):
            yield Case(
                f"adamw-{storage}-{name}",
                qstate.adamw,
                optax.adamw,
                {"storage": storage, "reset": policy, "b2": 0.9},  # a period of tens of steps
                near=4.0,
                static=("b2",) if "theory" in name else (),
                slow=storage == "fp4" or name in ("theory-soft", "apart"),
            )


def _quantized_cases():
    contrib = optax.contrib
    inner = {
        "scale_by_adam": (_scaled(optax.scale_by_adam), 0.1),
        "lion": (optax.lion, 0.1),
        "rmsprop": (functools.partial(optax.rmsprop, momentum=0.5), 0.03),
        "adabelief": (optax.adabelief, 0.1),
        "yogi": (optax.yogi, 0.1),
        "nadam": (optax.nadam, 0.1),
        "adan": (optax.adan, 0.3),
        "adamax": (optax.adamax, 0.15),
        "sgd": (functools.partial(optax.sgd, momentum=0.9), 0.3),
        "muon": (contrib.muon, 1.0),
        "ademamix": (contrib.ademamix, 0.1),
        "adopt": (contrib.adopt, 0.2),
        "schedule_free_adamw": (contrib.schedule_free_adamw, 0.2),
    }
    for name, (original, rate) in inner.items():
        for storage in ("fp8", "bf16"):
            yield Case(
                f"quantize_state-{name}-{storage}",
                quantized,
                original,
                {"inner": original, "storage": storage},
                rate=rate,
                static=("inner", "storage", "reset"),
                slow=storage == "bf16",
            )


def _precision_cases():
    """Around `qstate.adamw`; parameters are float32 but where a test says otherwise."""
    guard, dynamic = jmp.NoOpLossScale(), jmp.DynamicLossScale(jnp.float32(1.0))
    lines = {
        "with_loss_scale-none": (scaled, {"loss_scale": guard}),
        "with_loss_scale-dynamic": (scaled, {"loss_scale": dynamic}),
        "with_master_weights": (mastered, {}),
        "stochastic_round_params": (rounded, {"key": 0}),
    }
    for name, (factory, settings) in lines.items():
        yield Case(name, factory, optax.adamw, settings, static=tuple(settings), wide_updates=True)


def _scaled(transformation):
    return lambda rate: optax.chain(transformation(), optax.scale_by_learning_rate(rate))


CASES = [*_adam_cases(), *_reset_cases(), *_quantized_cases(), *_precision_cases()]


# Here updates have to be like the gradients: a branch beside the step makes zeros of those.
NARROW_UPDATES = {
    "test_updates_of_bf16_parameters_are_bf16",
    "test_cond_between_a_step_and_none_on_bf16_parameters",
    "test_inside_of_apply_if_finite_on_bf16_parameters",
}


@pytest.fixture(
    params=[
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.slow else [])
        for case in CASES
    ]
)
def case(request) -> Case:
    if request.param.wide_updates and request.node.originalname in NARROW_UPDATES:
        request.applymarker(pytest.mark.xfail(strict=True, reason="its updates are float32"))
    return request.param


@pytest.fixture(scope="session")
def params():
    """One leaf that is quantized, of odd sizes, and one that is too small to be."""
    rng = np.random.default_rng(0)
    return {
        "bias": jnp.asarray(rng.normal(size=7), jnp.float32),
        "kernel": jnp.asarray(rng.normal(size=(33, 130)), jnp.float32),
    }


@pytest.fixture(scope="session")
def gradients(params):
    """Four steps' gradients, of magnitudes that vary by element and by step."""
    rng = np.random.default_rng(1)
    draw = lambda p: jnp.asarray(rng.normal(size=p.shape) * np.exp(rng.normal()), p.dtype)  # noqa: E731
    return [jax.tree.map(draw, params) for _ in range(4)]


@pytest.fixture(scope="session")
def params16(params):
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)


@pytest.fixture(scope="session")
def spec():
    """What a compiled step is specialised to: structure, shapes, dtypes."""

    def of(tree):
        leaves, treedef = jax.tree.flatten(tree)
        return treedef, [(leaf.shape, leaf.dtype) for leaf in leaves]

    return of
