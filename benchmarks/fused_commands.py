"""The benches of fused models and of searches: their arguments, and their tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.bench import BUDGET, SEVERAL, Bench, Save, ratios, targets
from hocket.cli.arguments import Verb, arg, count, output
from hocket.cli.console import table
from hocket.cli.targets import wait_policy

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["VERBS"]


def _fuse(args: Namespace, save: Save) -> dict[str, Any]:
    policy = wait_policy()
    from benchmarks.fuse import CONTENDERS, run

    sizes, precisions = tuple(args.models) or (1, 2, 4, 8), tuple(args.precision) or ("float32",)
    result = run(
        tuple(args.target),
        device=args.device,
        sizes=sizes,
        steps=args.steps,
        precisions=precisions,
        optimizer=args.optimizer,
        own_rates=args.own_rates,
        own_batches=args.own_batches,
        memory=not args.no_memory,
        contenders=tuple(args.contender) or tuple(name for name in CONTENDERS if name != "close"),
        budget_s=args.budget_s,
        save=save,
    )
    result["wait_policy"] = policy
    return result


def _fuse_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    where = f"{result['device']} ({result['machine']}), torch {result['torch']}"
    yield _fused_table(f"training B models, {where}: speedup over serial", result["targets"])
    for each in result["precisions"][1:]:
        yield _fused_table(f"the same in {each}", result[f"targets_{each}"])
    for target, found in result["crossover"].items():
        pays = [f"{name} {_range(size)}" for name, size in found.items()]
        yield f"no slower than serial: {target}: {', '.join(pays)}"
    yield from (f"left out: {why}" for why in result["left_out"].values())


def _range(found: dict[str, int | None]) -> str:
    if found["pays_from"] is None:
        return "nowhere"
    return f"from B = {found['pays_from']}" + (f", not at {found['stops_at']}" if found["stops_at"] else "")


def _fused_table(title: str, by_target: dict[str, Any]) -> Table:
    """A row for each target and B."""
    from benchmarks.fuse import CONTENDERS

    measured = {name for by_size in by_target.values() for found in by_size.values() for name in found}
    names = [name for name in CONTENDERS[1:] if name in measured]
    rows = []
    for target, by_size in by_target.items():
        for size, found in by_size.items():
            grown = [
                f"{found[name]['memory_bytes'] / 2**20:,.0f}" if "memory_bytes" in found.get(name, {}) else "-"
                for name in ("serial", "auto")
            ]
            auto = found.get("auto", {})
            first = f"{auto['first_steps']:.0f}" if auto else "-"
            to_serial = [_ratio(found[name]) if name in found else "-" for name in names]
            share = ratios(auto, ("memory_to_singles",))
            rows.append((target, size, f"{found['serial']['models_per_s']:,.1f}", *to_serial, first, *grown, *share))
    memory = ("serial MiB", "auto MiB", "auto to singles")
    columns = ("target", "B", "serial, models/s", *names, "auto's first, steps", *memory)
    return table(f"{title} (over its own B = 1)", columns, rows)


def _ratio(row: dict[str, Any]) -> str:
    own = f" ({row['to_own_one']:.2f})" if "to_own_one" in row else ""
    return f"{row['to_serial']:.2f}{own}"


def _tune(args: Namespace, save: Save) -> dict[str, Any]:
    policy = wait_policy()
    from benchmarks.tune import CONTENDERS, run

    result = run(
        tuple(args.target),
        contenders=tuple(args.contender) or CONTENDERS,
        algorithms=tuple(args.algorithm),
        trials=args.trials,
        quick=args.quick,
        budget_s=args.budget_s,
        save=save,
    )
    result["wait_policy"] = policy
    return result


def _tune_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    from benchmarks.tune import apart

    rows = [
        (
            *(name, contender, f"{row['seconds']:.1f}", f"{row['to_serial']:.2f}"),
            *(f"{median(apart(found['serial'], row) or [0.0]):.0e}", f"{row['farthest']:.0e}"),
        )
        for name, found in result["searches"].items()
        for contender, row in found.items()
    ]
    columns = ("search", "executor", "seconds", "speedup", "apart (median)", "farthest")
    title = f"whole searches, {result['threads']} threads, torch {result['torch']}: speedup over serial"
    yield table(title, columns, rows, words=2)
    yield from (f"left out: {why}" for why in result["left_out"].values())


def _short(args: Namespace, _: Save) -> dict[str, Any]:
    from benchmarks.tune.short import run

    return run(args.trials, args.repeats)


def _short_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (name, f"{median(own):.2f}", f"{result['to_serial'][name]:.2f}", f"{result['best'][name]:.4f}")
        for name, own in result["cpu_s"].items()
    ]
    title = f"{args.trials} trials of 8 epochs of 16 batches, {result['threads']} threads, torch {result['torch']}"
    yield table(title, ("executor", "CPU seconds", "speedup", "best"), rows)


def _simulated(args: Namespace, _: Save) -> dict[str, Any]:
    from benchmarks.tune.simulated import run

    return run(tuple(args.target), tuple(args.models), args.searches)


def _simulated_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (
            *(target, name, str(found["trials"]), f"{found['epochs']:.0f}", f"{found['fused_epochs']:.0f}"),
            f"{found['to_serial']:.2f}",
        )
        for target, by_setting in result["searches"].items()
        for name, found in by_setting.items()
    ]
    title = f"searches simulated with measured steps, {result['threads']} threads"
    yield table(title, ("target", "search", "trials", "epochs", "fused epochs", "speedup"), rows, words=2)


def _resnet18(args: Namespace, _: Save) -> dict[str, Any]:
    policy = wait_policy()
    import torch

    from benchmarks.fuse.resnet18 import run

    return {**run(args.steps, getattr(torch, args.precision), args.rounds), "wait_policy": policy}


def _resnet18_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    if "curves" in result:
        found = result["curves"]
        alone, fused = found["losses"]["alone"], found["losses"]["fused"]
        rows = [
            (
                *(f"{rate:g}", f"{alone[-1][k]:.4f}", f"{fused[-1][k]:.4f}"),
                f"{max(abs(a[k] - b[k]) for a, b in zip(alone, fused, strict=True)):.1e}",
                *(f"{found['accuracy'][way][k]:.3f}" for way in ("alone", "fused")),
            )
            for k, rate in enumerate(found["rates"])
        ]
        columns = ("rate", "last loss, alone", "fused", "largest difference", "accuracy, alone", "fused")
        yield table(f"ResNet-18 on digits, {len(alone)} steps, {found['dtype']}", columns, rows)
    if "partial" in result:
        part = result["partial"]
        gains = [(name, f"{gain:.2f}") for name, gain in part["to_serial"].items()]
        yield table(f"{part['models']} ResNet-18: separate blocks", ("blocks", "speedup over serial"), gains)


VERBS = (
    Verb(
        "fuse",
        Bench("fuse", "every way of training B models in turn", _fuse, _fuse_tables),
        "training B models at once, against one after another",
        "python -m benchmarks fuse mlp-32 --device cpu --models 8 --models 64",
        (
            arg("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)"),
            arg("--models", type=count, metavar="B", help="models (1, 2, 4, 8)", **SEVERAL),
            arg("--contender", metavar="NAME", help="serial and this one only (all but close)", **SEVERAL),
            arg("--steps", type=count, default=7, metavar="N", help="steps of each contender, at least (7)"),
            arg(
                "--precision",
                choices=("float32", "bfloat16", "float16"),
                help="also several (float32); others: autocast",
                **SEVERAL,
            ),
            arg("--optimizer", choices=("sgd", "adam"), default="sgd", help="what updates (sgd, with momentum)"),
            arg("--own-rates", action="store_true", help="a rate and a weight decay for each model"),
            arg("--own-batches", action="store_true", help="a batch for each model"),
            arg("--no-memory", action="store_true", help="leave the measurement of memory out"),
            *BUDGET,
            targets("such as mlp-128 or pointnet-cls (a selection)"),
        ),
    ),
    Verb(
        "tune",
        Bench("tune", "every search by every executor", _tune, _tune_tables),
        "whole hyper-parameter searches: serial, in processes, fused, auto, scheduled",
        "python -m benchmarks tune mlp-32 --algorithm random -o tune.json",
        (
            arg("--contender", metavar="NAME", help="serial and this one only (all)", **SEVERAL),
            arg("--algorithm", metavar="NAME", help="random or hyperband only (what the target has)", **SEVERAL),
            arg("--trials", type=count, metavar="N", help="trials of random search (60, of MobileNet 8)"),
            arg("--quick", action="store_true", help="few trials and epochs, to see that it works"),
            *BUDGET,
            targets("such as mlp-128 or pointnet (all)"),
        ),
    ),
    Verb(
        "resnet18",
        Bench("resnet18", "curves, and partial fusion", _resnet18, _resnet18_tables),
        "HFTA's experiments with ResNet-18: curves at three rates, and partial fusion",
        "python -m benchmarks resnet18 -o resnet18.json",
        (
            arg("--steps", type=int, default=48, metavar="N", help="of the curves (48; 0: none)"),
            arg("--precision", choices=["float32", "float64"], default="float64", help="of the curves (float64)"),
            arg(
                "--rounds",
                type=int,
                default=5,
                metavar="N",
                help="steps with each number of separate blocks (5; 0: none)",
            ),
            output("the result, as JSON"),
        ),
    ),
    Verb(
        "tune-simulated",
        Bench("tune-simulated", "steps, and searches simulated with them", _simulated, _simulated_tables),
        "searches of HFHT's settings, simulated with measured times of steps",
        "OMP_NUM_THREADS=1 python -m benchmarks tune-simulated -o tune-simulated.json",
        (
            arg("--models", type=count, metavar="B", help="measure a step of this number (1, 4, 16, 32)", **SEVERAL),
            arg("--searches", type=count, default=20, metavar="N", help="simulated ones of each setting (20)"),
            output("the result, as JSON"),
            targets("of the fuse bench, such as mlp-128 (mlp-32 and pointnet-tuned)"),
        ),
    ),
    Verb(
        "tune-short",
        Bench("tune-short", "short searches, by every executor", _short, _short_tables),
        "short searches of a small MLP, in turns with one trial at a time: CPU time",
        "OMP_NUM_THREADS=1 python -m benchmarks tune-short --trials 12",
        (
            arg("--trials", type=count, default=48, metavar="N", help="of each search (48)"),
            arg("--repeats", type=count, default=5, metavar="N", help="searches by each executor (5)"),
            output("the result, as JSON"),
        ),
    ),
)
