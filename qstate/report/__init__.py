"""What a user reads out of a state."""

from qstate.report._describe import dequantize, describe, nbytes
from qstate.report._stalls import stall_fraction
from qstate.report._table import aligned
