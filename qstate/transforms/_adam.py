"""Adam, its two averages kept in few bits."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qstate.kernels import Arrays, Scalars, check_implementation
from qstate.numerics import Storage, key_words, storage
from qstate.precision import NarrowParametersWatch
from qstate.state import (
    Average,
    Exempt,
    Finish,
    Hints,
    Policy,
    Rule,
    bias_correction,
    resolve,
    step_averages,
    tick,
    with_move,
    zeros,
)
from qstate.transforms._advice import (
    check_first_moment,
    check_hyperparameters,
    warn_of_hard_alone,
    warn_of_nearest,
)

_EXACT = storage("fp32")[0]


def advance(scalars: Scalars, dense: Arrays, old: Arrays) -> Arrays:
    """The moments' next values, written so that there is one way alone to contract each sum."""
    g, (m, v) = dense[0], old
    return m + scalars["c1"] * (g - m), v + scalars["c2"] * (g * g - v)


@dataclasses.dataclass(frozen=True)
class _Direction:
    """Adam's direction from its moments."""

    nesterov: bool
    rooted: bool  # whether there is an eps_root

    def __call__(self, scalars: Scalars, dense: Arrays, fresh: Arrays) -> jax.Array:
        m, v = fresh
        m, v = m * scalars["m_weight"], v * scalars["v_weight"]
        if self.nesterov:
            m = m + scalars["g_weight"] * dense[0]
        if self.rooted:
            v = v + scalars["eps_root"]
        return m / (jnp.sqrt(v) + scalars["eps"])


class ScaleByAdamState(NamedTuple):
    """State of `scale_by_adam`: optax's fields, and the key of the random bits."""

    count: jax.Array  # int32[], steps
    mu: Average  # first moment, codes and scales shaped like the parameters
    nu: Average  # second moment
    key: jax.Array  # uint32[2]


def scale_by_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    mu_storage: Storage = _EXACT,
    nu_storage: Storage = _EXACT,
    mu_reset: Policy = None,
    nu_reset: Policy = None,
    key: Any = 0,
    exempt: Exempt | None = None,
    shardings: Any = None,
    implementation: str | None = None,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by the Adam rule, with its averages stored as asked.

    .. math::
       m_t &= \beta_1 m_{t-1} + (1-\beta_1) g_t, \qquad
       v_t  = \beta_2 v_{t-1} + (1-\beta_2) g_t^2 \\
       u_t &= \frac{m_t / \phi^m_t}{\sqrt{v_t / \phi^v_t + \bar\varepsilon} + \varepsilon},
       \qquad \phi_t = 1 - \beta^{a_t} (1 - \phi_0)

    where :math:`a_t` is the average's own age. The step uses the fresh float32 averages; only what
    is kept for the next one is rounded. Without resets :math:`\phi_t = 1-\beta^t`, as in
    `optax.scale_by_adam`.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the denominator outside the root.
      eps_root: added inside the root.
      mu_storage: how the first moment is held between steps; float32 by default.
      nu_storage: how the second moment is held. Its format is used without zero: what is not zero
        rounds up to the smallest code, since a zero under a root is a division by ``eps``.
      mu_reset: when the first moment starts over: `every`, `adaptive`, ``theory()`` or None.
      nu_reset: when the second moment does. Where both are the same policy they reset together,
        when the second moment is due.
      key: seed of stochastic rounding: an integer or a JAX key.
      exempt: ``(path, leaf) -> bool``, which leaves stay float32; by default those of fewer than
        4096 elements. Paths read like ``"layers/0/kernel"``.
      shardings: how the parameters are partitioned: a tree of `jax.sharding.NamedSharding` like
        theirs, or a prefix of it. Kernels need to know it where arrays do not say: under `jax.jit`
        on a mesh of automatic axes. None: as the parameters are that ``init`` is given, if they are
        arrays.
      implementation: what computes the step of leaves in few bits: ``"pallas_tpu"`` or
        ``"pallas_gpu"``, kernels that move each byte once; ``"tiled_xla"``, fused loops in place,
        anywhere; ``"reference"``. All give the same bits; a name runs or raises. None picks.
      nesterov: whether to use Nesterov momentum, as in `optax.scale_by_adam`.

    Returns:
      A `optax.GradientTransformationExtraArgs`.

    Raises:
      TypeError, ValueError: for an unsigned first moment, hyperparameters in 16 bits, a policy that
        is none. Integer leaves get a zero update; complex ones are refused in ``init``.

    State:
      ``ScaleByAdamState``. Bytes a parameter for both moments: float32 8, bf16 4, fp8 with blocks
      of 128 and float32 scales 2.06, fp4 1.06; and 4 scalars.

    Numerics:
      Computed in float32 whatever the parameters' dtype; the update has the gradient's dtype.
      Stochastic rounding leaves both averages unbiased. NaN in a gradient makes NaN of the whole
      block that holds it.

    Example:
      >>> import jax.numpy as jnp, optax, qstate
      >>> e4m3 = qstate.Storage(qstate.E4M3, qstate.Block(128), rounding="stochastic")
      >>> tx = optax.chain(
      ...     optax.clip_by_global_norm(1.0),
      ...     qstate.scale_by_adam(mu_storage=e4m3, nu_storage=e4m3),
      ...     optax.scale_by_learning_rate(1e-3))
      >>> params = {"w": jnp.ones((64, 128))}
      >>> state = tx.init(params)
      >>> updates, state = tx.update(params, state, params)
      >>> state[1].mu.codes["w"].dtype
      dtype('uint8')

    References:
      Kingma and Ba, `Adam: A Method for Stochastic Optimization
      <https://arxiv.org/abs/1412.6980>`_, 2015

      Topollai and Choromanska, `Understanding Quantization of Optimizer States in LLM Pre-training
      <https://arxiv.org/abs/2603.16731>`_, 2026
    """
    check_hyperparameters(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
    check_first_moment(mu_storage, "the first moment")
    check_implementation(implementation)
    if not nu_storage.exact:
        nu_storage = nu_storage.without_zero()
    together = mu_reset is not None and mu_reset == nu_reset
    nu_policy = resolve(nu_reset, nu_storage, b2)
    mu_policy = None if together else resolve(mu_reset, mu_storage, b1)
    warn_of_nearest(nu_storage, b2)
    if not together:
        warn_of_hard_alone(mu_policy, nu_policy)
    watch, hints = NarrowParametersWatch(), Hints(shardings)

    def init_fn(params) -> Any:
        watch.look_at(params)
        hints.look_at(params)
        return ScaleByAdamState(
            count=jnp.zeros([], jnp.int32),
            mu=zeros(params, mu_storage, exempt=exempt, policy=mu_policy),
            nu=zeros(params, nu_storage, exempt=exempt, policy=nu_policy),
            key=key_words(key),
        )

    def move(updates, state, finish: Finish | None) -> Any:
        """What `step_averages` returns for the updates, and the next state."""
        watch.warn()
        mu, nu = state.mu, state.nu
        nu_tick = tick(nu, b2, nu_policy)
        mu_tick = tick(mu, b1, mu_policy)
        if together:
            mu_tick = mu_tick._replace(due=nu_tick.due, kind=nu_tick.kind)

        def adam(g, m, v):
            m = optax.tree.update_moment(g, m, b1, 1)
            v = optax.tree.update_moment_per_elem_norm(g, v, b2, 2)
            m_hat = bias_correction(m, b1, mu_tick.age, mu.mass)
            if nesterov:
                ahead = bias_correction(m, b1, optax.safe_increment(mu_tick.age), mu.mass)
                now = bias_correction(g, b1, mu_tick.age, mu.mass)
                m_hat = jax.tree.map(lambda a, n: b1 * a + (1 - b1) * n, ahead, now)
            v_hat = bias_correction(v, b2, nu_tick.age, nu.mass)
            u = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), m_hat, v_hat)
            return u, (m, v)

        scalars = {
            "c1": 1 - b1,
            "c2": 1 - b2,
            "m_weight": 1 / mu_tick.mass,
            "v_weight": 1 / nu_tick.mass,
            "eps": eps,
            "eps_root": eps_root,
        }
        if nesterov:
            ahead = bias_correction(jnp.float32(1), b1, optax.safe_increment(mu_tick.age), mu.mass)
            scalars |= {"m_weight": b1 * ahead, "g_weight": (1 - b1) / mu_tick.mass}
        rule = Rule(
            adam,
            advance,
            _Direction(nesterov, rooted=not (isinstance(eps_root, float) and eps_root == 0)),
            {name: jnp.asarray(value, jnp.float32) for name, value in scalars.items()},
        )
        updates, (mu, nu), key = step_averages(
            rule,
            updates,
            averages=(mu, nu),
            ticks=(mu_tick, nu_tick),
            policies=(mu_policy, nu_policy),
            key=state.key,
            finish=finish,
            implementation=implementation,
            hints=hints,
        )
        count = jnp.asarray(optax.safe_increment(state.count))
        return updates, ScaleByAdamState(count, mu, nu, key)

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        del params, extra_args
        return move(updates, state, None)

    tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
    return with_move(tx, move)
