"""Building the C++ core, once for a machine and a version of torch."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import torch
from filelock import FileLock

from hocket.cache_folder import (
    CORE_PREFIX,
    LOCK,
    bound_builds,
    cached,
    find_compiler,
    is_sealed,
    native_folder,
    private_folder,
    remove,
    seal,
)
from hocket.ir.limits import free_bytes, usable_cpus

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
# Cores that came with the package (`make wheels`), each for one version of torch and of Python.
PREBUILT = _FOLDER / "prebuilt"
PROGRESS_S = 3.0
_OF_ERRORS = re.compile("error: |Killed")
# Compiling the largest unit takes 1.5 GiB (g++ 12). A process of a group that takes more than it may is killed.
COMPILE_BYTES = 2 * 2**30
# Sources that are compiled as one, the longest first: torch's headers take as long as most of them. With less than four
# cores two of these are compiled as one.
_UNITS = (
    ("binding", "direct", "guards", "signature"),
    ("interrupts", "lanes"),
    ("kernels", "winograd"),
    ("chains", "norms"),
)
_SOURCES = [_FOLDER / f"{name}.cpp" for unit in _UNITS for name in unit]
_HEADERS = sorted(_FOLDER.glob("*.h"))
# OpenMP is torch's own: the symbols are found in the library that it has loaded, and no second one is linked.
_FLAGS = ["-O2", "-std=c++20", "-fvisibility=hidden", "-fopenmp", "-Wall", "-DAT_PER_OPERATOR_HEADERS"]


class NoCompilerError(RuntimeError):
    """No C++ compiler is installed."""


@dataclass(frozen=True)
class Availability:
    """Availability of native lanes, with one line in `why` if they cannot be used."""

    ready: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.ready


@cache
def available() -> Availability:
    """Load the core, built if need be (half a minute, once), and say whether it works."""
    if not sys.platform.startswith("linux"):
        return Availability(False, f"native lanes are for Linux, this is {sys.platform}; Python lanes are used")
    log.info("hocket: loading the native lanes (they are compiled once, which takes up to half a minute)")
    try:
        load()
    except NoCompilerError as error:
        return Availability(False, f"native lanes need {error}; Python lanes are used")
    except (RuntimeError, OSError, ImportError, MemoryError, subprocess.CalledProcessError) as error:
        return Availability(False, f"native lanes could not be built ({cause(error)}); Python lanes are used")
    return Availability(True)


def cause(error: Exception) -> str:
    r"""The line of a failed build's output that says why: the compiler's first error, not the command before it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    line = next((line for line in lines if _OF_ERRORS.search(line)), lines[0])
    return textwrap.shorten(re.sub(r"^\S*/", "", line), 200, placeholder=" ...")


@cache
def load() -> Any:
    """The extension module: the one that came with the package, one that was built before, or one built now.

    A `NoCompilerError` says that there is no compiler to build it with, a RuntimeError what the compiler said, and a
    MemoryError that the limit of this process's group leaves too little for it.
    """
    name = core_name()
    shipped = PREBUILT / f"{name}.so"
    if is_sealed(shipped):
        return _imported(name, shipped)
    directory = private_folder(native_folder() / name)
    built = directory / f"{name}.so"
    # Torch's own lock is a file that stays when a build is killed. This one ends with its process.
    with FileLock(directory / LOCK):
        if is_sealed(built):
            os.utime(directory)
            return _imported(name, built)
        if find_compiler() is None:
            raise NoCompilerError("a C++ compiler (apt install g++)")
        jobs = _jobs(free_bytes())
        for left in directory.iterdir():  # by a build that was killed, or on a disk that was full
            if left.name != LOCK:
                remove(left)
        with _at_most(jobs):
            module = build(name, directory)
        seal(built)
        bound_builds(cached("native")[1], directory)
        return module


def _jobs(free: int | None) -> int | None:
    """Return how many files may be compiled at a time in this memory, None for any number. None at all is an error."""
    if free is None:
        return None
    if free < COMPILE_BYTES:
        needed, left = COMPILE_BYTES // 2**20, free // 2**20
        raise MemoryError(f"the compiler takes up to {needed} MiB, and this process's group has {left} MiB left")
    return free // COMPILE_BYTES


@contextmanager
def _at_most(jobs: int | None) -> Iterator[None]:
    """Bound the jobs of torch's extension loader, unless the user does."""
    if jobs is None or "MAX_JOBS" in os.environ:
        yield
        return
    os.environ["MAX_JOBS"] = str(min(jobs, os.cpu_count() or 1))
    try:
        yield
    finally:
        del os.environ["MAX_JOBS"]


def core_name() -> str:
    """The name of the core for this version of torch, of Python and of the source.

    A process that has loaded a core keeps it, and two checkouts of the same source share one.
    """
    version = "".join(
        c if c.isalnum() else "_" for c in f"{torch.__version__}_{sys.version_info[0]}{sys.version_info[1]}"
    )
    content = b"".join([" ".join(_FLAGS).encode(), *(file.read_bytes() for file in (*_SOURCES, *_HEADERS))])
    return f"{CORE_PREFIX}{version}_{hashlib.sha256(content).hexdigest()[:12]}"


def build(name: str, directory: Path) -> Any:
    """Compile the core into a folder, and load it."""
    from torch.utils.cpp_extension import load as compile_extension  # setuptools comes with it: 4 MB

    grouped = _UNITS if usable_cpus() >= 4 else (_UNITS[0] + _UNITS[1], _UNITS[2] + _UNITS[3])
    units = [directory / f"{'_'.join(unit)}.cpp" for unit in grouped]
    for file, unit in zip(units, grouped, strict=True):
        file.write_text("".join(f'#include "{_FOLDER / name}.cpp"\n' for name in unit), encoding="utf-8")
    with _progress("hocket: compiling its native core, once (20 s on two cores) "):
        return compile_extension(
            name=name,
            sources=[str(file) for file in units],
            extra_cflags=_FLAGS,
            build_directory=str(directory),
            verbose=False,
        )


def prebuild() -> Path:
    """Put the core for this torch and Python into the package, for a wheel (`make wheels`), and return its file."""
    name = core_name()
    with TemporaryDirectory() as folder:
        build(name, Path(folder))
        PREBUILT.mkdir(exist_ok=True)
        shipped = Path(shutil.copy(Path(folder) / f"{name}.so", PREBUILT))
    seal(shipped)
    return shipped


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """On a terminal, write a line to stderr, and a dot every few seconds."""
    if not sys.stderr.isatty():
        yield
        return
    is_over = Event()

    def write() -> None:
        sys.stderr.write(text)
        while not is_over.wait(PROGRESS_S):
            sys.stderr.write(".")
            sys.stderr.flush()
        sys.stderr.write("\n")

    thread = Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def release_kept_memory() -> None:
    """Give memory that lanes keep between steps back to the system."""
    if load.cache_info().currsize:  # there are none where the core is not loaded
        load().Core(0, 1, []).close()  # lanes that close give back what all lanes keep


def _imported(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
