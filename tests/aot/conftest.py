"""The device that a test compiles for."""

import pytest
from aot.targets import TARGETS, Target


@pytest.fixture(params=TARGETS, ids=lambda target: target.name)
def target(request) -> Target:
    return request.param
