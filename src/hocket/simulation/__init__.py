"""Simulation of plans: the timeline that a plan would have, without running it. No torch."""

from hocket.simulation.engine import simulate
from hocket.simulation.launches import LAUNCHES
from hocket.simulation.steps import step_us, unrolled

__all__ = ["LAUNCHES", "simulate", "step_us", "unrolled"]
