"""Where compiled steps are kept.

A folder for each request, named by its digest, written under another name and renamed once it is whole. Of all of them
those that were used longest ago are deleted when they are too many or too large. A process that has loaded what is
deleted keeps it.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

from hocket.cache_folder import private_folder, remove, seal
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.compiling.compiled import compiled_form
from hocket.tracing.compiling.listing import LIBRARY, LISTING, load_listings
from hocket.tracing.compiling.process import CompilingProcess
from hocket.tracing.compiling.request import request_of

log = logging.getLogger(__name__)

# The limits of all compiled steps of a folder together.
MAX_KEPT, MAX_KEPT_BYTES = 64, 256 * 2**20
# An incomplete entry of this age was left by a process that has ended.
MAX_SCRATCH_S = 3600.0


class Compiling:
    """Compiles a step in a process of its own, or finds what is kept of an earlier time, or raises `CaptureError`."""

    def __init__(self, captured: Captured, folder: Path, *, threads: int) -> None:
        self._captured = captured
        self._request = request_of(captured, threads=threads)
        self._folder = folder
        self._kept = folder / self._request.digest
        self._process: CompilingProcess | None = None
        self._scratch: Path | None = None

    def found(self) -> Captured | None:
        """Return the compiled form if it is stored. Unreadable files are deleted. One that does not fit is an error."""
        if not self._kept.is_dir():
            return None
        try:
            listings = load_listings(self._kept)
        except CaptureError as error:
            log.info("hocket: a compiled step that was kept is compiled again: %s", error)
            remove(self._kept)
            return None
        try:
            os.utime(self._kept)
        except OSError as error:  # a folder that may only be read; it still tells what is kept
            log.debug("hocket: %s", error)
        return compiled_form(self._captured, self._request, listings)

    def start(self, process: CompilingProcess) -> None:
        """Add the request to a process that has not begun."""
        try:
            private_folder(self._folder)
            self._scratch = Path(tempfile.mkdtemp(prefix=f".{self._request.digest}-", dir=self._folder))
            (self._scratch / "request.json").write_text(self._request.text)
        except OSError as error:
            self.close()
            raise CaptureError(f"compiled steps cannot be kept in {self._folder}: {error.strerror or error}") from None
        self._process = process
        process.add(self._scratch)

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def is_done(self) -> bool:
        """Return whether the process was started and has ended."""
        return self._process is not None and self._process.is_done

    def wait(self) -> None:
        """Wait until the process has ended. One that takes too long is stopped."""
        if self._process is not None:
            self._process.wait()

    def result(self) -> Captured:
        """Wait for the process, keep what it made, and return the compiled form, or raise its reason in one line."""
        assert self._process is not None, "it was not started"
        assert self._scratch is not None
        try:
            status = self._process.wait()
            if not (self._scratch / LISTING).exists():
                raise CaptureError(_failure(self._scratch, status))
            for left in ("inductor", "words", "request.json"):
                remove(self._scratch / left)
            for made in (LISTING, LIBRARY):
                seal(self._scratch / made)
            remove(self._kept)
            self._scratch.rename(self._kept)
            _bound(self._folder, self._kept)
        except OSError as error:
            raise CaptureError(f"a compiled step cannot be kept: {error.strerror}") from None
        finally:
            self.close()
        return compiled_form(self._captured, self._request, load_listings(self._kept))

    def close(self) -> None:
        """End the process, and leave nothing behind of what is not whole."""
        if self._process is not None:
            self._process.end()
        if self._scratch is not None:
            remove(self._scratch)
        self._process = self._scratch = None


def _failure(scratch: Path, status: int) -> str:
    failure = scratch / "failure"
    if failure.exists():
        return failure.read_text()
    if status == os.EX_IOERR:
        return f"{scratch.parent} cannot be written any more"
    return f"the compiling process ended with {status}"


def _bound(folder: Path, newest: Path) -> None:
    """Delete what was used longest ago while there is too much, and what was never finished."""
    found = []
    for each in folder.iterdir():
        try:
            used, size = each.stat().st_mtime, sum(file.stat().st_size for file in each.iterdir())
        except OSError:  # another process has deleted it
            continue
        if not each.name.startswith("."):
            found.append((used, size, each))
        elif used < time.time() - MAX_SCRATCH_S:
            remove(each)
    number, total_bytes = len(found), sum(size for _, size, _ in found)
    for _, size, each in sorted(found):
        if number <= MAX_KEPT and total_bytes <= MAX_KEPT_BYTES:
            break
        if each != newest:
            remove(each)
            number, total_bytes = number - 1, total_bytes - size
