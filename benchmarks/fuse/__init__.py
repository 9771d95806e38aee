"""Training B models at once: throughput against B of everything that can do it, side by side in one run.

    serial         a loop over B models, each with its optimizer
    channels-last  the same with weights and images that have their channels last (where there are images)
    processes      B processes side by side, each with its model and one thread (HFTA calls it concurrent)
    vmap           `hocket.fuse` with ``backend="vmap"``
    fused          with rules everywhere
    auto           with whatever was timed to be the fastest
    scheduled      the same, and its step by a plan of `hocket.schedule`
    close          with ``numerics="close"``, and compiled forms among what is tried (takes minutes)
    lanes          the loop by such a plan, nothing fused
    jax            perceptrons by JAX, ``jit(vmap(value_and_grad))`` and its own update, in a process of its own

Throughput is models times steps per second; what counts is the ratio to serial, of blocks of steps taken in turns.
Beside it stands the ratio to the same contender with one model, which is always measured. Where fusing stops paying is
the first B at which a ratio to serial falls below one. Each step takes another batch. Models share it, the rate and
the optimizer's other options, or have their own, as in a search. Memory is what the process grew by (CPU) or the
allocator's peak (CUDA), each contender in a process of its own.

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, sections 4 and 5.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from itertools import product
from queue import Empty
from threading import BrokenBarrierError
from time import perf_counter
from typing import Any

import torch

from benchmarks.budget import Budget
from benchmarks.fuse import beside
from benchmarks.fuse.targets import BACKENDS, TARGETS, Target, named, step_of
from benchmarks.fuse.timing import check_device, row_of, timed, took_s
from benchmarks.fuse.training import OPTIMIZERS, PRECISIONS, Training
from benchmarks.jax_process import jax_missing
from hocket.errors import InputError

__all__ = ["CONTENDERS", "OPTIMIZERS", "PRECISIONS", "TARGETS", "Target", "Training", "run"]

CONTENDERS = (
    "serial",
    "channels-last",
    "processes",
    "vmap",
    "fused",
    "auto",
    "scheduled",
    "close",
    "lanes",
    "jax",
)
IN_TURNS = ("serial", "channels-last", *BACKENDS, "lanes", "jax")  # in this process
MAX_PROCESSES = {"cpu": 8, "cuda": 16}
PATIENCE_S = 300.0  # for processes side by side to begin, and to end


def run(
    targets: Sequence[str] = (),
    *,
    device: str = "cpu",
    sizes: Sequence[int] = (1, 2, 4, 8),
    steps: int = 7,
    precisions: Sequence[str] = ("float32",),
    optimizer: str = "sgd",
    own_rates: bool = False,
    own_batches: bool = False,
    memory: bool = True,
    contenders: Sequence[str] = CONTENDERS,
    budget_s: float | None = None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure targets at every B, small B first. Memory at the end.

    Args:
        targets: names in `TARGETS` or `targets.PAPER`, or of zoo entries that classify. All of `TARGETS` by default.
        device: "cpu" or "cuda".
        sizes: the numbers of models, B. One model is measured too.
        steps: counted steps of each contender, more where they are short. Medians are taken.
        precisions: of `PRECISIONS`. Everything is measured in each of them.
        optimizer: of `OPTIMIZERS`.
        own_rates: each model has a rate and a weight decay of its own.
        own_batches: each model has a batch of its own.
        memory: measure memory too (each contender in a new process).
        contenders: which of `CONTENDERS`; "serial", the baseline, is always among them.
        budget_s: what there is no time for in so many seconds is left out.
        save: called with the result so far, after each target and B.

    Returns:
        ``targets``: name -> B (as text) -> contender -> ``models_per_s``, ``step_ms``, ``quartiles_ms``, ``steps``,
        ``to_serial``, ``to_own_one`` (models per second over those of the same contender at B = 1), ``first_steps``
        (its first step in steps of serial: models are traced and plans timed), ``chosen`` (by auto, in the
        order of its choices, and why a plan was kept or not), ``memory_bytes``, ``memory_to_singles`` (to B times what
        one model alone needs),.
        ``crossover``: name -> contender -> ``pays_from``, the first B at which it is no slower than serial, and
        ``stops_at``, the next one at which it is; None where there is none.
        ``targets_float16``, ``crossover_float16``: the same in further precisions, by name.
        ``left_out``: a line for each contender that cannot be had here, and for what had no time or memory.

    Raises:
        InputError: the device is not there, or a target, contender or precision is unknown.
    """
    check_device(device)
    unknown = set(contenders) - set(CONTENDERS)
    if unknown:
        raise InputError(f"bench fuse: expected contenders among {', '.join(CONTENDERS)}, got {sorted(unknown)}")
    chosen = {name: named(name) for name in (targets or TARGETS)}
    wanted = dict.fromkeys(("serial", *contenders))
    left_out = _absent(device, tuple(wanted))
    names = tuple(name for name in wanted if name not in left_out)
    budget = Budget(budget_s)
    sizes = tuple(dict.fromkeys((1, *sizes)))
    settings: dict[str, Any] = {"optimizer": optimizer, "own_rates": own_rates, "own_batches": own_batches}
    trainings = {
        f"_{each}" if number else "": Training(each, **settings)
        for number, each in enumerate(dict.fromkeys(precisions))
    }
    measured: dict[str, dict[str, Any]] = {key: {name: {} for name in chosen} for key in trainings}

    def result() -> dict[str, Any]:
        found: dict[str, Any] = {**_where(device), "precisions": list(precisions), **settings}
        for key, targets in measured.items():
            found[f"targets{key}"] = targets
            found[f"crossover{key}"] = {name: crossover(by_size) for name, by_size in targets.items()}
        return found | {"left_out": left_out | budget.left_out}

    for size, (key, training), (name, target) in product(sizes, trainings.items(), chosen.items()):
        what = _words(name, size, training)
        with budget.item(what, kind=name, units=size) as begun:
            if begun:
                try:
                    rows = _measure(target, size, device, steps, training, names, left_out, budget.left_s())
                    measured[key][name][str(size)] = rows
                    _compare_with_one(rows, measured[key][name].get("1", {}))
                except Exception as error:  # noqa: BLE001  # too little memory, a package: it costs this one alone
                    left_out[what] = f"{what}: {(str(error).splitlines() or [type(error).__name__])[0]}"
                save(result())
    for (key, training), (name, target) in product(trainings.items(), chosen.items()):
        if memory and measured[key][name]:
            _add_memory(name, target, measured[key][name], device, training, budget, left_out)
            save(result())
    return result()


def _words(name: str, size: int, training: Training) -> str:
    return f"{name}, {size} models" + (f", {training.precision}" if training.amp else "")


def _compare_with_one(rows: dict[str, dict[str, Any]], single: dict[str, dict[str, Any]]) -> None:
    for name, row in rows.items():
        if name in single:
            row["to_own_one"] = row["models_per_s"] / single[name]["models_per_s"]


def crossover(by_size: dict[str, dict[str, Any]]) -> dict[str, dict[str, int | None]]:
    """For each contender the first B, of those measured, at which it beats serial, and the next at which it loses."""
    names = dict.fromkeys(name for found in by_size.values() for name in found if name != "serial")
    return {
        name: _pays({int(b): found[name]["to_serial"] for b, found in by_size.items() if name in found})
        for name in names
    }


def _pays(to_serial: dict[int, float]) -> dict[str, int | None]:
    begins = min((size for size, ratio in to_serial.items() if ratio >= 1), default=None)
    loses = [size for size, ratio in to_serial.items() if begins is not None and size > begins and ratio < 1]
    return {"pays_from": begins, "stops_at": min(loses, default=None)}


def _where(device: str) -> dict[str, Any]:
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _absent(device: str, wanted: tuple[str, ...]) -> dict[str, str]:
    """Return a line for each contender that is not available here."""
    found = {}
    if "jax" in wanted and (why := "jax: is measured on CPUs" if device != "cpu" else jax_missing()):
        found["jax"] = why
    return found


def _measure(
    target: Target,
    size: int,
    device: str,
    steps: int,
    training: Training,
    names: tuple[str, ...],
    left_out: dict[str, str],
    left_s: float,
) -> dict[str, dict[str, Any]]:
    suits = {"channels-last": target.has_images(), "jax": target.entry == "mlp" and not training.amp}
    here = [name for name in IN_TURNS if name in names and suits.get(name, True)]
    in_turn = {name: step_of(name, target, size, device, training) for name in here}
    first_s = {name: took_s(step, device) for name, step in in_turn.items()}
    found: dict[str, dict[str, Any]] = {
        name: row_of(times_ms) for name, times_ms in timed(in_turn, device, steps).items()
    }
    for name, row in found.items():
        row["first_steps"] = first_s[name] * 1e3 / found["serial"]["step_ms"]
    for name, step in in_turn.items():
        if step.chosen():
            found[name]["chosen"] = step.chosen()
    in_turn.clear()  # their memory is needed
    if size <= MAX_PROCESSES[device] and "processes" in names:
        step_s = _beside(target, size, device, steps, training, left_out, left_s)
        if step_s is not None:
            found["processes"] = {"step_ms": step_s * 1e3}
    serial_ms = found["serial"]["step_ms"]
    for row in found.values():
        row["models_per_s"] = size / row["step_ms"] * 1e3
        row["to_serial"] = serial_ms / row["step_ms"]
    return found


def _beside(
    target: Target,
    size: int,
    device: str,
    steps: int,
    training: Training,
    left_out: dict[str, str],
    left_s: float,
) -> float | None:
    """Return the seconds of a step of processes side by side, or None, and a line in `left_out`, if they fail."""
    begin = perf_counter()
    try:
        patience_s = min(PATIENCE_S, max(1.0, left_s))
        return beside.side_by_side(target, size, device, steps, training, patience_s=patience_s)
    except BrokenBarrierError:
        what = f"processes, {_words(target.entry, size, training)}"
        left_out[what] = f"{what}: not done in {perf_counter() - begin:.0f} s, or one of the processes failed"
    return None


def _add_memory(
    name: str,
    target: Target,
    by_size: dict[str, dict[str, Any]],
    device: str,
    training: Training,
    budget: Budget,
    left_out: dict[str, str],
) -> None:
    single = 0.0
    for size, found in {"1": {"serial": {}}, **by_size}.items():
        for contender, row in found.items():
            if contender not in IN_TURNS or contender == "jax":
                continue
            what = f"memory of {contender}, {_words(name, int(size), training)}"
            with budget.item(what, kind="memory") as begun:
                if not begun:
                    continue
                try:
                    row["memory_bytes"] = beside.memory_of(contender, target, int(size), device, training)
                except Empty:
                    left_out[what] = f"{what}: its process did not end"
                    continue
            if (size, contender) == ("1", "serial"):
                single = row["memory_bytes"]
            if single > 0:  # so small a model that the process did not grow has no share
                row["memory_to_singles"] = row["memory_bytes"] / (int(size) * single)
