"""The user's cache folder: found without a home, private, and what is loaded from it is what was built."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forked
import hocket
from hocket import native
from hocket.cache_folder import MAX_BUILDS, bound_builds, cache_folder, is_sealed, make_folder, private_folder, seal


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("decisions") == tmp_path / "hocket" / "decisions"


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can become a user without a home"
)
def test_hocket_is_imported_without_a_home() -> None:
    code = "import hocket; from hocket.cache_folder import cache_folder; print(cache_folder('native'))"
    command = ["setpriv", "--reuid=54321", "--clear-groups", sys.executable, "-B", "-c", code]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(hocket.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("hocket-54321/native")


def test_a_private_folder_is_for_its_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
        make_folder(tmp_path / "c" / "d" / "e")
    finally:
        os.umask(before)
    for made in ("a", "c", "c/d", "c/d/e"):  # in a folder that others may write to they could exchange what it has
        assert (tmp_path / made).stat().st_mode & 0o777 == 0o700
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "theirs")
    os.chown(folder, 54321, 54321)
    with pytest.raises(OSError, match="belongs to another user"):
        private_folder(folder)


DAMAGES = ("half", "zeros", "foreign", "gone", "no checksum", "bad checksum", "pipe", "device", "folder", "writable")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_sealed(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "core.so"
    content = bytes(range(256)) * 16
    file.write_bytes(content)
    seal(file)
    assert is_sealed(file)
    beside = tmp_path / "core.so.checksum"
    if damage == "gone":
        file.unlink()
    elif damage == "no checksum":
        beside.unlink()
    elif damage == "bad checksum":
        beside.write_bytes(b"\xff\xfe")
    elif damage == "pipe":
        beside.unlink()
        os.mkfifo(beside)
    elif damage == "device":
        file.unlink()
        file.symlink_to("/dev/zero")
    elif damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage == "writable":
        file.chmod(0o666)
    else:
        half = len(content) // 2
        file.write_bytes({"half": content[:half], "zeros": content[:half] + bytes(half), "foreign": b"ELF"}[damage])
    assert not is_sealed(file)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("suffix", ["", ".checksum"])
def test_a_library_of_another_user_is_not_loaded(tmp_path, suffix):
    file = tmp_path / "core.so"
    file.write_bytes(b"core")
    seal(file)
    os.chown(f"{file}{suffix}", 54321, 54321)
    assert not is_sealed(file)


def test_old_builds_are_deleted(tmp_path):
    builds = []
    for number in range(MAX_BUILDS + 3):
        builds.append(tmp_path / f"{number}.so")
        builds[-1].write_bytes(b"core")
        seal(builds[-1])
        os.utime(builds[-1], (number, number))
    bound_builds(builds, builds[0])
    left = {each.name for each in tmp_path.iterdir()}
    kept = [builds[0], *builds[3:]]
    assert left == {name for each in kept for name in (each.name, f"{each.name}.checksum")}


LOAD_CORE = """
import shutil, sys
if sys.argv[1:] == ["without"]:
    shutil.which = lambda name: None
from hocket import native
print(native.available().why or native.load().__file__)
"""


@pytest.fixture
def core_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Load the core from `tmp_path` in another process: the file that it has, or why there is none."""
    native.load()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    return lambda *words: forked.run(LOAD_CORE, *words, timeout_s=500.0).stdout.strip()


def test_a_core_that_is_there_needs_no_compiler(tmp_path, core_of):
    built = Path(native.load().__file__).parent
    shutil.copytree(built, tmp_path / built.name)
    assert core_of("without") == str(tmp_path / built.name / f"{built.name}.so")
    (tmp_path / built.name / f"{built.name}.so").write_bytes(b"damaged")
    assert core_of("without") == ("native lanes need a C++ compiler (apt install g++); Python lanes are used")


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["zeros", "half", "objects"])
def test_a_damaged_core_is_built_again(tmp_path, core_of, damage):
    built = Path(native.load().__file__).parent
    folder = tmp_path / built.name
    shutil.copytree(built, folder)
    file = folder / f"{built.name}.so"
    content = file.read_bytes()
    half = len(content) // 2
    file.write_bytes(content[:half] + (b"" if damage == "half" else bytes(half)))
    if damage == "objects":
        for each in folder.glob("*.o"):
            each.write_bytes(b"half an object")
    assert core_of() == str(file)
    assert is_sealed(file)


@pytest.mark.slow
def test_a_damaged_partition_library_is_built_again(tmp_path: Path) -> None:
    # A library that `make wheels` has left in this tree is not touched.
    code = (
        "import pathlib; from hocket.planning.partition import compiled; "
        "compiled.PREBUILT = pathlib.Path('none'); print(compiled.library()._name)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}

    def loaded() -> Path:
        return Path(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip())

    built = loaded()
    content = built.read_bytes()
    built.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    assert loaded() == built
    assert is_sealed(built)


def test_all_public_names_are_listed() -> None:
    assert set(hocket.__all__) <= set(dir(hocket))
    assert all(getattr(hocket, name) is not None for name in hocket.__all__)
