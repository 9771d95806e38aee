"""Is this plan legal, and is all memory it touches safe? Asked before anything runs. No torch."""

from hocket.checking.hazards import Events, events_of, hazards
from hocket.checking.validate import check

__all__ = ["Events", "check", "events_of", "hazards"]
