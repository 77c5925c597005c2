"""Mixed precision around a step: loss scales, skipped steps, master and rounded weights."""

from qstate.precision._dtypes import is_narrow
from qstate.precision._explain import NonfiniteReport, explain_nonfinite
from qstate.precision._fp8 import Fp8Scales, fp8_cast
from qstate.precision._islands import fp32_island
from qstate.precision._loss_scale import LossScaleState, loss_scale, with_loss_scale
from qstate.precision._master_weights import (
    MasterWeightsState,
    master_params,
    with_master_weights,
)
from qstate.precision._narrow_parameters import NarrowParametersWatch
from qstate.precision._remainder import join, split
from qstate.precision._stochastic_params import (
    StochasticRoundParamsState,
    stochastic_round_params,
)
