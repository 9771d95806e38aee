"""Is this plan legal, and is all memory it touches safe? Asked before anything runs. No torch."""

from hocket.checking.hazards import Event, Events, events_of, hazards, needed_events
from hocket.checking.validate import check

__all__ = ["Event", "Events", "check", "events_of", "hazards", "needed_events"]
