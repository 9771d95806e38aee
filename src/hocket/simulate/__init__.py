"""The discrete-event engine: what a plan would take, without running it. No torch."""

from hocket.simulate.engine import simulate
from hocket.simulate.launches import LAUNCHES
from hocket.simulate.steps import step_us, unrolled

__all__ = ["LAUNCHES", "simulate", "step_us", "unrolled"]
