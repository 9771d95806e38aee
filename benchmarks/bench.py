"""A bench as a command: measure, write the result so far into the file of ``-o``, and print its tables or its JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from hocket.cli.console import Bar, emit, table
from hocket.cli.files import output_file, written
from hocket.cli.targets import wait_policy
from hocket.errors import InputError
from hocket.ir import Machine
from hocket.ir._fields import write_text
from hocket.ir.limits import processor_name

if TYPE_CHECKING:
    from rich.table import Table

Save: TypeAlias = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Bench:
    """A bench, called with the parsed arguments, whose `name` is the value of ``bench`` in the result file.

    ``run`` of the `module` of `benchmarks` makes the result. It is called with the options that it has parameters for,
    without those that were not given. Its ``save`` is a function that it calls with the result after each item, so that
    a bench that is stopped leaves what it has measured. ``tables`` of the module yields what shows a result.

    With `spins_briefly` the spinning of OpenMP's idle threads is limited, as by the command line.
    """

    name: str
    module: str
    spins_briefly: bool = False

    def __call__(self, args: Namespace) -> None:
        """Run the bench."""
        self.run(args)

    def run(self, args: Namespace) -> dict[str, Any]:
        """Run the bench and return its result."""
        if self.spins_briefly:
            wait_policy()
        module = import_module(f"benchmarks.{self.module}")
        measure = module.run
        file = output_file(getattr(args, "output", None))
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
        given = {name: value for name, value in given.items() if value not in (None, ())}
        given["save"] = lambda so_far: self._save(file, so_far, complete=False)
        with Bar(self.name):
            result = measure(**{name: given[name] for name in signature(measure).parameters if name in given})
        result = {**_surroundings(), **result}
        self._save(file, result, complete=True)
        left_out = [f"left out: {why}" for why in result.get("left_out", {}).values()]
        emit(args, {"bench": self.name, **result}, *module.tables(result), *left_out, *written(file))
        return result

    def _save(self, file: Path | None, result: Mapping[str, Any], *, complete: bool) -> None:
        if file is not None:
            document = {"bench": self.name, "complete": complete, **_surroundings(), **result}
            write_text(file, json.dumps(document, indent=2, allow_nan=False) + "\n")


def _surroundings() -> dict[str, Any]:
    """Describe what a result was measured on. A bench that has not loaded torch has none."""
    found = {"machine": processor_name(), "cores": Machine.here().cores}
    if torch := sys.modules.get("torch"):
        policy = {name: os.environ.get(name, "") for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
        found |= {"threads": torch.get_num_threads(), "torch": torch.__version__, "wait_policy": policy}
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
    return found


def unsaved(_: dict[str, Any]) -> None:
    """Save nothing of the result so far."""


def by_target(targets: Iterable[str], measure: Callable[[str], Any], save: Save) -> dict[str, Any]:
    """Measure each target, and save the result after each."""
    found: dict[str, Any] = {}
    for target in targets:
        found[target] = measure(target)
        save({"targets": found})
    return {"targets": found}


def check_names(bench: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `InputError` for the first name that is not known."""
    for name in names:
        if name not in known:
            raise InputError(f"bench {bench}: expected some of {', '.join(known)}, got {name!r}")


Rows: TypeAlias = Mapping[str, Mapping[str, Any]] | Iterable[Mapping[str, Any]]


def table_of(title: str, columns: Mapping[str, str], rows: Rows, words: int = 1) -> Table:
    """Make a table of result rows, by name or without names, of which `words` columns are no figures.

    `columns` say by heading what stands in a row, such as ``{ratio:.2f}``: "-" where it has no such value. A row that
    has a name has it as ``{name}``.
    """
    named = ({"name": name, **row} for name, row in rows.items()) if isinstance(rows, Mapping) else rows
    return table(title, columns, [[_filled(form, row) for form in columns.values()] for row in named], words=words)


def columns_of(values: str, labels: Iterable[str], form: str = ".2f") -> dict[str, str]:
    """Make a column for each of the labels in a mapping of the row.

    Example:
        >>> columns_of("speedup", ["close"])
        {'close': '{speedup[close]:.2f}'}
    """
    return {label: f"{{{values}[{label}]:{form}}}" for label in labels}


def _filled(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format_map(row)
    except (KeyError, TypeError):  # not in this row, or None
        return "-"


class Budget:
    """A number of seconds from now on. `left_out` has a line for each item that did not begin, or failed.

    An item begins only where time is left for it. What it will take is guessed from the items of its kind before it: as
    long per unit (a model, a layer) as the dearest of them. The first of a kind begins if any time is left.

    Example:
        >>> budget = Budget(0.0)
        >>> with budget.item("resnet152") as begun:
        ...     begun
        False
        >>> budget.left_out
        {'resnet152': 'resnet152: no time: expected 0 s, 0 s left of 0'}
    """

    def __init__(self, total_s: float | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self.total_s = math.inf if total_s is None else total_s
        self.left_out: dict[str, str] = {}
        self._clock = clock
        self._begin = clock()
        self._dearest_s: dict[str, float] = {}
        self._spent_s: dict[str, float] = {}

    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.total_s - (self._clock() - self._begin))

    @contextmanager
    def item(
        self,
        what: str,
        *,
        kind: str = "",
        units: float = 1.0,
        share: float = 1.0,
        spared: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> Iterator[bool]:
        """Give True if there is time for an item, and measure how long it takes.

        All items of its `kind` have a `share` of the whole budget. Errors that are `spared` cost this item alone: their
        first line is noted in `left_out`, and they end here.
        """
        left_s = min(self.left_s(), share * self.total_s - self._spent_s.get(kind, 0.0))
        expected_s = self._dearest_s.get(kind, 0.0) * units
        if left_s <= 0 or expected_s > left_s:
            self.left_out[what] = (
                f"{what}: no time: expected {expected_s:.0f} s, {left_s:.0f} s left of {self.total_s:.0f}"
            )
            yield False
            return
        begin = self._clock()
        try:
            yield True
        except spared as error:
            lines = str(error).splitlines() or [type(error).__name__]
            self.left_out[what] = f"{what}: {lines[0]}"
        finally:
            took_s = self._clock() - begin
            self._spent_s[kind] = self._spent_s.get(kind, 0.0) + took_s
            self._dearest_s[kind] = max(self._dearest_s.get(kind, 0.0), took_s / units)
