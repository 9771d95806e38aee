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

What counts is the ratio of models times steps per second to serial's, and to the same contender's with one model, which
is always measured. Memory is what the process grew by (CPU) or the allocator's peak (CUDA), each contender in a process
of its own. Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from statistics import quantiles
from typing import Any

import torch

from benchmarks.bench import Budget, Save, check_names, table_of, unsaved
from benchmarks.fuse.targets import BACKENDS, TARGETS, Target, Training, named, step_of
from benchmarks.fuse.timing import memory_of, side_by_side, timed, took_s
from benchmarks.jax_steps import jax_missing
from hocket.errors import InputError

CONTENDERS = ("serial", "channels-last", "processes", "vmap", "fused", "auto", "scheduled", "close", "lanes", "jax")
USUAL = tuple(name for name in CONTENDERS if name != "close")
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
    memory: bool = True,
    contenders: Sequence[str] = USUAL,
    budget_s: float | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Measure targets at every B, small B first. Memory at the end.

    Returns:
        ``targets``: name -> B (as text) -> contender -> its times, ``to_serial``, ``to_own_one``, ``first_steps`` (its
        first step in steps of serial: models are traced and plans timed), ``chosen`` (by auto, and why a plan was kept
        or not), and ``memory_to_singles`` (to B times what one model alone needs). ``targets_float16`` and so
        on: the same in further precisions. ``left_out``: a line for what cannot be had here, and for what had no time
        or memory.

    Raises:
        InputError: the device is not there, or a target or contender is unknown.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("bench fuse: device: expected one that is there, got 'cuda', and torch sees no GPU")
    check_names("fuse", contenders, CONTENDERS)
    chosen = {name: named(name) for name in (targets or TARGETS)}
    wanted = dict.fromkeys(("serial", *contenders))
    budget = Budget(budget_s)
    if "jax" in wanted and (why := "jax: is measured on CPUs" if device != "cpu" else jax_missing()):
        budget.left_out["jax"] = why
    names = tuple(name for name in wanted if name not in budget.left_out)
    sizes = tuple(dict.fromkeys((1, *sizes)))
    settings: dict[str, Any] = {"optimizer": optimizer, "own_rates": own_rates}
    first = precisions[0]
    trainings = {"" if each == first else f"_{each}": Training(each, **settings) for each in precisions}
    measured: dict[str, dict[str, Any]] = {key: {name: {} for name in chosen} for key in trainings}

    result: dict[str, Any] = {"device": device, "precisions": list(precisions), **settings}
    result |= {f"targets{key}": rows for key, rows in measured.items()} | {"left_out": budget.left_out}
    if device == "cuda":
        result["machine"] = torch.cuda.get_device_name()
    for size, (key, training), (name, target) in product(sizes, trainings.items(), chosen.items()):
        what = _words(name, size, training)
        with budget.item(what, kind=name, units=size, spared=Exception) as begun:
            if begun:
                rows = _measure(target, size, device, steps, training, names, budget)
                measured[key][name][str(size)] = rows
                single = measured[key][name].get("1", {})
                for contender, row in rows.items():
                    if contender in single:
                        row["to_own_one"] = row["models_per_s"] / single[contender]["models_per_s"]
        save(result)
    for (key, training), (name, target) in product(trainings.items(), chosen.items()):
        if memory and measured[key][name]:
            _add_memory(name, target, measured[key][name], device, training, budget)
            save(result)
    return result


def _words(name: str, size: int, training: Training) -> str:
    return f"{name}, {size} models" + (f", {training.precision}" if training.amp else "")


def _measure(
    target: Target, size: int, device: str, steps: int, training: Training, names: tuple[str, ...], budget: Budget
) -> dict[str, dict[str, Any]]:
    suits = {"channels-last": target.has_images(), "jax": target.entry == "mlp" and not training.amp}
    here = [name for name in IN_TURNS if name in names and suits.get(name, True)]
    in_turn = {name: step_of(name, target, size, device, training) for name in here}
    first_s = {name: took_s(step, device) for name, step in in_turn.items()}
    found: dict[str, dict[str, Any]] = {}
    for name, times_ms in timed(in_turn, device, steps).items():
        lower, middle, upper = quantiles(times_ms, n=4)
        found[name] = {"step_ms": middle, "quartiles_ms": [lower, upper], "steps": len(times_ms)}
    for name, step in in_turn.items():
        found[name]["first_steps"] = first_s[name] * 1e3 / found["serial"]["step_ms"]
        if step.chosen():
            found[name]["chosen"] = step.chosen()
    in_turn.clear()  # their memory is needed
    if size <= MAX_PROCESSES[device] and "processes" in names:
        with budget.item(f"processes, {_words(target.entry, size, training)}", spared=InputError) as begun:
            if begun:
                patience_s = min(PATIENCE_S, max(1.0, budget.left_s()))
                step_s = side_by_side(target, size, device, steps, training, patience_s=patience_s)
                found["processes"] = {"step_ms": step_s * 1e3}
    serial_ms = found["serial"]["step_ms"]
    for row in found.values():
        row["models_per_s"] = size / row["step_ms"] * 1e3
        row["to_serial"] = serial_ms / row["step_ms"]
    return found


def _add_memory(
    name: str, target: Target, by_size: dict[str, dict[str, Any]], device: str, training: Training, budget: Budget
) -> None:
    single = 0.0
    for size, found in {"1": {"serial": {}}, **by_size}.items():
        for contender, row in found.items():
            if contender not in IN_TURNS or contender == "jax":
                continue
            what = f"memory of {contender}, {_words(name, int(size), training)}"
            with budget.item(what, kind="memory", spared=InputError) as begun:
                if begun:
                    row["memory_bytes"] = memory_of(contender, target, int(size), device, training)
            if "memory_bytes" not in row:
                continue
            if (size, contender) == ("1", "serial"):
                single = row["memory_bytes"]
            if single > 0:  # so small a model that the process did not grow has no share
                row["memory_to_singles"] = row["memory_bytes"] / (int(size) * single)


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    yield _fused_table(f"training B models, {result['device']}: speedup over serial", result["targets"])
    for each in result["precisions"][1:]:
        yield _fused_table(f"the same in {each}", result[f"targets_{each}"])


def _fused_table(title: str, by_target: dict[str, Any]) -> Any:
    """A row for each target and B."""
    rows = [
        {"target": target, "size": size, **found}
        for target, sizes in by_target.items()
        for size, found in sizes.items()
    ]
    names = [name for name in CONTENDERS[1:] if any(name in row for row in rows)]
    columns = {
        **{"target": "{target}", "B": "{size}", "serial, models/s": "{serial[models_per_s]:,.1f}"},
        **{name: f"{{{name}[to_serial]:.2f}} ({{{name}[to_own_one]:.2f}})" for name in names},
        **{"auto's first, steps": "{auto[first_steps]:.0f}", "serial bytes": "{serial[memory_bytes]:.3g}"},
        **{"auto bytes": "{auto[memory_bytes]:.3g}", "auto to singles": "{auto[memory_to_singles]:.2f}"},
    }
    return table_of(f"{title} (over its own B = 1)", columns, rows)
