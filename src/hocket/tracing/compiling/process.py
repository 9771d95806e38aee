"""The process that compiles steps, as the training sees it: several requests at once, at a priority of their own.

The lowest priority is not what costs the training least: beside steps that keep both cores the compiler then has an
eighth of a core, and four minutes of steps 1.14 times as long are more than half a minute of steps 1.7 times as long.
Steps of a plan are ahead of eager's, so there is room: the compiler takes as much as leaves them about eager's time.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hocket.errors import CaptureError

# Compiling that takes longer is given up; beside a training that leaves it a tenth of a core, it takes minutes.
MAX_COMPILE_S = 1800.0
# Largest ratio of the time of steps beside it to eager's.
MAX_OVER_EAGER = 1.2
# Beside two compilers of weight w (1 without niceness, 0.8 of it for each level), steps on two cores take 1 + a w^b
# times as long: 1.31, 1.70 and 2.55 times at levels 10, 5 and 0 (ResNet-20; LSTM cells are slowed down less).
_SLOWDOWN, _POWER, _LEVEL = 1.55, 0.72, 0.8


def niceness(speedup: float) -> int:
    """The level by which a compiler gives way to steps with this speedup over eager, from 0 to 19."""
    room = max(MAX_OVER_EAGER * speedup - 1, 0.01)
    level = math.log(room / _SLOWDOWN) / (_POWER * math.log(_LEVEL))
    return max(0, min(19, math.ceil(level)))


class CompilingProcess:
    """Compiles requests in several folders by one process, since each begins with seconds of imports.

    Its niceness, and that of its compilers, is raised by `nice`.
    """

    def __init__(self, nice: int = 0) -> None:
        self._nice = nice
        self._folders: list[Path] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._give_up_at = math.inf

    def add(self, folder: Path) -> None:
        """Add a folder to be compiled. Not allowed once the process has begun."""
        assert self._process is None, "it has begun"
        self._folders.append(folder)

    def begin(self) -> None:
        """Start the process, if there is anything to be compiled. Returns at once."""
        if not self._folders:
            return
        self._give_up_at = time.monotonic() + MAX_COMPILE_S
        scratch = self._folders[0]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor")}
        command = [sys.executable, "-m", "hocket.tracing.compiling.inductor", str(self._nice)]
        command += map(str, self._folders)
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
        """Process group of the process and its compilers. None if there was nothing to compile."""
        return None if self._process is None else self._process.pid

    @property
    def is_done(self) -> bool:
        """Return whether the process was started and has ended. One that takes too long is stopped."""
        if time.monotonic() > self._give_up_at:
            self.end()
        return self._process is not None and self._process.poll() is not None

    def wait(self) -> int:
        """Wait for the process, and return its status. One that takes too long is stopped."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(max(0.0, self._give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
        return self._process.returncode

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
