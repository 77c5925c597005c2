"""What a step computes, over averages in any storage."""

from qstate.transforms._adam import ScaleByAdamState, scale_by_adam
from qstate.transforms._descent import descend
from qstate.transforms._quantize_state import QuantizeState, quantize_state
