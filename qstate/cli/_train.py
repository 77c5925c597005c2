"""Trains one small model per storage, all from the same start and on the same batches.

The storages take turns step by step, so that a slow moment of the machine slows all of them and
the ratios of their times stay fair. Beside each stored second moment runs a float32 shadow, fed the
very gradients that reach the optimizer: what it would be without rounding.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import nnx

import qstate
from qstate.cli._data import Corpus, sample_windows, spaced_windows
from qstate.cli._model import Decoder, ModelConfig
from qstate.cli._precision import Precision


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What the storages have in common."""

    steps: int = 350  # past a reset of fp8 (300 in the paper, 320 in theory) and of fp4 (200, 224)
    seed: int = 0
    batch_size: int = 8
    sequence_length: int = 96
    learning_rate: float = 2e-3
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    validation_windows: int = 64
    validation_points: int = 20
    stall_steps: int = 20  # the stalled fraction is a mean over this many last steps

    def learning_rate_schedule(self) -> optax.Schedule:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth."""
        warmup = max(1, self.steps // 10)
        peak = self.learning_rate
        return optax.warmup_cosine_decay_schedule(
            peak / warmup, peak, warmup, self.steps, end_value=peak / 10
        )

    def validation_steps(self) -> list[int]:
        """The steps after which the held-out loss is taken; the last one is among them."""
        points = min(self.validation_points, self.steps)
        return [math.ceil(self.steps * point / points) for point in range(1, points + 1)]


@dataclasses.dataclass
class Run:
    """One storage's training: its arrays, and what was measured on the way."""

    params: Any
    opt_state: Any
    shadow: Any  # float32 second moment, shaped like the parameters
    training_losses: list[float] = dataclasses.field(default_factory=list)
    validation_losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    stalled: list[dict[str, float]] = dataclasses.field(default_factory=list)
    masses: list[float] = dataclasses.field(default_factory=list)  # of v, where `stalled` was taken
    bias: float | None = None  # of the stored v against the shadow: see `second_moment_bias`

    def median_seconds(self) -> float:
        """A step's typical time; the first one compiles."""
        return float(np.median(self.seconds[1:]))

    def mean_stalled(self, moment: str) -> float:
        """The mean stalled fraction of "mu" or "nu" over the measured steps."""
        return float(np.mean([fractions[moment] for fractions in self.stalled]))


def train(
    corpus: Corpus,
    transforms: Mapping[str, optax.GradientTransformationExtraArgs],
    config: TrainConfig,
    model_config: ModelConfig,
    on_step: Callable[[int, dict[str, float]], None] = lambda step, losses: None,
    precisions: Mapping[str, Precision] | None = None,
) -> dict[str, Run]:
    """Trains with each of the transformations, interleaved.

    Args:
      corpus: the text.
      transforms: name of a storage to its optimizer (without clipping, which is done here).
      config: steps, batches, learning rate.
      model_config: sizes of the model.
      on_step: called after each step with its number and every storage's training loss.
      precisions: name of a storage to the precision of its run; float32 where it has none.

    Returns:
      What was measured, per storage.
    """
    graph, params = nnx.split(Decoder(model_config, rngs=nnx.Rngs(config.seed)))
    advance_shadow = jax.jit(_advance_average, static_argnums=2)
    measure_stalls = jax.jit(qstate.stall_fraction)
    steps, losses, runs = {}, {}, {}
    for name, tx in transforms.items():
        precision = (precisions or {}).get(name, Precision())
        loss = _loss_function(graph, precision)
        losses[name] = jax.jit(loss)
        whole = precision.wrap(optax.chain(optax.clip_by_global_norm(config.clip_norm), tx))
        steps[name] = _make_step(loss, whole, config.clip_norm, precision)
        runs[name] = _start(whole, precision.policy.cast_to_param(params))

    length = config.sequence_length
    held_out = spaced_windows(corpus.validation, config.validation_windows, length)
    validation_steps = set(config.validation_steps())
    rng = np.random.default_rng(config.seed)
    for step in range(1, config.steps + 1):
        batch = jnp.asarray(sample_windows(corpus.train, rng, config.batch_size, length))
        measured = step > config.steps - config.stall_steps
        for name, run in runs.items():
            # The step overwrites its state in place, so what it was has to be copied beforehand.
            before = jax.tree.map(jnp.copy, run.opt_state) if measured else None
            start = time.perf_counter()
            outputs = jax.block_until_ready(steps[name](run.params, run.opt_state, batch))
            run.seconds.append(time.perf_counter() - start)
            run.params, run.opt_state, value, grads = outputs
            run.training_losses.append(float(value))
            # Waited for: work left over would be timed as a part of the next storage's step.
            run.shadow = jax.block_until_ready(advance_shadow(run.shadow, grads, config.b2))
            if measured:
                stalled = measure_stalls(before, run.opt_state)
                run.stalled.append({moment: float(part) for moment, part in stalled.items()})
                run.masses.append(second_moment_mass(run.opt_state, config.b2))
            if step in validation_steps:
                run.validation_losses.append(float(losses[name](run.params, held_out)))
        on_step(step, {name: run.training_losses[-1] for name, run in runs.items()})
    for run in runs.values():
        run.bias = second_moment_bias(run.opt_state, run.shadow, config)
    return runs


def _loss_function(
    graph: nnx.GraphDef, precision: Precision
) -> Callable[[Any, jax.Array], jax.Array]:
    policy = precision.policy

    def loss(params: Any, windows: jax.Array) -> jax.Array:
        """Mean cross-entropy of the next byte, in nats; windows: uint8 [batch, time + 1]."""
        model = nnx.merge(graph, policy.cast_to_compute(params))
        logits = policy.cast_to_output(model(windows[:, :-1]))
        targets = windows[:, 1:].astype(jnp.int32)
        return _mean_cross_entropy(logits, targets)

    return loss


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


_mean_cross_entropy = qstate.fp32_island(_cross_entropy, output_dtype=jnp.float32)


def _make_step(
    loss: Callable[[Any, jax.Array], jax.Array],
    tx: optax.GradientTransformationExtraArgs,
    clip_norm: float,
    precision: Precision,
) -> Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array, Any]]:
    clip = optax.clip_by_global_norm(clip_norm)

    def step(params: Any, opt_state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array, Any]:
        scale = precision.scale_in(opt_state)

        def scaled_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            value = loss(params, windows)
            return scale.scale(value), value

        scaled, value = jax.grad(scaled_loss, has_aux=True)(params)
        updates, opt_state = tx.update(scaled, opt_state, params)
        # The gradients as they reach the averages, for the shadow.
        grads, _ = clip.update(scale.unscale(jmp.cast_to_full(scaled)), clip.init(params))
        return optax.apply_updates(params, updates), opt_state, value, grads

    return jax.jit(step, donate_argnums=(0, 1))


def _start(tx: optax.GradientTransformationExtraArgs, params: Any) -> Run:
    params = jax.tree.map(jnp.copy, params)  # each run donates its own
    shadow = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return Run(params, jax.jit(tx.init)(params), shadow)


def _advance_average(average: Any, grads: Any, decay: float) -> Any:
    new = jax.tree.map(lambda v, g: decay * v + (1 - decay) * jnp.square(g), average, grads)
    return jmp.select_tree(jmp.all_finite(grads), new, average)  # a skipped step does not count


def find_adam_state(opt_state: Any) -> Any:
    """The state that holds `mu` and `nu`, wherever it is in a chain's nested tuples."""
    if hasattr(opt_state, "nu"):
        return opt_state
    if isinstance(opt_state, tuple):
        found = (find_adam_state(inner) for inner in opt_state)
        return next((state for state in found if state is not None), None)
    return None


def skipped_steps(opt_state: Any) -> int:
    """How many steps a loss scale's guard has skipped; 0 without one."""
    return int(getattr(opt_state, "total_notfinite", 0))


def second_moment_mass(opt_state: Any, b2: float) -> float:
    """What bias correction divides v by: a reset leaves `mass`, and `age` steps have passed since.

    1 - b2^age (1 - mass)
    """
    average = find_adam_state(opt_state).nu
    return 1 - b2 ** int(average.age) * (1 - float(average.mass))


def second_moment_bias(opt_state: Any, shadow: Any, config: TrainConfig) -> float | None:
    """Relative error of the sum of v over the quantized leaves, both sides bias-corrected.

    Bias-corrected, because a reset takes the stored average's mass but not the shadow's. None where
    there is nothing to compare: no leaf is quantized, or a reset has just emptied the average.
    """
    codes = jax.tree.leaves(find_adam_state(opt_state).nu.codes)
    decoded = jax.tree.leaves(find_adam_state(qstate.dequantize(opt_state)).nu)
    exact = jax.tree.leaves(shadow)
    stored_sum = exact_sum = 0.0
    for code, stored, reference in zip(codes, decoded, exact, strict=True):
        if code.dtype != jnp.float32:
            stored_sum += np.asarray(stored).sum(dtype=np.float64)
            exact_sum += np.asarray(reference).sum(dtype=np.float64)
    stored_mass = second_moment_mass(opt_state, config.b2)
    if exact_sum == 0 or stored_mass == 0:
        return None
    shadow_mass = 1 - config.b2 ** (config.steps - skipped_steps(opt_state))
    return float(stored_sum / stored_mass / (exact_sum / shadow_mass)) - 1
