"""The user's cache folder: decisions, and compiled libraries, which are loaded only if they are intact.

decisions/       one file for each step, machine and version (`hocket.autotune.store`)
compiled/        a folder for each step that was compiled (`hocket.tracing.compiling`)
native/          a folder for each build of the core (`hocket.native`)
partition/       each build of the partition search (`hocket.planning.partition`)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

KINDS = ("decisions", "compiled", "native", "partition")
CORE_PREFIX = "hocket_lanes_"
CHECKSUM_SUFFIX = ".checksum"
# The name of the file that is locked while a library is built beside it.
LOCK = "building"
# Builds of other versions that are kept, such as those of a second environment.
MAX_BUILDS = 6
_CHECKSUM_CHARACTERS = 32


def cache_folder(name: str) -> Path:
    """The folder with this name in the user's cache folder (XDG Base Directory Specification), which need not exist.

    A process without a home directory has one in the folder for temporary files, which may not be writable either.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache") / "hocket" / name
    except RuntimeError:
        user = os.getuid()
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        temporary = "/tmp"
    return Path(temporary) / f"hocket-{user}" / name


def native_folder() -> Path:
    """The folder of builds of the core: that of torch's extensions where one is set, else in the user's cache."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else cache_folder("native")


def cached(kind: str) -> tuple[Path, list[Path]]:
    """The folder of one of `KINDS`, and what Hocket keeps in it."""
    folder = native_folder() if kind == "native" else cache_folder(kind)
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return folder, []
    # Other packages keep their extensions in torch's folder, too.
    return folder, [each for each in found if kind != "native" or each.name.startswith(CORE_PREFIX)]


def make_folder(folder: Path) -> Path:
    """Make a folder, if it is not there, and those that it lies in. Only this user may write to what is made."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    return folder


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can write to, and return it. Another user's is an `OSError`."""
    found = make_folder(folder).stat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder")
    if not _is_own(found):
        raise PermissionError(f"{folder} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
    return folder


def seal(file: Path) -> None:
    """Write the checksum of a file beside it, as the last step of making it."""
    _seal_of(file).write_text(_checksum(file))


def is_sealed(file: Path) -> bool:
    """Return True if a file is there as it was sealed, and no other user has made it or may write to it."""
    try:
        for each in (file, _seal_of(file)):
            found = each.stat()
            if not stat.S_ISREG(found.st_mode) or not _is_own(found) or found.st_mode & stat.S_IWOTH:
                return False
        with _seal_of(file).open() as beside:
            return beside.read(_CHECKSUM_CHARACTERS + 1) == _checksum(file)
    except (OSError, UnicodeDecodeError):
        return False


def remove(path: Path) -> None:
    """Delete a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: that of ``CXX``, or the first of c++, g++ and clang++. None without one."""
    return shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")


def bound_builds(builds: Iterable[Path], newest: Path) -> None:
    """Delete the builds that were used longest ago, beyond `MAX_BUILDS`. A process that has loaded one keeps it."""
    found = []
    for each in builds:
        try:
            found.append((each.stat().st_mtime, each))
        except OSError:  # another process has deleted it
            continue
    for _, each in sorted(found)[:-MAX_BUILDS]:
        if each != newest:
            remove(each)
            remove(_seal_of(each))


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid in (os.getuid(), 0)


def _seal_of(file: Path) -> Path:
    return file.with_name(f"{file.name}{CHECKSUM_SUFFIX}")


def _checksum(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=_CHECKSUM_CHARACTERS // 2).hexdigest()
