"""The discrete-event engine: what a plan would take, without running it. No torch."""

from hocket.simulate.engine import simulate

__all__ = ["simulate"]
