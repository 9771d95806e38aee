"""Memory of this process, as Linux reports it: resident now, and its peak since a moment."""

from __future__ import annotations

import os
from pathlib import Path

_PEAK, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def is_measurable() -> bool:
    """Return True if the system reports the peak since a moment."""
    return os.access(_PEAK, os.W_OK)


def set_back_peak() -> None:
    """Start a new peak."""
    _PEAK.write_text("5")


def peak_bytes() -> float:
    """Return the peak of resident memory since `set_back_peak`."""
    return _field_bytes("VmHWM")


def resident_bytes() -> float:
    """Return the resident memory."""
    return _field_bytes("VmRSS")


def _field_bytes(field: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return float(line.split()[1]) * 1024
