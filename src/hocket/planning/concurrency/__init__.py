"""The planner `concurrency`: widths, ops side by side, and search (Runtime Concurrency Control). No torch."""

from hocket.planning.concurrency.planner import Concurrency

__all__ = ["Concurrency"]
