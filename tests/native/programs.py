"""C++ programs of the tests, built against the headers of the native extension that need no torch."""

import shutil
import subprocess
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_INCLUDE = _HERE.parents[1] / "src" / "hocket" / "native"
_COMPILER = shutil.which("g++") or shutil.which("clang++")

needs_compiler = pytest.mark.skipif(_COMPILER is None, reason="needs a C++ compiler")


def built(name: str, folder: Path, *flags: str) -> Path:
    """The program or library of a source beside this file, in that folder; skips where a sanitizer is missing."""
    program = folder / Path(name).stem
    compiler = ["gcc"] if name.endswith(".c") else [str(_COMPILER), "-std=c++20"]
    command = [*compiler, "-g", "-pthread", *flags, f"-I{_INCLUDE}", str(_HERE / name)]
    made = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=240)
    if "tsan" in made.stderr and "cannot find" in made.stderr:
        pytest.skip("the compiler has no ThreadSanitizer library")
    assert made.returncode == 0, made.stderr
    return program
