"""Large blocks of the lanes' memory: random use by several threads, and the edges of the range."""

from __future__ import annotations

import subprocess

import pytest
from tests.native.programs import built, needs_compiler

pytestmark = needs_compiler


@pytest.mark.parametrize("threads", [1, 4])
def test_blocks_do_not_overlap_and_join_again(tmp_path, threads):
    program = built("blocks_stress.cpp", tmp_path, "-O2", "-Wall", "-Wextra", "-Werror")
    ran = subprocess.run([str(program), str(threads), "20000", "1"], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
