"""The same numbers as `numerics` gives, in one pass over the bytes."""

from qstate.kernels._dispatch import check_implementation, run
from qstate.kernels._filled import filled
from qstate.kernels._partition import placement_of, sharding_of
from qstate.kernels._program import Arrays, Program, Scalars
