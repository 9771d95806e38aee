"""The waiting protocol of native lanes alone: random steps, errors, failing channels, also under ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDE = HERE.parents[1] / "src" / "hocket" / "native"
COMPILER = shutil.which("g++") or shutil.which("clang++")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")]


def built(folder: Path, *flags: str) -> Path:
    program = folder / "steps_stress"
    command = [COMPILER, "-std=c++20", "-g", "-pthread", *flags, f"-I{INCLUDE}", str(HERE / "steps_stress.cpp")]
    made = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=240)
    if "tsan" in made.stderr and "cannot find" in made.stderr:
        pytest.skip("the compiler has no ThreadSanitizer library")
    assert made.returncode == 0, made.stderr
    return program


@pytest.mark.parametrize(
    ("flags", "steps"),
    [(("-O2", "-Wall", "-Wextra", "-Werror"), 10_000), (("-O1", "-fsanitize=thread"), 3_000)],
    ids=["plain", "sanitized"],
)
def test_random_steps_end_as_they_should(tmp_path, flags, steps):
    program = built(tmp_path, *flags)
    for seed in range(3):
        ran = subprocess.run([str(program), str(seed), str(steps)], capture_output=True, text=True, timeout=280)
        if "unexpected memory mapping" in ran.stderr:
            pytest.skip("ThreadSanitizer does not run on this kernel")
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout.split()[0]) > steps // 100, "runs are ended by failures now and then"
