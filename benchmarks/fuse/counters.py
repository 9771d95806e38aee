"""A GPU's own counters by DCGM, where ``dcgmi`` is installed: how much of the device a contender kept busy."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from statistics import fmean
from time import perf_counter

__all__ = ["FIELDS", "counted", "counters_missing"]

# DCGM's numbers of the fields that HFTA's figures 8 and 9 show.
FIELDS = {"sm_active": 1002, "sm_occupancy": 1003, "tensor_active": 1004, "dram_active": 1005}
EVERY_MS = 100
LEAST_S = 1.0


def counters_missing() -> str:
    """Why there are no counters; empty where there are."""
    return "" if shutil.which("dcgmi") else "counters: dcgmi is not installed"


def counted(work: Callable[[], None], least_s: float = LEAST_S) -> dict[str, float]:
    """Repeat `work` for a while, and give the means of the counters, each 0 to 1; empty where none were read."""
    fields = ",".join(str(number) for number in FIELDS.values())
    command = ["dcgmi", "dmon", "-i", "0", "-e", fields, "-d", str(EVERY_MS)]
    watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        begin = perf_counter()
        while perf_counter() - begin < least_s:
            work()
    finally:
        watch.terminate()
        text, _ = watch.communicate(timeout=30)
    number = r"\s+([0-9.]+)"
    rows = re.findall(rf"^GPU \d+{number * len(FIELDS)}\s*$", text, re.MULTILINE)
    return {name: fmean(float(row[place]) for row in rows) for place, name in enumerate(FIELDS)} if rows else {}
