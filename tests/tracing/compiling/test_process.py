"""The compiling process stands where its priority counts, and can be ended whole."""

import os
import time
from pathlib import Path

import pytest

from hocket.tracing.compiling.process import CompilingProcess, niceness


def test_it_is_a_group_of_this_session(tmp_path: Path) -> None:
    """In a session of its own it had half of the cores, whatever its priority: Linux schedules sessions alike."""
    process = CompilingProcess()
    process.add(tmp_path)
    process.begin()
    try:
        assert process._process is not None
        pid = process._process.pid
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid
    finally:
        process.end()
    assert process.is_done


def test_it_gives_way_as_much_as_it_is_told(tmp_path: Path) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("the system does not tell how nice a process is")
    process = CompilingProcess(nice=7)
    process.add(tmp_path)
    process.begin()
    try:
        assert process.group is not None
        deadline = time.monotonic() + 60
        while os.getpriority(os.PRIO_PROCESS, process.group) != os.getpriority(os.PRIO_PROCESS, 0) + 7:
            assert time.monotonic() < deadline
            assert not process.is_done
            time.sleep(0.01)
    finally:
        process.end()


@pytest.mark.parametrize(("speedup", "nice"), [(0.5, 19), (1.0, 13), (1.5, 5), (2.0, 1), (3.0, 0), (100.0, 0)])
def test_the_further_ahead_steps_are_the_less_it_gives_way(speedup: float, nice: int) -> None:
    assert niceness(speedup) == nice
