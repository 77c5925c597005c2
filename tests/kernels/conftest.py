"""A leaf of Adam, and arrays to encode and decode, as programs that any implementation can run."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qstate.kernels import Program, run
from qstate.numerics import Storage, encode, key_words
from qstate.state._step import _Emit, _Keep
from qstate.transforms._adam import _Direction, advance

WORDS = np.array([[0x12345678, 0x9ABCDEF0], [0x12345679, 0x9ABCDEF1]], np.uint32)
SCALARS = {
    "c1": 0.1,
    "c2": 0.01,
    "m_weight": 2.5,
    "v_weight": 20.0,
    "eps": 1e-8,
    "step_size": -0.003,
    "weight_decay": 0.1,
}
encode_jit = jax.jit(encode, static_argnums=1)


def land(scalars, parameter, direction):
    direction = direction + scalars["weight_decay"] * parameter
    return parameter + scalars["step_size"] * direction


def numbers(shape, seed, dtype=jnp.float32):
    """Normal numbers, in rows of very different size, and some zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-8, 8, (*shape[:-1], 1) if shape else ()))
    return jnp.asarray(np.where(rng.random(shape) < 0.05, 0, x), dtype)


@dataclasses.dataclass(frozen=True)
class AdamLeaf:
    """A step of Adam on one leaf.

    Attributes:
      storages: of the two moments.
      shape: of the leaf.
      dtypes: of the gradient, and of the parameter.
      in_place: whether the output is the new parameter, or the update.
      resets: kinds of the moments' resets, None where there are none.
      due: whether those are due.
    """

    storages: tuple[Storage, Storage]
    shape: tuple[int, ...]
    dtypes: tuple[str, str] = ("float32", "float32")
    in_place: bool = False
    resets: tuple[str | None, str | None] = (None, None)
    due: tuple[bool, bool] = (False, False)

    @property
    def program(self) -> Program:
        return Program(
            advance,
            _Emit(_Direction(nesterov=False, rooted=False), land if self.in_place else None),
            _Keep(self.resets),
            self.storages,
            self.storages,
            (jnp.dtype(self.dtypes[self.in_place]),),
            (1 if self.in_place else None,),
        )

    @property
    def operands(self) -> tuple[Any, ...]:
        dense = [numbers(self.shape, seed, dtype) for seed, dtype in enumerate(self.dtypes)]
        m, v = numbers(self.shape, 2), numbers(self.shape, 3) ** 2
        stored = [encode_jit(x, s, k) for k, (x, s) in enumerate(zip((m, v), self.storages))]  # noqa: B905
        scalars = SCALARS | {f"due{j}": float(due) for j, due in enumerate(self.due)}
        scalars = {name: jnp.float32(value) for name, value in scalars.items()}
        words = jnp.asarray(WORDS[: self.program.hashes])
        return dense if self.in_place else dense[:1], stored, scalars, words, jnp.int32(1)

    def run(self, implementation: str | None, operands: Any = None) -> Any:
        """The outputs, and codes and scales. ``operands`` of its own if None."""
        return run_jit(self.program, self.shape, implementation, operands or self.operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def run_jit(program, shape, implementation, operands):
    outputs, written, _ = run(
        program, shape, *operands, implementation=implementation, interpret=True
    )
    return outputs, written


def encode_program(storage, x, key, implementation):
    """``encode(x, storage, key)`` as a program."""
    program = Program(
        lambda scalars, dense, old: dense,
        lambda scalars, dense, fresh: [],
        lambda scalars, fresh: fresh,
        (),
        (storage,),
        (),
        (),
    )
    words = key_words(key)[None][: program.hashes]
    _, written = run_jit(program, x.shape, implementation, ([x], [], {}, words, jnp.int32(1)))
    return written[0]


def decode_program(stored, storage, shape, implementation):
    """``decode(*stored, storage, shape)`` as a program."""
    program = Program(
        lambda scalars, dense, old: old,
        lambda scalars, dense, fresh: fresh,
        lambda scalars, fresh: [],
        (storage,),
        (),
        (jnp.float32,),
        (None,),
    )
    operands = [], [stored], {}, jnp.zeros((0, 2), jnp.uint32), jnp.int32(1)
    outputs, _ = run_jit(program, shape, implementation, operands)
    return outputs[0]


def _assert_same(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()


@pytest.fixture
def adam():
    """``adam(storages, shape, ...)``: an `AdamLeaf`."""
    return AdamLeaf


@pytest.fixture
def encode_by():
    """``encode_by(storage, x, key, implementation)``."""
    return encode_program


@pytest.fixture
def decode_by():
    """``decode_by(stored, storage, shape, implementation)``."""
    return decode_program


@pytest.fixture
def draw():
    """``draw(shape, seed)``: float32 numbers of rows of very different size."""
    return numbers


@pytest.fixture
def assert_same():
    """Asserts that two trees have the same bits."""
    return _assert_same
