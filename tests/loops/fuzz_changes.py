"""Fuzzer of changes between steps: each call of a scheduled program is as eager's, or raises eager's own exception.

``report(changing_program(17))`` replays one program and shrinks it where it differs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

import hocket
import hocket.native
from loops.changing import ChangingProgram, reset_switches
from loops.loop import Loop
from loops.runner import Ended, code_of, counting
from loops.snapshot import differences, flat, trained

MAX_LINES = 6
# Where programs may round otherwise: what is left where large numbers cancel counts by their size.
SMALLEST = 1e-2


@dataclass
class Run:
    """Results of one run.

    Attributes:
        calls: for each call what it returned or raised, and all state after it, as a flat table.
        num_steps: how often the user's function ran in each call.
        internal: what the library has logged of failures of its own.
        trouble: the traceback of each call that raised.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    num_steps: list[int] = field(default_factory=list)
    trouble: dict[int, str] = field(default_factory=dict)
    verdict: str = ""
    internal: list[str] = field(default_factory=list)


class _Listening(logging.Handler):
    """Keeps what is logged of failures of the library's own, and hides all else."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __enter__(self) -> None:
        log = logging.getLogger("hocket")
        self.before = log.level, log.propagate
        log.setLevel(logging.WARNING)
        log.propagate = False
        log.addHandler(self)

    def __exit__(self, *_: object) -> None:
        log = logging.getLogger("hocket")
        log.removeHandler(self)
        log.level, log.propagate = self.before
        log.manager._clear_cache()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(word in text for word in ("please report", "the search for a plan failed")):
            self.found.append(text + (f"\n{traceback.format_exc(limit=-6)}" if record.exc_info else ""))


def options_of(setting: str) -> dict[str, Any]:
    """The arguments of `hocket.schedule` for a setting of a program."""
    one = hocket.Machine.of(cores=1)
    return {
        "serial": {"guard": False, "planner": "serial", "machine": one},
        "lanes": {"guard": False, "machine": hocket.Machine.of(cores=2)},
        "close": {"guard": False, "numerics": "close", "machine": one},
        "default": {"machine": one},
    }[setting] | {"cache": False}


def run(program: ChangingProgram, options: Mapping[str, Any] | None) -> Run:
    """Run a program from its seed, eagerly without `options`, else scheduled with them."""
    reset_switches()
    random.seed(program.seed)
    np.random.seed(program.seed)  # noqa: NPY002  # the programs draw from it
    torch.manual_seed(program.seed)
    found = Run()
    listening = _Listening(found.internal)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), listening:
        warnings.simplefilter("ignore")
        loop = program.build()
        fast = None if options is None else hocket.schedule(loop.step, loop.model, loop.optimizer, **options)
        try:
            for n in range(program.num_calls):
                _call(loop, fast, n, found, counts=program.seed % 3 == 0)
        finally:
            if fast is not None:
                found.verdict = f"{fast.verdict}: {fast.why}"
                fast.close()
            loop.close()
    return found


def _call(loop: Loop, fast: Any, n: int, found: Run, *, counts: bool) -> None:
    code, ended = code_of(loop.step), Ended()
    result: Any = None
    try:
        batch = loop.batch(n)
        with loop.around(n), counting({code}, ended) if fast and counts else contextlib.nullcontext():
            result = (fast or loop.step)(batch)
    except Exception as error:  # noqa: BLE001  # whatever it is, eager has to raise the same
        result = error
        found.trouble[n] = traceback.format_exc(limit=-8)
    found.num_steps.append(ended.calls[code])
    table = flat(result, "what is returned", {})
    for place, leaf in enumerate(tree_leaves(result)):
        if isinstance(leaf, torch.Tensor):
            grad_fn = None if leaf.grad_fn is None else leaf.grad_fn.name()
            table[f"kind of result {place}"] = repr((type(leaf), leaf.requires_grad, leaf.stride(), grad_fn))
    del result
    try:
        _state(loop, table)
    except Exception as error:  # noqa: BLE001  # optimizers that were changed may not tell their state
        flat(type(error), "reading the state", table)
    try:
        loop.after(n, None)
    except Exception as error:  # noqa: BLE001  # a change fails where it met another one
        flat(type(error), "the change after it", table)  # its text may name an object by its address
    found.calls.append(table)


def _state(loop: Loop, table: dict[str, Any]) -> None:
    """Add all that a step may have changed."""
    flat(torch.get_rng_state(), "torch's random state", table)
    table["random's state"] = hash(random.getstate())
    flat(np.random.get_state(legacy=False), "numpy's random state", table)  # noqa: NPY002
    storages: dict[int, str] = {}
    state = loop.state()
    flat(state, "state", table)
    for name, place in state["net"].items():
        tensors = ((name, place), (f"{name}.grad", getattr(place, "grad", None)))
        for what, tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                kind = (type(tensor).__name__, tensor.requires_grad, tensor.is_leaf)
                layout = (tensor.stride(), tensor.storage_offset() if what == name else None)
                shared = storages.setdefault(tensor.untyped_storage().data_ptr(), what)
                table[f"kind of {what}"] = repr((*kind, *layout, shared))
    table.update(trained(loop.model, loop.optimizer))


def faults(program: ChangingProgram) -> list[str]:
    """Differences between the scheduled run of a program and the eager one. Empty if there are none."""
    eager = run(program, None)
    scheduled = run(program, options_of(program.setting))
    # On two cores an op may run at two threads, and rounds otherwise than eager at one.
    exact = program.setting in ("serial", "default") and not program.rounds
    for n, (one, other) in enumerate(zip(eager.calls, scheduled.calls, strict=True)):
        lines = [f"call {n}: {line}" for line in differences(one, other, exact=exact, smallest=SMALLEST)[:MAX_LINES]]
        if scheduled.num_steps[n] > 1:
            lines.append(f"call {n}: the step was called {scheduled.num_steps[n]} times")
        if lines and _is_left_halfway(one, other, scheduled.trouble.get(n, "")):
            break
        if lines:
            lines += filter(None, [scheduled.trouble.get(n), *scheduled.internal[:2]])
            return [*lines, f"it ended {scheduled.verdict}"]
    return scheduled.internal[:2]


def _is_left_halfway(eager: Mapping[str, Any], scheduled: Mapping[str, Any], trouble: str) -> bool:
    """True if a planned step has raised what eager raises, after an op that wrote what outlives the step.

    Batch norm has updated its statistics when a loss refuses its target. Eager cannot make such a step again: what the
    user's Python does before the op is not done, and gradients are gone. The error is all that is promised.
    """
    name = "what is returned"
    return "of the planned step" in trouble and eager.get(name) == scheduled.get(name)


def smallest_change(failing: ChangingProgram) -> ChangingProgram:
    """The program with as few changes as the failure needs, and with no calls after it."""
    failing = _cut(failing)
    tried = True
    while tried:
        tried = False
        for position in range(len(failing.events)):
            less = replace(failing, events=(*failing.events[:position], *failing.events[position + 1 :]))
            if faults(less):
                failing, tried = _cut(less), True
                break
    return failing


def _cut(failing: ChangingProgram) -> ChangingProgram:
    lines = faults(failing)
    if not lines or not lines[0].startswith("call "):
        return failing
    num_calls = int(lines[0].split(":")[0].removeprefix("call ")) + 1
    events = tuple(event for event in failing.events if event[0] < num_calls - 1)
    less = replace(failing, num_calls=num_calls, events=events)
    return less if faults(less) else failing


def report(failing: ChangingProgram) -> str:
    """A failing program, shrunk, as text."""
    less = smallest_change(failing)
    source = less.source[less.source.index("def build():") :]
    return f"program {less.seed}, {less.setting}, {less.num_calls} calls:\n{source}\n" + "\n".join(faults(less))
