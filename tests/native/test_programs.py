"""Parts of the native core without torch: blocks of memory, and the waiting protocol, also under ThreadSanitizer."""

import subprocess

import pytest
from tests.native.programs import built, needs_compiler

pytestmark = needs_compiler
STRICT = ("-O2", "-Wall", "-Wextra", "-Werror")


def test_blocks_do_not_overlap_and_join_again(tmp_path):
    """Random use by several threads, and the edges of the range."""
    program = built("blocks_stress.cpp", tmp_path, *STRICT)
    for threads in ("1", "4"):
        ran = subprocess.run([str(program), threads, "20000", "1"], capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, (threads, ran.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "steps"), [(STRICT, 10_000), (("-O1", "-fsanitize=thread"), 3_000)], ids=["plain", "sanitized"]
)
def test_random_steps_errors_and_failing_channels_end_as_they_should(tmp_path, flags, steps):
    program = built("steps_stress.cpp", tmp_path, *flags)
    for seed in range(3):
        ran = subprocess.run([str(program), str(seed), str(steps)], capture_output=True, text=True, timeout=280)
        if "unexpected memory mapping" in ran.stderr:
            pytest.skip("ThreadSanitizer does not run on this kernel")
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout.split()[0]) > steps // 100, "runs are ended by failures now and then"
