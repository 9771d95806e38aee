"""``backend="auto"``: time what could compute each op, and the model as a whole, and keep the fastest.

Fusing can lose: on a CPU, a grouped convolution of wide channels takes longer than its parts. So, on the first call for
an input of this shape:

    1. each op that can pay or cost much: rule, vmap and loop in turn, forward and backward, on the values at hand
    2. the whole model: rules everywhere; the fastest of each op; and the plain models one after another
    3. what won in 2 runs from now on

An op alone does not tell everything: the layout it leaves behind costs or saves the next one a copy. Hence 2. What was
timed leaves no trace: buffers and random numbers are put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from hocket.fusion.benchmark import Copies, benchmark, in_turns, make_pass, those_that_run
from hocket.fusion.groups import Groups
from hocket.fusion.program import FusedProgram
from hocket.fusion.single_model import has_images
from hocket.fusion.stacked import Stacked, map_tree
from hocket.fusion.steps import Step

__all__ = ["CHANNELS_LAST", "Choice", "as_before", "choose", "put_back"]

CHANNELS_LAST = ", channels last"
HANDICAP = {"rule": 1.0, "loop": 1.0, "single": 1.0, "mixed": 1.05}  # others have to win clearly:
HANDICAP |= {f"{name}{CHANNELS_LAST}": 1.05 for name in ("loop", "single")}
GROUPED = 1.10  # groups join their gradients, which also costs what comes after the pass
BUDGET_S = 20.0  # of op by op timing, after which the remaining ops keep their rules
FAILURES = (RuntimeError, ValueError, TypeError, NotImplementedError)

Run = Callable[[list[Any]], Any]  # the output for the leaves of the arguments


@dataclass(frozen=True)
class Choice:
    """What was timed and what won.

    Attributes:
        winner: "rule", "mixed" (each op its own way), "2 at a time" and so on (by rules, in groups of models), "loop"
            (the plain models one after another) or, of one model, "single" (its ops as they are); the latter two also
            with convolutions ", channels last".
        whole_us: time of one pass of each of them, microseconds, as long as it was in the benchmark.
        ops_us: time of each op by each backend, by layer and op, microseconds.
    """

    winner: str
    whole_us: dict[str, float]
    ops_us: dict[tuple[int, str, str], dict[str, float]] = field(default_factory=dict)


def choose(program: FusedProgram, leaves: list[Any], state: Callable[[], Any]) -> tuple[Choice, Run]:
    """Time and choose: what was timed, and what runs from now on.

    The program's backends are set where the choice is "mixed".

    Args:
        program: rules everywhere.
        leaves: the arguments at hand.
        state: a context in which buffers and random numbers change without trace.
    """
    num_models = program.owner.num_models
    usual = {step.index: list(step.backends) for step in program.steps}
    copies = Copies(leaves)
    leaves = copies.leaves
    with state():
        ops_us, best = _choose_ops(program, leaves)
    if copies.are_written():  # then models cannot read one input in turn
        return Choice("rule", {}, ops_us), program.run
    mixed = {step.index: best.get(step.index, usual[step.index]) for step in program.steps}

    def run_with(backends: dict[int, list[str]]) -> Run:
        def run(own: list[Any]) -> Any:
            for step in program.steps:
                step.backends = backends[step.index]
            return program.run(own)

        return run

    runs: dict[str, Run] = {"rule": run_with(usual)}
    if any(mixed[place] != usual[place] for place in usual):
        runs["mixed"] = run_with(mixed)
    for size in range(num_models - 1, 1, -1):
        if num_models % size == 0:
            runs[f"{size} at a time"] = Groups(program.owner, program.traced, size).run
    alone = "single" if num_models == 1 else "loop"
    runs[alone] = Groups(program.owner, program.traced, 1).run
    params = _trained(program)
    if has_images(program):
        runs[f"{alone}{CHANNELS_LAST}"] = Groups(program.owner, program.traced, 1, channels_last=True).run
    with state():
        contenders = {name: make_pass(partial(run, leaves), params) for name, run in runs.items()}
        # A forward that sees strides, or writes over its input, may fail in another layout or in turns.
        others = those_that_run({name: run for name, run in contenders.items() if name != "rule"})
        whole_us = benchmark({"rule": contenders["rule"]} | ({} if copies.are_written() else others))
    winner = min(whole_us, key=lambda name: whole_us[name] * HANDICAP.get(name, GROUPED))
    for step in program.steps:
        step.backends = (mixed if winner == "mixed" else usual)[step.index]
    run = program.run if winner in ("rule", "mixed") else runs[winner]
    return Choice(winner, whole_us, ops_us), run


def as_before(program: FusedProgram, winner: str) -> Run:
    """What `choose` gave with this winner, for arguments of another kind; by rules where each op went its own way."""
    if winner in ("rule", "mixed"):
        return program.run
    name = winner.removesuffix(CHANNELS_LAST)
    size = 1 if name in ("loop", "single") else int(name.split()[0])
    return Groups(program.owner, program.traced, size, channels_last=name != winner).run


def _trained(program: FusedProgram) -> list[Tensor]:
    return [each for each in program.owner.all_parameters() if each.requires_grad]


def _choose_ops(
    program: FusedProgram, leaves: list[Any]
) -> tuple[dict[tuple[int, str, str], dict[str, float]], dict[int, list[str]]]:
    """Time each op that is worth it on the arguments it has in this pass."""
    ops_us: dict[tuple[int, str, str], dict[str, float]] = {}
    best: dict[int, list[str]] = {}
    known: dict[Any, dict[str, float]] = {}
    until = perf_counter() + BUDGET_S

    def watch(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not step.is_timed or perf_counter() > until:
            return
        key = (step.op, str(map_tree((args, kwargs), _described)), _tensors_of(program, step))
        if key not in known:
            known[key] = _time_op(program, step, args, kwargs)
        times = known[key]
        ops_us[(step.index, step.layer, step.op)] = times
        if times:
            order = sorted(times, key=lambda backend: times[backend])
            best[step.index] = [*order, *(each for each in step.backends if each not in order)]

    program.watch = watch
    try:
        program.run(leaves)
    finally:
        program.watch = None
    return ops_us, best


def _tensors_of(program: FusedProgram, step: Step) -> str:
    names = program.owner.names_in(step.layer)
    return str([tuple(program.owner.tensor(f"{step.layer}.{name}" if step.layer else name).shape) for name in names])


def _described(value: Any) -> Any:
    if isinstance(value, Stacked):
        return ("each", tuple(value.tensor.shape), value.tensor.stride(), str(value.tensor.dtype))
    if isinstance(value, Tensor):
        return ("all", tuple(value.shape), str(value.dtype))
    return value


def _time_op(program: FusedProgram, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, float]:
    """Microseconds of forward and backward, by each backend that can."""
    backends = program.backends_for(step, args, kwargs)
    if "rule" in backends and step.can_multiply is not None and step.can_multiply(*args, **kwargs):
        backends.append("product")
    inputs: list[Tensor] = []

    def fresh(value: Any) -> Any:
        tensor = value.tensor if isinstance(value, Stacked) else value
        if not isinstance(tensor, Tensor):
            return value
        own = tensor.detach()
        if tensor.requires_grad:
            own.requires_grad_()
            inputs.append(own)
        return Stacked(own) if isinstance(value, Stacked) else own

    own_args, own_kwargs = map_tree(args, fresh), map_tree(kwargs, fresh)
    names = program.owner.names_in(step.layer) if step.op[0].isupper() else []
    params = [program.owner.tensor(f"{step.layer}.{name}" if step.layer else name).tensor for name in names]
    wanted = [*inputs, *(param for param in params if param.requires_grad)]
    contenders = {}
    for backend in backends:
        run = make_pass(partial(_call_step, step, backend, own_args, own_kwargs), wanted)
        try:
            run()
        except FAILURES:
            continue
        contenders[backend] = run
    return in_turns(contenders) if len(contenders) > 1 else {}


def _call_step(step: Step, backend: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = step.call(backend, args, dict(kwargs))
    if result is NotImplemented:
        raise NotImplementedError
    return result


@contextmanager
def put_back(module: nn.Module, generators: dict[torch.device, tuple[torch.Generator, ...]]) -> Iterator[None]:
    """Buffers and random numbers are afterwards what they were before; generators made meanwhile are gone."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    before = dict(generators)
    states = [(each, each.get_state()) for group in before.values() for each in group]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, content in buffers:
                    buffer.copy_(content)
            generators.clear()
            generators.update(before)
            for generator, state in states:
                generator.set_state(state)
