"""The user's cache folder: decisions, and compiled libraries, which are loaded only if they are intact."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

__all__ = ["cache_folder", "is_sealed", "private_folder", "seal"]


def cache_folder(name: str) -> Path:
    """The folder with this name in the user's cache folder, which need not exist.

    A process without a home directory has one in the folder for temporary files.
    """
    try:
        return user_cache_path("hocket", appauthor=False) / name
    except RuntimeError:
        user = os.getuid() if hasattr(os, "getuid") else "cache"
        return Path(tempfile.gettempdir()) / f"hocket-{user}" / name


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can write to, and return it.

    Raises:
        OSError: it cannot be made, belongs to another user, or others may write to it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), 0):
        raise OSError(f"{folder} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        folder.chmod(0o700)
    return folder


def seal(file: Path) -> None:
    """Write the checksum of a file beside it, as the last step of making it."""
    _seal_of(file).write_text(_checksum(file))


def is_sealed(file: Path) -> bool:
    """Return True if a file is there as it was sealed."""
    try:
        return _seal_of(file).read_text() == _checksum(file)
    except (OSError, UnicodeDecodeError):
        return False


def _seal_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.checksum")


def _checksum(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
