"""Large blocks of the lanes' memory: random use by several threads, and the edges of the range."""

import subprocess

from tests.native.programs import built, needs_compiler

pytestmark = needs_compiler


def test_blocks_do_not_overlap_and_join_again(tmp_path):
    program = built("blocks_stress.cpp", tmp_path, "-O2", "-Wall", "-Wextra", "-Werror")
    for threads in ("1", "4"):
        ran = subprocess.run([str(program), threads, "20000", "1"], capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, (threads, ran.stderr)
