"""Building the C++ core, once for a machine and a version of torch."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["Availability", "available", "load"]

log = logging.getLogger("hocket")

_SOURCE = Path(__file__).with_name("lanes.cpp")


@dataclass(frozen=True)
class Availability:
    """Whether native lanes can be used here; `why` is one line when not."""

    ready: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.ready


@cache
def available() -> Availability:
    """Build the core if need be (up to a minute, once), and say whether it works."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"native lanes are for Linux, this is {sys.platform}; Python lanes are used")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return Availability(False, "native lanes need a C++ compiler (apt install g++); Python lanes are used")
    log.info("hocket: loading the native lanes (they are compiled once, which takes up to a minute)")
    try:
        load()
    except (RuntimeError, OSError, ImportError, subprocess.CalledProcessError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        return Availability(False, f"native lanes could not be built ({first[0]}); Python lanes are used")
    return Availability(True)


@cache
def load() -> Any:
    """The extension module.

    Raises:
        RuntimeError: it does not build; torch tells the compiler's words.
    """
    from torch.utils.cpp_extension import load as build

    # A name per torch and Python version: the loader rebuilds when the source changes, not when they do.
    version = "".join(
        c if c.isalnum() else "_" for c in f"{torch.__version__}_{sys.version_info[0]}{sys.version_info[1]}"
    )
    return build(
        name=f"hocket_lanes_{version}",
        sources=[str(_SOURCE)],
        extra_cflags=["-O2", "-std=c++20", "-Wall", "-Wno-unknown-pragmas"],
        verbose=False,
    )
