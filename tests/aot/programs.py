"""The devices that programs are compiled for, none of which has to be there.

The compilers come with packages: libtpu for TPUs, jax-cuda13-plugin and jax-cuda13-pjrt for GPUs.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from aot.hlo import calls, moved_bytes
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

import qstate

# XLA's GpuTargetConfigProto for an H100 SXM, as text, with the device's public figures.
_H100_NAME = "NVIDIA H100 80GB HBM3"
_H100 = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{_H100_NAME}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      name: of its topology.
      platform: ``"tpu"`` or ``"cuda"``.
      packages: distributions that bring the compiler.
      implementation: the kernel's name in qstate.
      call: the custom call that a Pallas kernel becomes.
    """

    name: str
    platform: str
    packages: tuple[str, ...]
    implementation: str
    call: str

    @functools.cached_property
    def sharding(self) -> SingleDeviceSharding:
        """On one device of the kind."""
        missing = set(self.packages) - _installed()
        if missing:
            pytest.skip(f"compiling for {self.name} needs {' and '.join(sorted(missing))}")
        how = {}
        if self.platform == "cuda":
            how = {"target_config": _H100, "topology": "1x1x1"}
        topology = topologies.get_topology_desc(self.name, platform=self.platform, **how)
        return SingleDeviceSharding(topology.devices[0])

    def compile(self, step: Callable[..., Any], *operands: Any, donate: Any = ()) -> "Compiled":
        """Compiles ``step(*operands)`` for one device.

        Args:
          step: a function of trees, which returns what is donated first: a donated array's memory
            goes to the first result of its type, whichever that is.
          operands: trees of arrays, of which shapes and dtypes are taken.
          donate: which operands.
        """
        place = functools.partial(_placed, sharding=self.sharding)
        jitted = jax.jit(step, donate_argnums=donate)
        with _triton() if self.platform == "cuda" else contextlib.nullcontext():
            program = jitted.lower(*jax.tree.map(place, operands)).compile()
        return Compiled(program.as_text(), program.memory_analysis(), self.call)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
      text: its HLO.
      memory: what XLA says about the memory it takes.
      call: the custom call that a Pallas kernel becomes.
    """

    text: str
    memory: Any
    call: str

    @property
    def kernels(self) -> list[int]:
        """For every Pallas kernel, how many arrays it updates in place."""
        return calls(self.text, self.call)

    @property
    def moved(self) -> int:
        """Bytes read from and written to the device's memory."""
        return moved_bytes(self.text)

    @property
    def temporary(self) -> int:
        """Bytes of temporaries."""
        return self.memory.temp_size_in_bytes

    @property
    def in_place(self) -> int:
        """Bytes of results that take the memory of what is donated."""
        return self.memory.alias_size_in_bytes


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def arrays(shapes: Sequence[tuple[int, ...]], dtype: Any = jnp.float32) -> list[Any]:
    """Leaves of those shapes, without numbers."""
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def adam(target: Target, mu: qstate.Storage, nu: qstate.Storage) -> Any:
    """The transformation, by the kernel for a target."""
    return qstate.scale_by_adam(mu_storage=mu, nu_storage=nu, implementation=target.implementation)


def stored_arrays(state: Any) -> int:
    """How many arrays of codes and scales a state has."""
    averages = state.mu, state.nu
    return len(jax.tree.leaves([(average.codes, average.scales) for average in averages]))


def state_first(tx: optax.GradientTransformationExtraArgs) -> Callable[[Any, Any], Any]:
    """Its update, returning the state first, as donating it asks for."""
    return lambda gradients, state: tx.update(gradients, state)[::-1]


def _placed(x: Any, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@contextlib.contextmanager
def _triton() -> Iterator[None]:
    """What JAX 0.12 asks for where a Triton kernel is compiled, and says about it."""
    device = AbstractDevice(device_kind=_H100_NAME, num_cores=None, platform="gpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is dep", DeprecationWarning)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            yield


@functools.cache
def _installed() -> set[str]:
    """Names of all distributions."""
    return {distribution.name for distribution in importlib.metadata.distributions()}


def _tpu(name: str) -> Target:
    return Target(name, "tpu", ("libtpu",), "pallas_tpu", "tpu_custom_call")


V5E, V6E, TPU7X = _tpu("v5e:2x2"), _tpu("v6e:2x2"), _tpu("tpu7x:2x2x1")
H100 = Target(
    "h100",
    "cuda",
    ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "pallas_gpu",
    "__gpu$xla.gpu.triton",
)
TARGETS = (V5E, V6E, TPU7X, H100)
