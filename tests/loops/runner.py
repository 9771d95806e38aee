"""Runs a loop eagerly and scheduled, from the same seed, and says where the two runs part.

Calls of the user's step are counted by `sys.settrace`, which sees them without adding anything that the step could be
seen to read or write. Should the library trace on its own account meanwhile, calls are missed and none invented.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import inspect
import io
import random
import signal
import sys
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hocket
from loops.loop import Case, Loop, built
from loops.snapshot import differences, fingerprint, flat, trained

STEPS = 200
MARKED = 7  # every so many rounds all state is looked at, which takes longer than a step; no loop repeats itself in 7


@dataclass
class Ended:
    """Results and state of one run.

    Attributes:
        returned: of every call what it returned, or the exception it raised.
        marks: of every `MARKED`-th round, and of the last one, the fingerprints of all state, by name.
        state: all state after the last round.
        calls: how often each step was called, by its code.
        verdicts: of each schedule ``verdict: why``.
        trouble: tracebacks by round, of whatever was raised.
    """

    returned: list[dict[str, Any]] = field(default_factory=list)
    marks: dict[int, dict[str, int]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    calls: Counter[types.CodeType] = field(default_factory=Counter)
    verdicts: list[tuple[str, str]] = field(default_factory=list)
    trouble: dict[int, str] = field(default_factory=dict)


def run(
    build: Callable[[], Loop],
    *,
    steps: int = STEPS,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    counted: bool = True,
    marked: int = MARKED,
) -> Ended:
    """Build a loop from a seed and run it: eagerly without `options`, else scheduled with them.

    Without `counted`, calls of the step are not counted, which doubles what a capture takes. All state is looked at in
    one of `marked` rounds, or after the last one only.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the loops draw from it
    torch.manual_seed(seed)
    ended, printed = Ended(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        loop = build()
        try:
            if options is None:
                _drive(loop, [part.step for part in loop.parts], steps, ended, printed, counted, marked)
            else:
                made = [hocket.schedule(part.step, part.model, part.optimizer, **options) for part in loop.parts]
                try:
                    _drive(loop, made, steps, ended, printed, counted, marked)
                finally:
                    ended.verdicts = [(str(fast.verdict), fast.why) for fast in made]
                    for fast in made:
                        fast.close()
        finally:
            loop.close()
    return ended


def _drive(
    loop: Loop,
    calls: list[Callable[[Any], Any]],
    steps: int,
    ended: Ended,
    printed: io.StringIO,
    counted: bool,
    marked: int,
) -> None:
    codes = {code for part in loop.parts if (code := code_of(part.step)) is not None}
    for n in range(steps):
        try:
            for part, call in zip(loop.parts, calls, strict=True):
                result: Any = None
                with part.around(n), counting(codes, ended) if counted else contextlib.nullcontext():
                    batch = part.batch(n)
                    try:
                        result = call(batch)
                    except Exception as error:  # noqa: BLE001  # loops raise what they like; eager's is compared
                        result = error
                        ended.trouble[n] = traceback.format_exc(limit=-4)
                ended.returned.append(flat(result, f"round {n}: what is returned", {}))
                part.after(n, result)
        except Exception as error:  # noqa: BLE001  # code between steps fails where a step left its state behind
            ended.returned.append(flat(error, f"round {n}: after the step", {}))
            ended.trouble[n] = traceback.format_exc(limit=-4)
        if (marked and n % marked == 0) or n == steps - 1:
            ended.state = _state(loop, printed)
            ended.marks[n] = fingerprint(ended.state)


def _state(loop: Loop, printed: io.StringIO) -> dict[str, Any]:
    table: dict[str, Any] = {"printed": printed.getvalue()}
    for number, part in enumerate(loop.parts):
        found = {**trained(part.model, part.optimizer), **flat(dict(part.state()), "state", {})}
        table |= {f"step {number}: {name}" if number else name: leaf for name, leaf in found.items()}
    flat(torch.get_rng_state(), "torch's random state", table)
    table["random's state"] = hash(random.getstate())
    return flat(np.random.get_state(legacy=False), "numpy's random state", table)  # noqa: NPY002


def compared(
    build: Callable[[], Loop],
    options: dict[str, Any],
    *,
    steps: int = STEPS,
    counted: bool = True,
    exact: bool = True,
    marked: int = MARKED,
    further: Callable[[str, str], Iterator[str]] = lambda verdict, why: iter(()),
) -> list[tuple[str, str]]:
    """Run a loop eagerly and scheduled. Fail where these runs differ, or with `further` lines about a verdict.

    Returns the verdicts of the scheduled run.
    """
    eager, scheduled = (
        run(build, steps=steps, counted=counted, marked=marked, options=each) for each in (None, options)
    )
    lines = problems(eager, scheduled, exact=exact)
    lines += [line for verdict in scheduled.verdicts for line in further(*verdict)]
    if lines:
        verdicts = "; ".join(f"{verdict}, because {why}" for verdict, why in scheduled.verdicts)
        pytest.fail("\n".join([verdicts, *lines]), pytrace=False)
    return scheduled.verdicts


def problems(eager: Ended, scheduled: Ended, *, exact: bool = True) -> list[str]:
    """List the differences of a scheduled run from the eager one.

    Tensors and floats have to be the same bit by bit, or, unless `exact`, within rounding.
    """
    lines: list[str] = []
    rounds = [n for n in eager.marks if n in scheduled.marks]
    for n in rounds if exact else ():
        names = [name for name, mark in eager.marks[n].items() if scheduled.marks[n].get(name) != mark]
        if names := names + [name for name in scheduled.marks[n] if name not in eager.marks[n]]:
            lines.append(f"first difference of state, by round {n}: {', '.join(names[:6])}")
            break
    for one, other in zip(eager.returned, scheduled.returned, strict=False):
        if found := differences(one, other, exact=exact):
            lines.append(f"first difference of results: {found[0]}")
            break
    if len(eager.returned) != len(scheduled.returned):
        lines.append(f"{len(eager.returned)} results of eager, {len(scheduled.returned)} scheduled")
    found = differences(eager.state, scheduled.state, exact=exact)
    lines += [f"at the end: {line}" for line in found[:8]]
    if len(found) > 8:
        lines.append(f"at the end: {len(found) - 8} further differences")
    for code, count in scheduled.calls.items():
        if count > eager.calls[code]:
            lines.append(f"the step was called {count} times, {count - eager.calls[code]} too many")
    unexpected = [n for n in scheduled.trouble if n not in eager.trouble]
    if unexpected:
        lines.append(f"raised in round {unexpected[0]}:\n{scheduled.trouble[unexpected[0]]}")
    return lines


def code_of(step: Any) -> types.CodeType | None:
    """The code of the user's own function behind a step; None where it is not written in Python."""
    while True:
        if isinstance(step, functools.partial):
            step = step.func
        elif isinstance(step, types.MethodType):
            step = step.__func__
        elif hasattr(step, "__wrapped__"):
            step = step.__wrapped__
        elif isinstance(step, types.FunctionType):
            return step.__code__
        else:
            method = inspect.getattr_static(type(step), "__call__", None)
            if not isinstance(method, types.FunctionType):
                return None
            step = method


@contextlib.contextmanager
def counting(codes: set[types.CodeType], ended: Ended) -> Iterator[None]:
    """Count the calls of functions with these codes."""

    def trace(frame: types.FrameType, event: str, argument: Any) -> None:
        if frame.f_code in codes:
            ended.calls[frame.f_code] += 1

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeoutError` in code that takes longer, and again at its end; end the process if it never comes back."""
    expired = TimeoutError(f"no end after {seconds} s")
    late = False

    def interrupt(*_: Any) -> None:
        nonlocal late
        late = True
        raise expired

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if late:
        raise expired


def builder(case: Case, folder: Path) -> Callable[[], Loop]:
    """The loop's builder without parameters."""
    return functools.partial(built, case.build, folder)
