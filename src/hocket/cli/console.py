"""Output of the command line: tables or one JSON object to stdout, a progress bar and notes to stderr."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hocket.reporting.table import styled_table

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

# Shorter work is done without a bar.
PATIENCE_S = 2.0
# In fewer columns a table would lose whole columns. A narrower terminal folds its lines.
MIN_WIDTH = 40


class UsageError(Exception):
    """A wrong command line, which ends with exit status 2."""


def prepare_streams() -> None:
    """Replace standard streams that are closed by the null device, and escape characters that one cannot encode."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # else a file would take the place of a closed stream
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def prints_aside() -> Iterator[None]:
    """Send to stderr what the user's code, its children and libraries in C print. Stdout has the result alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)


def emit(
    args: Namespace, document: dict[str, Any], *tables: Any, to_stderr: bool = False, notes: Iterable[str] = ()
) -> None:
    """Print the result of a verb in the format of the arguments: `document`, or `tables`, and `notes` on stderr."""
    if args.format == "json":
        print_json(document)
    else:
        print_tables(*tables, to_stderr=to_stderr)
        for text in notes:
            note(text)


def print_json(document: dict[str, Any]) -> None:
    """Print `document` alone on stdout."""
    print(json.dumps(document, indent=2, allow_nan=False))


def print_tables(*tables: Any, to_stderr: bool = False) -> None:
    """Print tables and lines of text with a blank line between them. Strings are printed unchanged."""
    from rich.console import Console

    console = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, markup=False, emoji=False)
    console.width = max(console.width, MIN_WIDTH)
    for position, element in enumerate(tables):
        if position:
            console.print()
        # A path must not be folded in the middle, so that it can be copied.
        console.print(element, soft_wrap=isinstance(element, str))


def note(text: str) -> None:
    """Print a line about the work to stderr."""
    print(f"note: {text}", file=sys.stderr)


def table(title: str, columns: Collection[str], rows: Iterable[Iterable[str]], *, words: int = 1) -> Table:
    """Make a table in which the first `words` columns hold words and the others figures. An empty head is left out."""
    from rich.text import Text

    made = styled_table(title)
    # A title is set as wide as its table, and wraps badly above a narrow one.
    made.min_width = min(76, len(title))
    made.show_header = any(columns)
    for position, column in enumerate(columns):
        made.add_column(column, justify="left" if position < words else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


class Bar:
    """A progress bar on stderr: only on a terminal, and only for work that takes more than two seconds.

    It is painted when it appears and at every `update`, and does not move in between: a thread that repaints would take
    the interpreter from a step that is being measured. `moving` is for work that is not measured.

        with Bar("capture", moving=True):
            captured = hocket.capture(...)
    """

    def __init__(self, what: str, *, moving: bool = False) -> None:
        self._what = what
        self._done, self._total = 0, 0
        self._moving = moving
        self._progress: Progress | None = None
        self._lock = threading.Lock()
        self._over = False
        self._timer = threading.Timer(PATIENCE_S, self._appear)
        self._timer.daemon = True

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._progress is not None:
                self._progress.stop()

    def update(self, what: str, done: int = 0, total: int = 0) -> None:
        """Show that `done` of `total` steps of `what` are done. Without a total the duration is unknown."""
        with self._lock:
            self._what, self._done, self._total = what, done, total
            if self._progress is not None:
                self._paint(self._progress)

    def _paint(self, progress: Progress) -> None:
        task = progress.task_ids[0]
        progress.update(task, description=self._what, completed=self._done, total=self._total or None, refresh=True)

    def _appear(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if self._over:
                return
            columns = [TextColumn("{task.description}"), BarColumn(24), TaskProgressColumn()]
            self._progress = Progress(
                *columns,
                *([TimeElapsedColumn()] if self._moving else []),
                console=Console(file=sys.stderr),
                auto_refresh=self._moving,
                refresh_per_second=4,
                transient=True,
            )
            self._progress.add_task(self._what, total=None)
            self._progress.start()
            self._paint(self._progress)
