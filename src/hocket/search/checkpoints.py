"""Checkpoints of a search: one file for each unfinished trial, written whole or not at all.

FOLDER/search.json    the name of this search, by which it knows its trials in the study
FOLDER/lock           held while a search works there
FOLDER/trial-7.pt     weights, optimizer, scheduler, generators, values: plain tensors and numbers
FOLDER/trial-7.best.pt   the same of its best epoch, where that is what counts
FOLDER/best.pt        the same of the best trial that is over, where ``["model"]`` is a plain state dict
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from hocket.errors import FormatError, InputError
from hocket.ir._fields import load_document, named_failures

FORMAT = "hocket-search/1"
# what `hocket.search.run.Run.state` has
KEYS = frozenset(("values", "params", "exploits", "model", "buffers", "optimizer", "scheduler", "random"))


def read_state(path: Path, whose: str) -> dict[str, Any]:
    """Read the state that a trial was saved with. Another file is a `FormatError`."""
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        problem = f"it lacks {', '.join(sorted(KEYS - found.keys()))}" if KEYS - found.keys() else ""
    except Exception as error:  # noqa: BLE001 - torch and pickle raise almost any
        problem = str(error).partition("\n")[0] or type(error).__name__
    if problem or not isinstance(found["values"], list):
        raise FormatError(str(path), "", f"expected the state of {whose}: {problem or 'its values are no list'}")
    return found


class Checkpoints:
    """The files of one search, for one process at a time. A file of another kind among them is a `FormatError`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.folder / "lock", blocking=False, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise InputError(f"checkpoints: another search works in {self.folder}") from None
        try:
            self.owner = self._name()  # the name of this search
        except FormatError:
            self.close()
            raise

    def _name(self) -> str:
        path = self.folder / "search.json"
        if not path.exists():
            document = {"format": FORMAT, "owner": uuid.uuid4().hex}
            self._write(path, lambda file: file.write(json.dumps(document).encode() + b"\n"))
        return load_document(path, FORMAT)["owner"].text()

    def save(self, number: int, state: Mapping[str, Any], *, is_best: bool = False) -> None:
        """Keep the state of a trial in place of an earlier one, or as that of its best epoch."""
        self._write(self._path(number, is_best), lambda file: torch.save(dict(state), file))

    def load(self, number: int) -> dict[str, Any] | None:
        """The last state of a trial, or None if there is none. A damaged file is a `FormatError`."""
        path = self._path(number)
        if not path.exists():
            return None
        return read_state(path, "a trial (without this file it begins anew)")

    def remove(self, number: int) -> None:
        """A trial is over."""
        for is_best in (False, True):
            self._path(number, is_best).unlink(missing_ok=True)

    def keep_best(self, number: int) -> None:
        """A trial is over, and the best of its study: its best or last state becomes ``best.pt``."""
        kept = [path for path in (self._path(number, True), self._path(number)) if path.exists()]
        if kept:
            os.replace(kept[0], self.folder / "best.pt")

    def close(self) -> None:
        """Let others work in the folder."""
        self._lock.release()

    def _path(self, number: int, is_best: bool = False) -> Path:
        return self.folder / f"trial-{number}{'.best' if is_best else ''}.pt"

    def _write(self, path: Path, write: Any) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            with named_failures(path), part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
