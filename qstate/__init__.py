"""Optax optimizer state in 16, 8 or 4 bits that stays responsive."""

from qstate import numerics, theory
from qstate.numerics import (
    BF16,
    DYNAMIC4,
    DYNAMIC8,
    E2M1,
    E4M3,
    E5M2,
    F16,
    F32,
    INT8,
    UDYNAMIC8,
    UE2M2,
    UE4M4,
    ULINEAR4,
    Block,
    Delayed,
    NoScale,
    PerTensor,
    Rank1,
    Storage,
    storage,
)
from qstate.optimizers import adam, adamw
from qstate.precision import (
    Fp8Scales,
    explain_nonfinite,
    fp8_cast,
    fp32_island,
    loss_scale,
    master_params,
    stochastic_round_params,
    with_loss_scale,
    with_master_weights,
)
from qstate.report import dequantize, describe, nbytes, stall_fraction
from qstate.state import adaptive, every, step
from qstate.transforms import quantize_state, scale_by_adam

__version__ = "0.1.0.dev0"
