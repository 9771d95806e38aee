"""Checks of a plan before it runs: is it legal, and do all accesses to memory keep their order? No torch."""

from hocket.checking.hazards import hazards
from hocket.checking.validate import check

__all__ = ["check", "hazards"]
