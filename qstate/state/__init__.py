"""How an average lives between steps: its codes, scales and age; its step; its resets."""

from qstate.kernels import filled
from qstate.state._average import (
    Average,
    Exempt,
    dequantize_average,
    has_average,
    is_average,
    leaves_of,
    path_name,
    small_leaf,
    stored_leaves,
    zeros,
)
from qstate.state._damage import check_dtype
from qstate.state._hints import Hints
from qstate.state._reset import (
    Adaptive,
    Every,
    Policy,
    Tick,
    adaptive,
    bias_correction,
    every,
    resolve,
    still,
    tick,
)
from qstate.state._serialization import register_with_flax
from qstate.state._step import Finish, Rule, keep_averages, step_averages
from qstate.state._stepping import move_of, step, with_move, with_step
from qstate.state._unchanged import unchanged_share
from qstate.state._warning import warn
