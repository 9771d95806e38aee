"""The process that compiles steps, as the training sees it: several requests at once, at the lowest priority."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hocket.errors import CaptureError

__all__ = ["CompilingProcess"]

# Compiling that takes longer is given up; beside a training that leaves it a tenth of a core, it takes minutes.
MAX_COMPILE_S = 1800.0


class CompilingProcess:
    """Compiles what lies in some folders; one process for all of them, since it begins with seconds of imports."""

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._give_up_at = math.inf

    def add(self, folder: Path) -> None:
        """Compile what lies in this folder, too; not once it has begun."""
        assert self._process is None, "it has begun"
        self._folders.append(folder)

    def begin(self) -> None:
        """Start the process, if there is anything to be compiled; returns at once."""
        if not self._folders:
            return
        self._give_up_at = time.monotonic() + MAX_COMPILE_S
        scratch = self._folders[0]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
        command = [sys.executable, "-m", "hocket.tracing.compiling.inductor", *map(str, self._folders)]
        try:
            with (scratch / "words").open("wb") as words:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    env=environment,
                    # A group, so that its compilers can be ended, and no session: of sessions Linux gives each the
                    # same share of the cores (autogroups), whatever the priority of what is in them.
                    process_group=0,
                )
        except OSError as error:
            raise CaptureError(f"the compiling process cannot be started: {error.strerror}") from None

    @property
    def group(self) -> int | None:
        """The process group that it and its compilers are; None where nothing was to be compiled."""
        return None if self._process is None else self._process.pid

    @property
    def is_done(self) -> bool:
        """Whether it was started, and has ended; one that takes too long is ended."""
        if time.monotonic() > self._give_up_at:
            self.end()
        return self._process is not None and self._process.poll() is not None

    def wait(self) -> int:
        """Return its status when it has ended; one that takes too long is ended."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(max(0.0, self._give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
        return self._process.returncode

    def end(self) -> None:
        """End it, and its compilers."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
