"""The waiting protocol of native lanes alone: random steps, errors, failing channels, also under ThreadSanitizer."""

import subprocess

import pytest
from tests.native.programs import built, needs_compiler

pytestmark = [pytest.mark.slow, needs_compiler]


@pytest.mark.parametrize(
    ("flags", "steps"),
    [(("-O2", "-Wall", "-Wextra", "-Werror"), 10_000), (("-O1", "-fsanitize=thread"), 3_000)],
    ids=["plain", "sanitized"],
)
def test_random_steps_end_as_they_should(tmp_path, flags, steps):
    program = built("steps_stress.cpp", tmp_path, *flags)
    for seed in range(3):
        ran = subprocess.run([str(program), str(seed), str(steps)], capture_output=True, text=True, timeout=280)
        if "unexpected memory mapping" in ran.stderr:
            pytest.skip("ThreadSanitizer does not run on this kernel")
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout.split()[0]) > steps // 100, "runs are ended by failures now and then"
