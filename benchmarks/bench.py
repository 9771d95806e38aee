"""A bench as a command: measure, write the result so far into the file of ``-o``, and print its tables or its JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hocket.cli.arguments import Argument, arg, count, output
from hocket.cli.console import Bar, emit
from hocket.cli.files import output_file, written
from hocket.ir._fields import write_text

__all__ = ["BUDGET", "SEVERAL", "Bench", "Save", "ratios", "targets"]

Save: TypeAlias = Callable[[dict[str, Any]], None]

# Options of a bench that may be stopped after any item.
# Of an option that may be given again.
SEVERAL: dict[str, Any] = {"action": "append", "default": []}
BUDGET = (
    arg("--budget-s", type=count, metavar="S", help="seconds; what they do not suffice for is left out"),
    output("the result, after each item, as JSON"),
)


@dataclass(frozen=True)
class Bench:
    """A bench, called with the parsed arguments.

    Attributes:
        name: the value of ``bench`` in the result file.
        doing: the text of the progress bar.
        measure: makes the result. It is given a function that saves the result so far, and calls it after each item, so
            that a bench that is stopped leaves what it has measured.
        tables: tables and lines of text that show the result.
    """

    name: str
    doing: str
    measure: Callable[[Namespace, Save], dict[str, Any]]
    tables: Callable[[Namespace, dict[str, Any]], Iterable[Any]]

    def __call__(self, args: Namespace) -> None:
        """Run the bench."""
        self.run(args)

    def run(self, args: Namespace) -> dict[str, Any]:
        """Run the bench and return its result."""
        file = output_file(getattr(args, "output", None))
        with Bar(self.doing):
            result = self.measure(args, lambda so_far: self._save(file, so_far, complete=False))
        self._save(file, result, complete=True)
        emit(args, {"bench": self.name, **result}, *self.tables(args, result), *written(file))
        return result

    def _save(self, file: Path | None, result: Mapping[str, Any], *, complete: bool) -> None:
        if file is not None:
            document = {"bench": self.name, "complete": complete, **result}
            write_text(file, json.dumps(document, indent=2, allow_nan=False) + "\n")


def targets(words: str, metavar: str = "TARGET") -> Argument:
    """Make the argument that names what to measure."""
    return arg("target", nargs="*", metavar=metavar, help=words)


def ratios(found: Mapping[str, float], labels: Sequence[str], digits: int = 2) -> list[str]:
    """Format the ratios of these labels, "-" for missing ones."""
    return [f"{found[label]:.{digits}f}" if label in found else "-" for label in labels]
