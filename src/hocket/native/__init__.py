"""The C++ core: native lanes, guards on Python state, and Ctrl-C held back while a step is not whole.

It is built on first use by torch's own extension loader, and cached. Without a compiler `available` is False, with the
reason in one line, and lanes and guards run in Python.
"""

from __future__ import annotations

from hocket.native.build import Availability, available, load, release_kept_memory

__all__ = ["Availability", "available", "load", "release_kept_memory"]
