"""README's example where a container takes something away: it runs, and says what it lacks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.docs.test_blocks import blocks

from hocket.native import build

MIB = 2**20
LIMIT_BYTES = 512 * MIB
TIMEOUT_S = 280
EXAMPLE = next(block.code for block in blocks() if block.name == "README 0")


def example(environment: dict[str, str], before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the example in a process with this environment alone."""
    return subprocess.run(
        [sys.executable, "-c", before + EXAMPLE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.slow
def test_without_compiler_home_or_a_writable_cache(tmp_path: Path) -> None:
    """A file in place of the cache folder cannot be written into by root either."""
    file = tmp_path / "cache"
    file.touch()
    (tmp_path / "bin").mkdir()
    done = example({"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(file), "GOMP_SPINCOUNT": "10000"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("planned because", "eager because"))
    assert "native lanes could not be built" in done.stderr
    assert "Python lanes are used" in done.stderr
    assert "the decision is not remembered" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_a_compiler_the_missing_package_is_named(tmp_path: Path) -> None:
    done = example({"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "GOMP_SPINCOUNT": "10000"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("planned because", "eager because"))
    assert "native lanes need a C++ compiler (apt install g++); Python lanes are used" in done.stderr


@pytest.fixture
def group() -> Iterator[list[Path]]:
    """Folders of a control group of one core and 512 MiB."""
    base = Path("/sys/fs/cgroup")
    name = f"hocket-test-{os.getpid()}"
    is_unified = (base / "cgroup.controllers").exists()
    limits = (
        {base / name: {"cpu.max": "100000 100000", "memory.max": str(LIMIT_BYTES)}}
        if is_unified
        else {
            base / "cpu" / name: {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"},
            base / "memory" / name: {"memory.limit_in_bytes": str(LIMIT_BYTES)},
        }
    )
    made: list[Path] = []
    try:
        for folder, files in limits.items():
            folder.mkdir()
            made.append(folder)
            for file, text in files.items():
                (folder / file).write_text(text)
    except OSError as error:
        for folder in made:
            folder.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    yield made
    for folder in made:
        folder.rmdir()


@pytest.mark.slow
def test_in_a_group_of_one_core_and_512_mib(group: list[Path], tmp_path: Path) -> None:
    """The cache is empty, and the compiler takes more than the group may: it would be killed, and this process, too."""
    enter = f"import os\nfor folder in {[str(folder) for folder in group]}:\n"
    enter += "    open(folder + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
    done = example(os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": ""}, enter)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("planned because", "eager because"))
    assert "on 2 lane(s)" not in done.stdout
    assert "the compiler takes up to 2048 MiB, and this process's group has" in done.stderr
    assert "Python lanes are used" in done.stderr


def test_jobs_of_the_compiler_fit_the_memory_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAX_JOBS", raising=False)
    assert build._jobs(None) is None
    assert build._jobs(5 * 2**30) == 2
    with pytest.raises(MemoryError, match=r"up to 2048 MiB, and this process's group has 511 MiB left"):
        build._jobs(512 * MIB - 1)
    with build._at_most(1):
        assert os.environ["MAX_JOBS"] == "1"
    assert "MAX_JOBS" not in os.environ
    with build._at_most(None):
        assert "MAX_JOBS" not in os.environ
