"""The bench of fused models, as a command: run it, then print its tables or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.commands import add_budget, write_so_far
from hocket.cli.arguments import Verbs, add_verb, count
from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.cli.steps import wait_policy

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["add_fuse", "fuse_bench"]


def add_fuse(names: Verbs) -> None:
    """The parser of the bench of fused models."""
    fuse = add_verb(
        names,
        "fuse",
        fuse_bench,
        "training B models at once, against one after another",
        "python -m benchmarks fuse mlp-32 --device cpu --models 8 --models 64",
    )
    fuse.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)")
    fuse.add_argument("--models", type=count, action="append", default=[], metavar="B", help="models (1, 2, 4, 8)")
    fuse.add_argument(
        "--contender", action="append", default=[], metavar="NAME", help="serial and this one only (all but close)"
    )
    fuse.add_argument("--steps", type=count, default=7, metavar="N", help="steps of each contender, at least (7)")
    precisions = ("float32", "bfloat16", "float16")
    fuse.add_argument(
        "--precision", choices=precisions, action="append", default=[], help="also several (float32); others: autocast"
    )
    fuse.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd", help="what updates (sgd, with momentum)")
    fuse.add_argument("--own-rates", action="store_true", help="each model has a rate and a weight decay of its own")
    fuse.add_argument("--own-batches", action="store_true", help="each model has a batch of its own")
    fuse.add_argument("--partial", action="append", default=[], metavar="TARGET", help="fuse it block by block, too")
    fuse.add_argument("--no-memory", action="store_true", help="leave the measurement of memory out")
    add_budget(fuse)
    fuse.add_argument("target", nargs="*", metavar="TARGET", help="such as mlp-128 or pointnet-cls (a selection)")


def fuse_bench(args: Namespace) -> None:
    """Training B models at once, every way there is."""
    policy = wait_policy()
    from benchmarks.fuse import CONTENDERS, Training, run
    from benchmarks.fuse.partial import partial as partly

    sizes, precisions = tuple(args.models) or (1, 2, 4, 8), tuple(args.precision) or ("float32",)
    target = output_file(args.output)
    with Bar("every way of training B models in turn"):
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
            save=partial(write_so_far, target, "fuse", complete=False),
        )
        if args.partial:
            result["partial"] = {
                name: partly(
                    name, device=args.device, size=max(sizes), steps=args.steps, training=Training(precisions[0])
                )
                for name in args.partial
            }
    result["wait_policy"] = policy
    write_so_far(target, "fuse", result)
    if args.format == "json":
        print_json({"bench": "fuse", **result})
        return
    where = f"{result['device']} ({result['machine']}), torch {result['torch']}"
    tables: list[Any] = [_fused_table(f"training B models, {where}: speedup over serial", result["targets"])]
    tables += [_fused_table(f"the same in {each}", result[f"targets_{each}"]) for each in precisions[1:]]
    for name, rows in result.get("partial", {}).items():
        shown = [(str(row["fused"]), f"{row['to_serial']:.2f}", ", ".join(row["separate"])) for row in rows]
        title = f"{name}, {max(sizes)} models, fused block by block: speedup over serial"
        tables.append(table(title, ("fused blocks", "speedup", "separate"), shown))
    for target, found in result["crossover"].items():
        pays = [f"{name} {_range(size)}" for name, size in found.items()]
        tables.append(f"no slower than serial: {target}: {', '.join(pays)}")
    print_tables(*tables, *(f"left out: {why}" for why in result["left_out"].values()))


def _range(found: dict[str, int | None]) -> str:
    if found["pays_from"] is None:
        return "nowhere"
    return f"from B = {found['pays_from']}" + (f", not at {found['stops_at']}" if found["stops_at"] else "")


def _fused_table(title: str, targets: dict[str, Any]) -> Table:
    """A row for each target and B."""
    from benchmarks.fuse import CONTENDERS

    everybody = {name for by_size in targets.values() for found in by_size.values() for name in found}
    names = [name for name in CONTENDERS[1:] if name in everybody]
    rows = []
    for target, by_size in targets.items():
        for size, found in by_size.items():
            ratios = [_ratio(found[name]) if name in found else "-" for name in names]
            grown = [
                f"{found[name]['memory_bytes'] / 2**20:,.0f}" if "memory_bytes" in found.get(name, {}) else "-"
                for name in ("serial", "auto")
            ]
            to_singles = found.get("auto", {}).get("memory_to_singles")
            share = "-" if to_singles is None else f"{to_singles:.2f}"
            first = f"{found['auto']['first_steps']:.0f}" if "auto" in found else "-"
            rows.append((target, size, f"{found['serial']['models_per_s']:,.1f}", *ratios, first, *grown, share))
    memory = ("serial MiB", "auto MiB", "auto to singles")
    columns = ("target", "B", "serial, models/s", *names, "auto's first, steps", *memory)
    return table(f"{title} (over its own B = 1)", columns, rows)


def _ratio(row: dict[str, Any]) -> str:
    own = f" ({row['to_own_one']:.2f})" if "to_own_one" in row else ""
    return f"{row['to_serial']:.2f}{own}"
