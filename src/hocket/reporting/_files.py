"""Text files, written whole or not at all, and the templates that travel with this package."""

from __future__ import annotations

import os
import tempfile
from importlib import resources
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` as UTF-8 beside `path` and move it into place."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def template(name: str) -> str:
    """The text of a file that lies in this package's ``assets`` folder."""
    return resources.files("hocket.reporting").joinpath("assets", name).read_text(encoding="utf-8")
