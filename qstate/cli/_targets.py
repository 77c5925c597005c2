"""The devices that programs are compiled for, none of which has to be there.

The compilers come with packages: libtpu for TPUs, jax-cuda13-plugin and jax-cuda13-pjrt for GPUs.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from qstate.cli._hlo import calls, collectives, moved_bytes

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

# That several processes may load it; and what it would else ask the machine for, and complain.
_LIBTPU = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


class CompilerMissing(RuntimeError):
    """A compiler is not installed."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      name: what users call it, such as ``"tpu:v5e"``.
      topology: its smallest topology's name.
      platform: ``"tpu"`` or ``"cuda"``.
      packages: distributions that bring the compiler.
      implementation: the kernel's name in qstate.
      call: the custom call that a Pallas kernel becomes.
    """

    name: str
    topology: str
    platform: str
    packages: tuple[str, ...]
    implementation: str
    call: str

    def devices(self, topology: str | None = None) -> list[Any]:
        """The devices of a topology of that kind.

        Raises:
          CompilerMissing: with what to install.
        """
        missing = set(self.packages) - _installed()
        if missing:
            raise CompilerMissing(
                f"compiling for {self.name} needs {' and '.join(sorted(missing))}, of JAX's version"
            )
        for name, value in _LIBTPU.items():
            os.environ.setdefault(name, value)
        how = {}
        if self.platform == "cuda":
            how = {"target_config": _H100, "topology": "1x1x1"}
        name = topology or self.topology
        return topologies.get_topology_desc(name, platform=self.platform, **how).devices

    @functools.cached_property
    def sharding(self) -> SingleDeviceSharding:
        """On one device of the kind."""
        return SingleDeviceSharding(self.devices()[0])

    def compile(self, step: Callable[..., Any], *operands: Any, donate: Any = ()) -> "Compiled":
        """Compiles ``step(*operands)``.

        Args:
          step: a function of trees. Donated arrays give their memory to results of their types in
            the order of both, whatever they hold: what is donated has to be returned first.
          operands: trees of arrays, of which shapes, dtypes and shardings are taken; what has no
            sharding is on one device.
          donate: which operands.
        """
        place = functools.partial(_placed, sharding=self.sharding)
        jitted = jax.jit(step, donate_argnums=donate)
        with _triton() if self.platform == "cuda" else contextlib.nullcontext():
            program = jitted.lower(*jax.tree.map(place, operands)).compile()
        return Compiled(program.as_text() or "", program.memory_analysis(), self.call)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
      text: its HLO.
      memory: what XLA says about the memory it takes on a device.
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
    def collectives(self) -> list[str]:
        """Operations that move something between devices."""
        return collectives(self.text)

    @property
    def moved(self) -> int:
        """Bytes read from and written to the device's memory."""
        return moved_bytes(self.text)

    @property
    def arguments(self) -> int:
        """Bytes of the operands."""
        return self.memory.argument_size_in_bytes

    @property
    def temporary(self) -> int:
        """Bytes of temporaries."""
        return self.memory.temp_size_in_bytes

    @property
    def in_place(self) -> int:
        """Bytes of results that take the memory of what is donated."""
        return self.memory.alias_size_in_bytes


def _placed(x: Any, sharding: SingleDeviceSharding) -> jax.ShapeDtypeStruct:
    own = getattr(x, "sharding", None) if isinstance(x, jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own or sharding)


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


def _tpu(name: str, topology: str) -> Target:
    return Target(name, topology, "tpu", ("libtpu",), "pallas_tpu", "tpu_custom_call")


V5E = _tpu("tpu:v5e", "v5e:2x2")
V6E = _tpu("tpu:v6e", "v6e:2x2")
V7X = _tpu("tpu:v7x", "tpu7x:2x2x1")
H100 = Target(
    "gpu:h100",
    "h100",
    "cuda",
    ("jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "pallas_gpu",
    "__gpu$xla.gpu.triton",
)
TARGETS = {target.name: target for target in (V5E, V6E, V7X, H100)}
