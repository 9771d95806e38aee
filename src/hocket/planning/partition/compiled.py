"""The C++ search, a library without Python and torch.

Planning does not import torch, so this is not built by torch's extension loader, as `hocket.native` is, but by the
compiler, once for each version of the source, in the user's cache folder. Without a compiler `why_not` gives the
reason, and only the paper's heuristics in Python are used.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from hocket.cache_folder import LOCK, bound_builds, cache_folder, find_compiler, is_sealed, private_folder, remove, seal
from hocket.errors import InputError

_FOLDER = Path(__file__).parent / "core"
# The library that came with the package (`make wheels`).
PREBUILT = Path(__file__).parent / "prebuilt"
_FLAGS = ["-O2", "-std=c++20", "-shared", "-fPIC", "-Wall"]

_ARRAYS = ("xpins", "pins", "cost", "weight", "memory", "time", "arc_src", "arc_dst", "arc_phase")
_LIMITS = ("low", "high", "memory_limit", "price")


class HypergraphArrays(ctypes.Structure):
    """``hocket_problem`` of ``hypergraph.h``."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("n", "k", "nets", "arcs")),
        *((name, ctypes.c_void_p) for name in (*_ARRAYS, *_LIMITS)),
        ("objective", ctypes.c_int),
        ("acyclic", ctypes.c_int),
        ("micro_batches", ctypes.c_double),
    )


@cache
def why_not() -> str:
    """The reason why the search cannot be used here, empty if it can. The first use builds it, in some ten seconds."""
    try:
        library()
    except (InputError, OSError) as error:
        return f"the partition search cannot be used: {error}"
    return ""


@cache
def library() -> ctypes.CDLL:
    """The loaded library, or an `InputError` if there is no compiler or it fails, with its first line."""
    shipped = PREBUILT / _name()
    found = ctypes.CDLL(str(shipped if is_sealed(shipped) else _cached()))
    pointer, number = ctypes.c_void_p, ctypes.c_double
    found.hocket_search.argtypes = [
        *(pointer, pointer, ctypes.c_int, ctypes.c_uint64, ctypes.c_int, number, pointer, pointer, pointer)
    ]
    found.hocket_schedule.argtypes = [
        *(ctypes.c_int, ctypes.c_int, pointer, ctypes.c_int, pointer, pointer, pointer, ctypes.c_int),
        *(pointer, pointer, pointer, pointer, ctypes.c_uint64, ctypes.c_int, number, ctypes.c_int64),
        *(pointer, pointer, pointer),
    ]
    return found


def prebuild() -> Path:
    """Put the library into the package, for a wheel (`make wheels`), and return its file."""
    PREBUILT.mkdir(exist_ok=True)
    shipped = PREBUILT / _name()
    _build(shipped)
    return shipped


def _name() -> str:
    content = b"".join(path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in (".cpp", ".h"))
    words = " ".join([*_FLAGS, platform.machine(), sys.platform]).encode()
    return f"partition-{hashlib.sha256(words + content).hexdigest()[:16]}.so"


def _cached() -> Path:
    """Return the library in the user's cache folder, built if need be."""
    built = private_folder(cache_folder("partition")) / _name()
    if not is_sealed(built):
        from filelock import FileLock

        with FileLock(built.parent / LOCK):
            if not is_sealed(built):
                _build(built)
                bound_builds(built.parent.glob("partition-*.so"), built)
    return built


def _build(built: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        raise InputError("partition: no C++ compiler (apt install g++)")
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        sources = map(str, sorted(_FOLDER.glob("*.cpp")))
        command = [compiler, *_FLAGS, *sources, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            first = (done.stderr.strip().splitlines() or ["no words"])[0]
            raise InputError(f"partition: {compiler} failed: {first}")
        remove(built)
        made.replace(built)
    seal(built)
