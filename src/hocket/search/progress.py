"""Progress of a search: a table that is redrawn on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, TextIO

from hocket.search.run import Status
from hocket.search.search import Record, Search

BETWEEN_RUNGS_S = 1.0  # at least, from one line to the next
BETWEEN_LINES_S = 60.0  # at most: where a rung takes longer, a line says that the search goes on


def device_time_s(record: Record) -> tuple[float, float]:
    """Seconds that the device trained, and the seconds of all trials' epochs, as if each had it alone meanwhile.

    Example:
        >>> from hocket.search.search import Epoch
        >>> device_time_s(Record([Epoch(n, 0, "fused", n, 1, 0.0, 2.0, 0.5) for n in range(3)]))
        (2.0, 6.0)
    """
    passes = {(each.group, each.start_s, each.end_s) for each in record.epochs}
    return sum(end - start for _, start, end in passes), sum(each.end_s - each.start_s for each in record.epochs)


class LiveTable:
    """Table that is redrawn after each epoch. Without a terminal, one line is written for each rung."""

    def __init__(self, file: TextIO, clock: Callable[[], float] = monotonic) -> None:
        self._file = file
        self._clock = clock
        self._live: Any = None
        self._line = ""  # the last one that is not written yet
        self._shown: tuple[int, int] | None = None
        self._shown_s = clock()

    def __enter__(self) -> LiveTable:
        if self._file.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._file), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self._write()

    def update(self, search: Search) -> None:
        """Paint what a search is doing."""
        if self._live is not None:
            self._live.update("\n".join(lines(search)), refresh=True)
            return
        runs = search.runs.values()
        decided = sum(run.status.is_over for run in runs), sum(run.until for run in runs)
        waited_s = self._clock() - self._shown_s
        is_rung = decided != self._shown and (decided[0] > 0 or self._shown is not None)
        if is_rung or waited_s >= BETWEEN_LINES_S:
            self._line = lines(search)[0]
        self._shown = decided
        if waited_s >= BETWEEN_RUNGS_S:
            self._write()

    def _write(self) -> None:
        if self._line:
            self._file.write(f"{self._line}\n")
            self._file.flush()
            self._line, self._shown_s = "", self._clock()


def lines(search: Search) -> list[str]:
    """A line on all trials, and one for each group."""
    runs = list(search.runs.values())
    over = [run for run in runs if run.status.is_over]
    left_out = (Status.FAILED, Status.PRUNED)  # as in the study's best value
    values = [run.values[-1] for run in runs if run.values and run.status not in left_out]
    best = (max if search.policy.maximize else min)(values, default=None)
    shown = "none yet" if best is None else f"{best:.6g}"
    epochs_done = sum(run.epochs for run in runs)
    found = [f"tune: {len(over)} of {search.trials} trials over, {epochs_done} epochs, best value {shown}"]
    for group in search.groups:
        trainer = group.trainer
        if trainer is not None:
            agreed = ", ".join(map(str, group.key)) or "all trials"
            epochs = sorted(run.epochs for _, run in trainer.active)
            where = f"epoch {epochs[0]} to {epochs[-1]}" if epochs else "done"
            found.append(
                f"  {agreed}: {len(epochs)} of {len(trainer.slots)} slots ({trainer.kind}), {where}, "
                f"{len(group.waiting)} waiting"
            )
    return found
