"""A bench as a command: measure, write the result so far into the file of ``-o``, and print its tables or its JSON.

With a time budget a bench measures what it can in so many seconds, and names what it left out. An item begins only
where time is left for it. What it will take is guessed from the items of its kind before it: as long per unit (a model,
a layer) as the dearest of them, so a guess is rather too high. The first of a kind begins if any time is left.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from hocket.cli.arguments import Argument, arg, count, output
from hocket.cli.console import Bar, emit
from hocket.cli.files import output_file, written
from hocket.cli.targets import wait_policy
from hocket.ir import Machine
from hocket.ir._fields import write_text
from hocket.ir.limits import processor_name

Save: TypeAlias = Callable[[dict[str, Any]], object]

# Options of a bench that may be stopped after any item.
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
        module: of `benchmarks`, imported when the bench is called. Its ``tables`` yields the tables and lines of text
            that show a result.
        function: of the module, makes the result. It is called with the options that it has parameters for, without
            those that were not given. The parameter ``save`` is a function that it calls with the result after each
            item, so that a bench that is stopped leaves what it has measured.
        spins_briefly: limit the spinning of OpenMP's idle threads, as the command line does, and say so in the result.
    """

    name: str
    doing: str
    module: str
    function: str = "run"
    spins_briefly: bool = False

    def __call__(self, args: Namespace) -> None:
        """Run the bench."""
        self.run(args)

    def run(self, args: Namespace) -> dict[str, Any]:
        """Run the bench and return its result."""
        policy = {"wait_policy": wait_policy()} if self.spins_briefly else {}
        module = import_module(f"benchmarks.{self.module}")
        measure = getattr(module, self.function)
        file = output_file(getattr(args, "output", None))
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(args).items()}
        given = {name: value for name, value in given.items() if value not in (None, ())}
        given["save"] = lambda so_far: self._save(file, so_far, complete=False)
        with Bar(self.doing):
            result = measure(**{name: given[name] for name in signature(measure).parameters if name in given})
        result = {**_surroundings(), **result, **policy}
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
        found |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
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


def first_given(usual: Bench, **others: Bench) -> Callable[[Namespace], None]:
    """Return a command that runs the first of `others` whose option is given, or the usual bench."""

    def work(args: Namespace) -> None:
        next((bench for option, bench in others.items() if getattr(args, option)), usual)(args)

    return work


def targets(words: str, metavar: str = "TARGET", **more: Any) -> Argument:
    """Make the argument that names what to measure."""
    return arg("targets", nargs="*", metavar=metavar, help=words, **more)


def several(flag: str, **settings: Any) -> Argument:
    """Make an option that may be given again. The parameter for it is its plural, unless `settings` name another."""
    return arg(flag, **{"dest": f"{flag.strip('-')}s", "action": "append", "default": [], **settings})


def without(flag: str, parameter: str, words: str) -> Argument:
    """Make an option that turns a parameter off."""
    return arg(flag, dest=parameter, action="store_false", help=words)


def ratios(found: Mapping[str, float], labels: Sequence[str], digits: int = 2) -> list[str]:
    """Format the ratios of these labels, "-" for missing ones."""
    return [f"{found[label]:.{digits}f}" if label in found else "-" for label in labels]


class Budget:
    """So many seconds, from now on.

    Args:
        total_s: how many. All the time there is if None.
        clock: gives seconds.

    Attributes:
        left_out: a line for each item that did not begin, or failed.

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
        """Give whether there is time for an item, and look how long it takes.

        Args:
            what: its name.
            kind: what it is compared with to guess how long it takes.
            units: how large it is.
            share: of the whole budget, for all items of this kind.
            spared: errors that cost this item alone: their first line is noted in `left_out`, and they end here.
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
