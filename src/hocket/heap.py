"""The process's heap: return freed memory to the operating system, and hold back Python's collector.

Eager and planned steps keep separate memory: glibc keeps blocks that eager ops have freed, and lanes keep theirs
(`memory.h`). On a change between them, the kept memory is returned, or the process holds both: 1.35 times eager's peak
on ResNet-20 at batch 64, permanently after a single eager step between planned ones.

A capture runs the step with copies of all that it changes, and glibc keeps such memory if it is freed in the wrong
order (a ResNet-18 at batch 2: 130 MiB, a third of the process, and 45 MiB more when a planned step has replaced the
gradients). Those pages are not reused, because a planned step has its own memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

MAX_DYNAMIC_BYTES = 32 * 2**20  # glibc's largest threshold that adapts by itself (mallopt(3), M_MMAP_THRESHOLD)


@contextmanager
def collections_held() -> Iterator[None]:
    """Disable the automatic runs of Python's cyclic collector in the block.

    The collector runs finalizers and callbacks (`gc.callbacks`) wherever it starts: code that would be mistaken for a
    part of the step.
    """
    _HELD.enter()
    try:
        yield
    finally:
        _HELD.leave()


class _CollectorHold:
    """Keeps the collector off as long as any thread holds it: the first block puts it off, the last one on again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_blocks = 0
        self._was_enabled = False

    def renew_lock(self) -> None:
        self._lock = threading.Lock()

    def enter(self) -> None:
        with self._lock:
            if not self._num_blocks:
                self._was_enabled = gc.isenabled()
            self._num_blocks += 1
            gc.disable()

    def leave(self) -> None:
        with self._lock:
            self._num_blocks -= 1
            if not self._num_blocks and self._was_enabled:
                gc.enable()


_HELD = _CollectorHold()
os.register_at_fork(after_in_child=_HELD.renew_lock)  # another thread may have had it at that moment


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class HeapTrimmer:
    """Trims the heap at regular amounts of allocation, because freed memory between live values adds up otherwise."""

    def __init__(self, every_bytes: int = 32 * 2**20) -> None:
        self._every_bytes = every_bytes
        self._made_bytes = 0

    def made(self, size_bytes: int) -> None:
        """Count allocated bytes."""
        self._made_bytes += size_bytes
        if self._made_bytes > self._every_bytes:
            trim_heap()
            self._made_bytes = 0


def keep_freed_blocks() -> None:
    """Let the process keep freed blocks of up to 32 MiB, and 64 MiB at the end of the heap, for reuse.

    glibc returns blocks from 128 KiB on to the system until the process has freed a larger one, whose size then becomes
    the threshold. An eager step of stacked models, whose activations have such sizes, pays for each of its pages again
    in every step: 3,000 page faults and a third of the time with 8 digits CNNs. A program with one large batch has
    these thresholds anyway. The block that sets them is never written to, so it costs no memory. Without glibc, this
    does nothing.
    """
    libc = _libc()
    malloc, free = getattr(libc, "malloc", None), getattr(libc, "free", None)
    if malloc is not None and free is not None:
        malloc.argtypes, malloc.restype, free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
        free(malloc(MAX_DYNAMIC_BYTES - 2**16))


def trim_heap() -> bool:
    """Return freed memory to the system. Returns False without glibc, which alone has such a call."""
    trim = getattr(_libc(), "malloc_trim", None)
    return bool(trim(0)) if trim is not None else False
