"""How a leaf is cut: rows of blocks, and what is stored of them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from qstate.kernels._program import Program
from qstate.numerics import SCALE_DTYPES, Block, Minifloat, Storage, block_layout


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A leaf as rows of blocks.

    Attributes:
      rows: product of the leading axes.
      columns: the last axis.
      block: elements of a block along a row; the last block of a row may have fewer.
      run, stride: if the leaf is a shard, how many neighbouring rows are neighbours in the whole
        array too, and how far from there the next run of them begins; 0 where all are.
    """

    rows: int
    columns: int
    block: int
    run: int = 0
    stride: int = 0

    @property
    def blocks(self) -> int:
        """Blocks in a row."""
        return -(-self.columns // self.block)

    @property
    def broken(self) -> bool:
        """Whether rows that are neighbours here are not all neighbours in the whole array."""
        return 0 < self.run < self.rows

    @property
    def tail(self) -> int:
        """Elements of the last block of a row, 0 if it is full."""
        return self.columns % self.block

    def code_columns(self, storage: Storage) -> int:
        """Array elements that the codes of a row take."""
        if not storage.packed:
            return self.columns
        whole, tail = divmod(self.columns, self.block)
        return whole * -(-self.block // 2) + -(-tail // 2)

    def results(self, program: Program) -> list[Any]:
        """What a program gives: outputs, codes and scales."""
        outputs = [jax.ShapeDtypeStruct((self.rows, self.columns), t) for t in program.dtypes]
        return outputs + self.structs(program.writes)

    def structs(self, storages: Sequence[Storage]) -> list[Any]:
        """What is stored of a leaf, one array after the other."""
        structs = []
        for storage in storages:
            columns = self.code_columns(storage)
            structs.append(jax.ShapeDtypeStruct((self.rows, columns), storage.format.dtype))
            if storage.has_scales:
                dtype = SCALE_DTYPES[storage.scaling.scale]
                structs.append(jax.ShapeDtypeStruct((self.rows, self.blocks), dtype))
        return structs


def geometry(program: Program, shape: tuple[int, ...]) -> Geometry | str:
    """How a leaf of that shape is cut for all of a program's storages, or why no kernel can."""
    sizes = {s.scaling.block for s in program.storages if isinstance(s.scaling, Block) or s.packed}
    if len(sizes) > 1:
        return f"the averages have blocks of {' and '.join(map(str, sorted(sizes)))} elements"
    for storage in program.storages:
        if not isinstance(storage.format, Minifloat):
            return f"{storage.format} is a codebook, which needs to look numbers up"
        if storage.has_scales and not isinstance(storage.scaling, Block):
            return f"{storage} has scales that span more than a block"
    shape = shape or (1,)
    blocks = block_layout(shape, sizes.pop() if sizes else Block().size)
    if blocks.behind:
        return f"blocks of an array {shape} span its last {blocks.behind + 1} axes"
    return Geometry(math.prod(shape[:-1]), shape[-1], blocks.length)
