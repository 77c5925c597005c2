"""16-bit weights without master weights: every update rounded stochastically."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from qstate.numerics import (
    BF16,
    F16,
    NoScale,
    Storage,
    encode_unpacked,
    key_words,
    random_bits,
    split_key,
)
from qstate.precision._dtypes import is_narrow
from qstate.precision._landing import update_to
from qstate.precision._narrow_parameters import call_off_warnings

_GRIDS = {
    jnp.dtype(jnp.bfloat16): Storage(BF16, NoScale(), "stochastic"),
    jnp.dtype(jnp.float16): Storage(F16, NoScale(), "stochastic"),
}
# The same seed given to an optimizer must not give its averages and the weights the same bits.
_SALT = 0x5F3759DF


class StochasticRoundParamsState(NamedTuple):
    """State of `stochastic_round_params`."""

    key: jax.Array  # uint32[2]


def stochastic_round_params(key: Any) -> optax.GradientTransformationExtraArgs:
    r"""Makes `optax.apply_updates` end on a stochastically rounded 16-bit weight.

    .. math::
       p \leftarrow \mathrm{SR}_{16}(p + u), \qquad \mathbb E[\mathrm{SR}_{16}(x)] = x

    so that updates too small for the weight's grid act with a probability instead of never. It is
    the last link of a chain and takes the place of master weights, at no bytes a parameter.

    Args:
      key: seed of the rounding: an integer or a JAX key.

    Returns:
      A `optax.GradientTransformationExtraArgs`. Its ``update`` needs ``params``. Parameters of 32
      bits pass as they are.

    Raises:
      TypeError: for a key that is none.
      ValueError: in ``update``, without ``params``.

    State:
      ``StochasticRoundParamsState``: a key.

    Numerics:
      One of the two neighbours of ``p + u`` on the parameter's grid, by 16 random bits; saturates
      at the largest finite number. A weight whose update is zero does not move. The emitted updates
      are float32. A step skipped outside of this link still takes a key; inside of
      `with_loss_scale` it does not.

    Example:
      >>> import jax.numpy as jnp, optax, qstate
      >>> tx = optax.chain(optax.sgd(1.0), qstate.stochastic_round_params(0))
      >>> params = jnp.ones(1000, jnp.bfloat16)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.full(1000, 0.001), state, params)
      >>> params = optax.apply_updates(params, updates)
      >>> sorted(set(params.tolist())), abs(params.astype("float32").mean() - 0.999) < 2e-4
      ([0.99609375, 1.0], Array(True, dtype=bool))

    References:
      Zamirai et al., `Revisiting BFloat16 Training <https://arxiv.org/abs/2010.06192>`_, 2020
    """
    key_words(key)  # refuses early what init would

    def init_fn(params) -> Any:
        del params
        call_off_warnings()
        return StochasticRoundParamsState(key_words(key) ^ jnp.uint32(_SALT))

    def update_fn(updates, state, params=None, **extra_args) -> Any:
        del extra_args
        if params is None:
            raise ValueError(
                "stochastic_round_params needs the parameters: tx.update(grads, state, params)"
            )
        leaves, treedef = jax.tree.flatten(params)
        steps = treedef.flatten_up_to(updates)
        key, words = split_key(state.key, len(leaves))
        rounded = [
            _rounded(p, u, words[i]) if is_narrow(p) and u is not None else u
            for i, (p, u) in enumerate(zip(leaves, steps, strict=True))
        ]
        return treedef.unflatten(rounded), StochasticRoundParamsState(key)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _rounded(p: jax.Array, u: jax.Array, words: jax.Array) -> jax.Array:
    """The update by which a parameter becomes one of the neighbours of ``p + u``."""
    grid = _GRIDS.get(jnp.dtype(p.dtype))
    if grid is None:
        raise ValueError(
            f"parameters of {p.dtype} cannot be rounded to; cast them to bfloat16 or float16"
        )
    x = p.astype(jnp.float32) + u.astype(jnp.float32)
    codes, _ = encode_unpacked(x, grid, random_bits(words, x.shape) >> 16)
    target = lax.bitcast_convert_type(codes.reshape(p.shape), p.dtype)
    return update_to(p, target)
