"""The heap is trimmed as often as there is something to be given back."""

import gc
import platform
import subprocess
import sys
import threading

import pytest

from hocket import heap
from hocket.heap import HeapTrimmer, collections_held


def test_it_is_trimmed_each_time_so_much_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(heap, "trim_heap", lambda: trims.append(1))
    trimmer = HeapTrimmer(every_bytes=100)
    for made_bytes, expected in ((60, 0), (40, 0), (1, 1), (100, 1), (1, 2), (1000, 3)):
        trimmer.made(made_bytes)
        assert len(trims) == expected


def test_the_collector_is_off_until_the_last_thread_is_done() -> None:
    assert gc.isenabled()
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with collections_held():
            held.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    with collections_held():
        thread.start()
        held.wait()
    assert not gc.isenabled(), "the thread still holds it"
    leave.set()
    thread.join()
    assert gc.isenabled()


FAULTS = """
import ctypes, resource, sys
from hocket.heap import keep_freed_blocks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "kept":
    keep_freed_blocks()
def step():
    blocks = [libc.malloc(100_000) for _ in range(100)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    for block in blocks:
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="thresholds of glibc")
def test_freed_blocks_stay_in_the_process() -> None:
    """Memory that a step allocates anew costs no further page faults."""

    def faults(how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)

    assert faults("kept") < 100 < 1000 < faults("given back")
