"""Where compiled steps are kept, and the process that makes one.

A folder for each request, named by its digest, written under another name and renamed once it is whole. Compiling is a
process of its own, of the lowest priority; nobody waits for it unless he wants to.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.compiling.compiled import compiled_form
from hocket.tracing.compiling.listing import load_listings
from hocket.tracing.compiling.request import request_of

__all__ = ["Compiling", "compiled_step"]

log = logging.getLogger(__name__)

# A compilation that takes longer is given up.
MAX_COMPILE_S = 300.0


class Compiling:
    """Compiles a step in a process of its own, or finds what is kept of an earlier time.

    Args:
        captured: the step, with its convolutions' backward as it stands.
        folder: where compiled steps are kept.
        threads: the most threads that a kernel may use.

    Raises:
        CaptureError: the step cannot be compiled; says why.
    """

    def __init__(self, captured: Captured, folder: Path, *, threads: int) -> None:
        self._captured = captured
        self._request = request_of(captured, threads=threads)
        self._folder = folder
        self._kept = folder / self._request.digest
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: Path | None = None

    def found(self) -> Captured | None:
        """The compiled form, if it is kept; what does not read is thrown away.

        Raises:
            CaptureError: it reads, and does not fit the step: compiled again, it would not either.
        """
        if not self._kept.is_dir():
            return None
        try:
            listings = load_listings(self._kept)
            os.utime(self._kept)
        except (CaptureError, OSError) as error:
            log.info("hocket: a compiled step that was kept is compiled again: %s", error)
            shutil.rmtree(self._kept, ignore_errors=True)
            return None
        return compiled_form(self._captured, self._request, listings)

    def start(self) -> None:
        """Begin to compile; returns at once.

        Raises:
            CaptureError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._scratch = Path(tempfile.mkdtemp(prefix=f".{self._request.digest}-", dir=self._folder))
            (self._scratch / "request.json").write_text(self._request.text)
        except OSError as error:
            raise CaptureError(f"compiled steps cannot be kept in {self._folder}: {error.strerror}") from None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(self._scratch / "inductor")}
        command = [sys.executable, "-m", "hocket.tracing.compiling.inductor", str(self._scratch)]
        with (self._scratch / "words").open("wb") as words:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, env=environment, start_new_session=True
            )

    @property
    def is_started(self) -> bool:
        return self._process is not None

    @property
    def is_done(self) -> bool:
        """Whether it was started, and has ended."""
        return self._process is not None and self._process.poll() is not None

    def wait(self) -> None:
        """Return when the process has ended; one that takes too long is ended."""
        if self._process is None:
            return
        try:
            self._process.wait(MAX_COMPILE_S)
        except subprocess.TimeoutExpired:
            self._end()

    def result(self) -> Captured:
        """Wait for the process, keep what it made, and return the compiled form.

        Raises:
            CaptureError: it failed; says why in one line.
        """
        assert self._process is not None, "it was not started"
        assert self._scratch is not None
        try:
            self.wait()
            if code := self._process.returncode:
                failure = self._scratch / "failure"
                why = failure.read_text() if failure.exists() else f"the compiling process ended with {code}"
                raise CaptureError(why)
            shutil.rmtree(self._scratch / "inductor", ignore_errors=True)
            shutil.rmtree(self._kept, ignore_errors=True)
            self._scratch.rename(self._kept)
        except OSError as error:
            raise CaptureError(f"a compiled step cannot be kept: {error.strerror}") from None
        finally:
            self.close()
        return compiled_form(self._captured, self._request, load_listings(self._kept))

    def close(self) -> None:
        """End the process, and leave nothing behind of what is not whole."""
        self._end()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._process = self._scratch = None

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # its compilers, too
            self._process.wait()


def compiled_step(captured: Captured, folder: Path, *, threads: int) -> Captured:
    """The compiled form of a captured step, at once: what is kept of it, or compiled now, which takes a while.

    Args:
        captured: the step, with its convolutions' backward as it stands.
        folder: where compiled steps are kept.
        threads: the most threads that a kernel may use.

    Raises:
        CaptureError: it cannot be compiled; says why in one line.
    """
    compiling = Compiling(captured, folder, threads=threads)
    found = compiling.found()
    if found is not None:
        return found
    try:
        compiling.start()
        return compiling.result()
    finally:
        compiling.close()
