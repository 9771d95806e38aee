"""Building the C++ core, once for a machine and a version of torch."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hocket.cache_folder import cache_folder, is_sealed, private_folder, seal

__all__ = ["Availability", "available", "load", "release_kept_memory"]

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.cpp"))
_HEADERS = sorted(_FOLDER.glob("*.h"))
# OpenMP is torch's own: the symbols are found in the library that it has loaded, and no second one is linked.
_FLAGS = ["-O2", "-std=c++20", "-fvisibility=hidden", "-fopenmp", "-Wall"]


@dataclass(frozen=True)
class Availability:
    """Availability of native lanes, with one line in `why` if they cannot be used."""

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
        RuntimeError: it does not build. The message has the compiler's output.
    """
    # A name per version of torch, of Python and of the source: whoever has loaded a core keeps it, and two checkouts of
    # the same source share one.
    version = "".join(
        c if c.isalnum() else "_" for c in f"{torch.__version__}_{sys.version_info[0]}{sys.version_info[1]}"
    )
    content = b"".join([" ".join(_FLAGS).encode(), *(file.read_bytes() for file in (*_SOURCES, *_HEADERS))])
    name = f"hocket_lanes_{version}_{hashlib.sha256(content).hexdigest()[:12]}"
    directory = private_folder(_root() / name)
    built = directory / f"{name}.so"
    with _alone_in(directory):
        if is_sealed(built):
            return _imported(name, built)
        built.unlink(missing_ok=True)  # a build that was killed, or a disk that was full, may have left half a file
        if sys.stderr.isatty():
            sys.stderr.write("hocket: compiling its native core, once (about a minute) ...\n")
        from torch.utils.cpp_extension import load as build  # setuptools comes with it: 4 MB, where nothing is built

        module = build(
            name=name,
            sources=[str(file) for file in _SOURCES],
            extra_cflags=_FLAGS,
            build_directory=str(directory),
            verbose=False,
        )
        seal(built)
        return module


def release_kept_memory() -> None:
    """Give memory that lanes keep between steps back to the system."""
    if load.cache_info().currsize:  # there are none where the core is not loaded
        load().Core(0, 1, []).close()  # lanes that close give back what all lanes keep


def _root() -> Path:
    """The folder of torch's extensions where one is set, else the user's cache folder."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else cache_folder("native")


def _imported(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One process at a time. Torch's own lock is a file that stays when a build is killed, and stops all others."""
    import fcntl

    with (directory / "building").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however that ends
        (directory / "lock").unlink(missing_ok=True)
        yield
