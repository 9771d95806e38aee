"""The C++ core: native lanes, guards on Python state, and Ctrl-C held back while a step is not whole.

It is built on first use by torch's own extension loader, and cached by it. Where there is no compiler, `available` is
False and says why in one line; lanes and guards then run in Python.
"""

from __future__ import annotations

from hocket.native.build import Availability, available, load, release_kept_memory

__all__ = ["Availability", "available", "load", "release_kept_memory"]
