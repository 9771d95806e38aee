"""The user's cache folder: found without a home, private, and what is loaded from it is what was built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hocket
from hocket.cache_folder import cache_folder, is_sealed, private_folder, seal


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
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert private_folder(folder).stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "theirs")
    os.chown(folder, 54321, 54321)
    with pytest.raises(OSError, match="belongs to another user"):
        private_folder(folder)


@pytest.mark.parametrize("damage", ["half", "zeros", "foreign", "gone", "no checksum", "bad checksum"])
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
    else:
        half = len(content) // 2
        file.write_bytes({"half": content[:half], "zeros": content[:half] + bytes(half), "foreign": b"ELF"}[damage])
    assert not is_sealed(file)


@pytest.mark.slow
def test_a_damaged_partition_library_is_built_again(tmp_path: Path) -> None:
    code = "from hocket.planning.partition.compiled import library; print(library()._name)"
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
