"""Schedules that have a verdict, by times that a test sets."""

from contextlib import ExitStack

import pytest

from execution.probe import forget
from support.clocks import Clock, scheduled
from support.schedules import decide


@pytest.fixture
def decided():
    """Makes a clock, a job, and a schedule that has a verdict by this clock. It is closed after the test."""
    with ExitStack() as stack:

        def make(planned_ms=2.0, eager_ms=3.0, **options):
            clock = Clock()
            clock.planned_ms, clock.eager_ms = planned_ms, eager_ms
            job, fast = scheduled(clock, **options)
            decide(stack.enter_context(fast), job)
            return clock, job, fast

        yield make
    forget()
