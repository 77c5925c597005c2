"""The device that a test compiles for."""

import pytest
from aot.programs import installed

from qstate.cli._targets import TARGETS, Target


@pytest.fixture(params=TARGETS.values(), ids=TARGETS)
def target(request) -> Target:
    return installed(request.param)
