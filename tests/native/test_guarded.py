"""No form of a step touches memory behind a tensor, or of one that was freed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.native.programs import built

from hocket.native import available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not available(), reason=available().why),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler"),
]


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    heap = built("guarded_heap.c", folder, "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.native.guarded_forms", *arguments]
    return subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"LD_PRELOAD": str(heap)},
        capture_output=True,
        text=True,
        timeout=280,
    )


def test_an_element_behind_a_tensor_ends_the_process(tmp_path: Path) -> None:
    assert run(tmp_path, "--beyond").returncode == -signal.SIGSEGV


def test_all_forms_stay_within_their_tensors(tmp_path: Path) -> None:
    ran = run(tmp_path, str(tmp_path / "compiled"))
    assert ran.returncode == 0, ran.stderr
    forms = ran.stdout.splitlines()
    assert forms[0] == "winograd"
    assert forms.count("Images +compiled") == 3
    assert forms.count("Images +channels-last+fused-norm+fused-update") == 1
    assert forms.count("Images +channels-last+fused-norm+winograd+fused-update") == 2
    assert forms[-1] == "Sequential +compiled"
