"""Mutated files of every kind: each command ends by itself, in time, with one clear line at most."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def sound(hocket, made, tmp_path):
    plan = tmp_path / "plan.txt"
    plan.write_text(plan.read_text().replace("\n", " peak_bytes=1000 eager_peak_bytes=1211\n", 1))
    hocket("simulate", made["graph"], made["plan"], made["costs"], "-o", "timeline.json")
    return tmp_path


@pytest.mark.parametrize("number", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_mutated_files_are_one_clear_line(sound, number):
    """One process for all kinds: it takes longer to begin than a hundred files."""
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests), str(tests.parent / "src")])
    command = [sys.executable, "-m", "cli.mutated_files", str(sound), str(number), "0"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert json.loads(done.stdout) == []
