"""Changes between two calls (kinds of batches and values, classes, attributes, precisions): each call is as eager's."""

from typing import Any

import pytest

import session.between_calls_of_batches  # noqa: F401  # adds its cases, and those of `between_calls_of_kinds`
from loops.runner import compared
from quick import covering
from session.between_calls import CALLS, CASES

pytestmark = pytest.mark.usefixtures("one_thread", "one_core")


MODES: dict[str, dict[str, Any]] = {"default": {}, "plan": {"guard": False, "planner": "serial"}}


@pytest.mark.parametrize(("name", "mode"), covering(CASES, MODES))
def test_each_call_is_eager_s(name: str, mode: str) -> None:
    options = {"cache": False, **MODES[mode]}
    compared(lambda: CASES[name]().loop(), options, steps=CALLS, counted=False, marked=1)
