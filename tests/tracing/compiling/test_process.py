"""The compiling process stands where its priority counts, and can be ended whole."""

from __future__ import annotations

import os
from pathlib import Path

from hocket.tracing.compiling.process import CompilingProcess


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
