"""Lanes without the interpreter: a small C++ core calls the ops of a plan through torch's dispatcher."""

from __future__ import annotations

from hocket.execution.native.lanes import NativeLanes

__all__ = ["NativeLanes"]
