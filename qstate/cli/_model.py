"""A small LLaMA-style decoder over bytes, in Flax NNX (RMSNorm, RoPE, SwiGLU, no biases).

Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971. Every
matrix has a last axis that is a multiple of 128, so that blocks of 128 tile it exactly.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

import qstate


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of a `Decoder`; the default has 0.56 M parameters."""

    vocabulary: int = 256
    width: int = 128
    layers: int = 3
    heads: int = 4
    hidden: int = 256
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):  # RoPE rotates pairs of features within a head
            raise ValueError(f"width {self.width} must be a multiple of 2 x heads {self.heads}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@qstate.fp32_island
def rotary_embedding(x: jax.Array, base: float) -> jax.Array:
    """Rotates pairs of features by angles that grow with the position (RoPE, arXiv:2104.09864).

    Args:
      x: [batch, time, heads, features], `features` even.
      base: the longest wavelength is about 2 pi times this.

    Returns:
      An array like `x`; inner products of two of its rows depend on their distance only.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequencies  # [time, half]
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale: a mean of squares, so computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return _root_mean_square_norm(x, self.scale[...], self.epsilon)


@qstate.fp32_island
def _root_mean_square_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * scale


def _causal_softmax(scores: jax.Array) -> jax.Array:
    time = scores.shape[-1]
    causal = jnp.tril(jnp.ones((time, time), bool))
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    init = nnx.initializers.normal(scale * inputs**-0.5)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


def _residual_scale(config: ModelConfig) -> float:
    # Each of the 2 x layers branches adds to the residual stream; this keeps its variance flat.
    return 1 / math.sqrt(2 * config.layers)


class Attention(nnx.Module):
    """Causal multi-head attention; scores and softmax in float32."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        width = config.width
        self.config = config
        self.query = _linear(width, width, rngs)
        self.key = _linear(width, width, rngs)
        self.value = _linear(width, width, rngs)
        self.output = _linear(width, width, rngs, _residual_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, time, width = x.shape
        heads = (batch, time, self.config.heads, self.config.head_width)
        query = rotary_embedding(self.query(x).reshape(heads), self.config.rope_base)
        key = rotary_embedding(self.key(x).reshape(heads), self.config.rope_base)
        value = self.value(x).reshape(heads)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        scores = scores / math.sqrt(self.config.head_width)
        weights = qstate.fp32_island(_causal_softmax, output_dtype=x.dtype)(scores)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.output(mixed.reshape(batch, time, width))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)), arXiv:2002.05202."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config.width, config.hidden, rngs)
        self.up = _linear(config.width, config.hidden, rngs)
        self.down = _linear(config.hidden, config.width, rngs, _residual_scale(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and feed-forward, each behind its norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_epsilon)
        self.feed_forward = SwiGLU(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nnx.Module):
    """Bytes [batch, time] to logits of the next byte [batch, time, vocabulary].

    It computes in the dtype of its parameters, but for what fails in 16 bits.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(
            config.vocabulary,
            config.width,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        self.head = _linear(config.width, config.vocabulary, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embedding(tokens.astype(jnp.int32))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
