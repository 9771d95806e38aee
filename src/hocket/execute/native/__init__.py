"""Lanes without the interpreter: a small C++ core calls the ops of a plan through torch's dispatcher.

The core is built on first use by torch's own extension loader, and cached by it. Where there is no compiler,
`available` is False and says why in one line; the Python lanes then do the same work, slower.
"""

from __future__ import annotations

from hocket.execute.native.build import Availability, available
from hocket.execute.native.lanes import NativeLanes

__all__ = ["Availability", "NativeLanes", "available"]
