"""What one sees of a search on a terminal: its best value, and what trains in each group."""

from __future__ import annotations

from typing import Any, TextIO

from hocket.search.run import Status
from hocket.search.search import Search

__all__ = ["LiveTable", "lines"]


class LiveTable:
    """A table that is painted anew after each epoch; nothing is written where nobody sits before a terminal.

    Args:
        file: where it is written, such as ``sys.stderr``.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._live: Any = None

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

    def update(self, search: Search) -> None:
        """Paint what a search is doing."""
        if self._live is not None:
            self._live.update("\n".join(lines(search)), refresh=True)


def lines(search: Search) -> list[str]:
    """A line on all trials, and one for each group."""
    runs = list(search.runs.values())
    over = [run for run in runs if run.status.is_over]
    values = [run.values[-1] for run in runs if run.values and run.status is not Status.FAILED]
    best = (max if search.policy.maximize else min)(values, default=None)
    shown = "none yet" if best is None else f"{best:.6g}"
    found = [f"tune: {len(over)} of {search.trials} trials over, best value {shown}"]
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
