"""The benches of transfers, loading and partitions: their arguments, and their tables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.bench import SEVERAL, Bench, Save, ratios, targets
from hocket.cli.arguments import Verb, arg, count, output
from hocket.cli.console import UsageError, table
from hocket.cli.targets import wait_policy
from hocket.reporting.words import duration_text, quantity_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["VERBS"]


# ------------------------------------------------------------------------------------------------------------ transfers


def transfers_bench(args: Namespace) -> None:
    """Simulate orders of received parameters, or measure them if rates of a link are given."""
    wanted = {"urgent": args.urgent, "paced": args.paced, "agents": args.mbit and args.agents, "real": args.mbit}
    TRANSFERS[next((name for name, is_wanted in wanted.items() if is_wanted), "simulated")](args)


def _simulated(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.transfers import NAMES, run

    if not args.ratio > 0:
        raise UsageError(f"--ratio: expected a number above 0, got {args.ratio:g}")
    return run(tuple(args.target) or NAMES, ratio=args.ratio, workers=args.workers, seed=args.seed, save=save)


def _simulated_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    from benchmarks.transfers import ORDERS

    rows = []
    for row in result["models"]:
        best_us = row["orders"]["auto"]["step_us"]
        rates = [f"{row['orders'][order]['step_us'] / best_us:.3f}" for order in ORDERS]
        stragglers = [f"{row['cluster'][order]['straggler_share']:.0%}" for order in ("tac", "random")]
        size = (str(row["recvs"]), f"{row['tac_ms']:.0f}", f"{row['potential']:.2f}")
        figures = (row["model"], f"{row['batch_factor']:g}", *size)
        rows.append((*figures, *rates, *stragglers))
    columns = ("model", "batch", "recvs", "TAC ms", "potential", *ORDERS, "stragglers", "random")
    yield table(f"step time over auto's, simulated; {args.workers} workers", columns, rows)


def _real(args: Namespace, save: Save) -> dict[str, Any]:
    if args.agents:
        from benchmarks.transfers_agents import ORDERS, run
    else:
        from benchmarks.transfers_real import ORDERS, run
    if unknown := set(args.order) - set(ORDERS):
        raise UsageError(f"--order: expected one of {', '.join(ORDERS)}, got {unknown.pop()!r}")
    if args.order and "layer" not in args.order:
        raise UsageError("--order: layer has to be among them, which all others are compared with")
    return run(
        tuple(args.target) or ("alexnet", "vgg16", "inception-v3"),
        mbits=args.mbit,
        orders=args.order or ORDERS,
        rounds=args.rounds,
        steps=args.steps,
        batch_size=args.batch_size,
        seconds=args.seconds,
        save=save,
    )


def _real_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (
            *(row["model"], str(row["mbit_per_s"]), order, f"{found['step_us'] / 1e3:.1f}"),
            f"{found['step_us'] / row['orders']['layer']['step_us']:.3f}",
            f"{found['predicted_us'] / 1e3:.1f}",
            *ratios(found, ("potential", "efficiency_predicted", "efficiency_measured")),
            f"{found['steps_in_order']} of {found['steps']}",
        )
        for row in result["rows"]
        for order, found in row["orders"].items()
    ]
    time = "call ms" if args.agents else "step ms"
    columns = ("model", "Mbit/s", "order", time, "of layer's", "predicted", "S", "E predicted", "E", "in order")
    yield table("one worker, one server, a link between them", columns, rows)


def _paced(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.paced import run

    if len(args.target) > 1:
        raise UsageError(f"--paced: expected one model, got {', '.join(args.target)}")
    return run(args.target[0] if args.target else "googlenet", seconds=args.seconds or 240.0, save=save)


def _paced_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (
            *(str(row[each]) for each in ("workers", "servers", "steps")),
            f"{row['r2_of_efficiency']:.3f}",
            *(f"{row['planned'][each] / 1e3:.0f}" for each in ("step_us", "predicted_us")),
            f"{row['throughput']:.3f}",
            *(f"{row[each]['normalised_p95']:.3f}" for each in ("planned", "random")),
            *(f"{row[each]['straggler_share']:.1%}" for each in ("planned", "random")),
        )
        for row in result["rows"]
    ]
    times = ("step ms", "predicted", "over random", "p95", "random", "waiting", "random")
    yield table(f"{result['model']}, {result['paced']}", ("W", "S", "steps", "R^2 of E", *times), rows)


def _urgent(args: Namespace, _: Save) -> dict[str, Any]:
    from benchmarks.urgent import run

    return {"rows": [run(mbit, args.rounds) for mbit in args.mbit or [200]]}


def _urgent_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (
            *(str(found["mbit_per_s"]), way),
            *(f"{found[way][each]:.1f}" for each in ("delay_ms", "longest_delay_ms", "mbit_per_s")),
        )
        for found in result["rows"]
        for way in ("wire", "gloo")
    ]
    columns = ("Mbit/s", "way", "delay ms, median", "longest", "Mbit/s of the large one")
    yield table("1 KiB that becomes urgent behind 16 MiB", columns, rows)


TRANSFERS = {
    "simulated": Bench("transfers", "every order on each model", _simulated, _simulated_tables),
    "real": Bench("transfers-real", "every order on each model, over real links", _real, _real_tables),
    "agents": Bench("transfers-agents", "every order on each model, over real links", _real, _real_tables),
    "paced": Bench("transfers-paced", "paced workers, over real links", _paced, _paced_tables),
    "urgent": Bench("transfers-urgent", "a small value behind a large one", _urgent, _urgent_tables),
}


# -------------------------------------------------------------------------------------------------------------- loading


def _loading(args: Namespace, save: Save) -> dict[str, Any]:
    policy = wait_policy()
    from benchmarks.loading import GBIT_BYTES_PER_S, NAMES, run
    from benchmarks.loading.networks import NETWORKS

    for name in args.target:
        if name not in NETWORKS:
            raise UsageError(f"{name}: expected one of {', '.join(NETWORKS)}")
    if not args.gbit > 0:
        raise UsageError(f"--gbit: expected a number above 0, got {args.gbit:g}")
    result = run(
        tuple(args.target) or NAMES,
        bytes_per_s=args.gbit * GBIT_BYTES_PER_S,
        rounds=args.rounds,
        batch_size=args.batch_size,
        save=save,
    )
    result["wait_policy"] = policy
    return result


def _loading_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    from benchmarks.loading import CONTENDERS

    rows, warm = [], []
    for name, found in result["models"].items():
        figures = [f"{found['bytes'] / 2**20:.0f}", *ratios(found, ("read_s", "forward_s"))]
        over = ratios(found["over_load_then_run"], CONTENDERS[1:])
        same = all(row["same_bits"] for row in found["over_link"].values())
        rows.append((name, *figures, *over, f"{found['first_use_over_file_order']:.2f}", "yes" if same else "NO"))
        disk = found["warm_disk"]
        warm.append((name, *(f"{disk[until]['over_load_file']:.2f}" for until in ("ready", "output"))))
    columns = ("model", "MiB", "read s", "forward s", *CONTENDERS[1:], "first use over file order", "same bits")
    title = f"first output over load-then-run, {args.gbit:g} Gbit/s, {result['threads']} threads"
    yield table(title, [column.replace("_", " ") for column in columns], rows)
    yield table("warm disk, over load_file and load_state_dict", ("model", "all there", "first output"), warm)


# ------------------------------------------------------------------------------------------------------------ partition


def partition_bench(args: Namespace) -> None:
    """Compare partitions by every objective with those of other partitioners, or measure paced or hogged ranks."""
    PARTITIONS["paced" if args.paced else "hog" if args.hog else "cut"](args)


def _cut(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.partition import run

    return run(tuple(args.target), parts=tuple(args.parts) or (2, 4, 8), budget_s=args.search_s, save=save)


def _cut_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    def moved(found: dict[str, Any]) -> str:
        mark = "" if found.get("balanced", True) else "*"
        return "none" if found["bytes"] is None else quantity_text(found["bytes"], "B") + mark

    rows = [
        (
            *(row["graph"], str(row["parts"])),
            *(moved(row[label]) for label in ("metis", "mtkahypar", "hocket", "alone", "acyclic")),
            *(f"{row[label] / row['one_device_us']:.2f}" for label in ("time_us", "heft_us")),
        )
        for row in result["cut"]
    ]
    columns = ("graph", "parts", "metis", "mt-kahypar", "hocket", "alone", "acyclic", "time", "heft")
    yield table("bytes moved (* beyond the balance); time over one device's", columns, rows)
    loads = [
        (name, f"{row['hocket']:.4f}", f"{row['intervals'] or float('nan'):.4f}", f"{row['published']:.4f}")
        for name, row in result["load"].items()
    ]
    yield table("largest load", ("workload", "hocket", "intervals", "published"), loads)
    yield from (f"{label}: {found}" for label, found in result["summary"].items())


def _pipelines(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.partition.paced import run

    return run(tuple(args.target), ranks=tuple(args.parts) or (2, 3, 4), save=save)


def _pipelines_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    rows = [
        (
            *(row["model"], str(row["ranks"])),
            *(duration_text(row[way]["step_us"]) for way in ("equal_layers", "hocket")),
            *ratios(row, ("to_equal_layers", "predicted_over_measured")),
        )
        for row in result["rows"]
    ]
    columns = ("model", "ranks", "equal layers", "hocket", "ratio", "predicted over measured")
    yield table(f"paced: {result['paced']}", columns, rows)
    yield str(result["summary"])


def _hog(_: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.partition.hog import run

    return run(save=save)


def _hog_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    found = result["summary"]
    rows = [
        (label, duration_text(found[f"{label}_us"]), f"{found[f'{label}_us'] / found['idle_us']:.2f}")
        for label in ("idle", "hogged", "recovered")
    ]
    yield table(f"a hog on the core of rank 1: {result['model']}", ("steps", "median", "to idle"), rows)
    moved = [found[f"units_moved_{when}"] for when in ("before_the_hog", "in_20_steps", "later")]
    yield (
        f"won back: {found['won_back']:.2f}; units moved before the hog {moved[0]}, in 20 steps {moved[1]}, "
        f"in the {found['steps_later']} after {moved[2]}"
    )
    yield from (each["text"] for each in result["moving"]["migrations"])


PARTITIONS = {
    "cut": Bench("partition", "every objective on each graph", _cut, _cut_tables),
    "paced": Bench("partition-paced", "paced pipelines, split in two ways, in turns", _pipelines, _pipelines_tables),
    "hog": Bench("partition-hog", "a job beside a hog, without moves, then with them", _hog, _hog_tables),
}


VERBS = (
    Verb(
        "transfers",
        transfers_bench,
        "orders of received parameters: simulated, to 1,024 workers; or measured",
        "python -m benchmarks transfers --workers 1024 resnet152",
        (
            arg("--workers", type=count, default=1024, metavar="N", help="workers of the cluster (1024)"),
            arg("--ratio", type=float, default=1.0, metavar="R", help="communication over computation (1)"),
            arg("--seed", type=int, default=0, metavar="N", help="draws other random orders (0)"),
            arg(
                "--mbit",
                type=count,
                metavar="N",
                help="measured: a worker and a server, over a link of this rate; may be given again; needs root",
                **SEVERAL,
            ),
            arg("--order", metavar="ORDER", help="measured: only this one; may be given again", **SEVERAL),
            arg("--rounds", type=count, default=2, metavar="N", help="turns of each order, measured (2)"),
            arg("--steps", type=count, default=10, metavar="N", help="steps of a turn, at the most (10)"),
            arg(
                "--batch-size", type=count, metavar="N", help="of the measured models (computes as long as it receives)"
            ),
            arg("--agents", action="store_true", help="with --mbit: forwards that pull in every call"),
            arg("--paced", action="store_true", help="many workers that sleep to compute, over real links; needs root"),
            arg("--urgent", action="store_true", help="a small value behind a large one, over a link; needs root"),
            arg("--seconds", type=float, metavar="S", help="about how long to measure (paced: 240)"),
            output("the result, after each model, as JSON"),
            targets("zoo models (those of TicTac)", "MODEL"),
        ),
    ),
    Verb(
        "loading",
        Bench("loading", "every contender in turn, on each model", _loading, _loading_tables),
        "from a file to the first output: load then run, and streamed in several orders",
        "python -m benchmarks loading resnet50 --rounds 3 -o loading.json",
        (
            arg("--gbit", type=float, default=1.0, metavar="R", help="rate of the link in Gbit/s (1)"),
            arg("--rounds", type=count, default=5, metavar="N", help="runs of each contender (5)"),
            arg("--batch-size", type=count, metavar="N", help="of the forward (as long as reading takes)"),
            output("the result, after each model, as JSON"),
            targets("resnet50, vgg16, bert-base, gpt2, inception-v3 (the first four)", "MODEL"),
        ),
    ),
    Verb(
        "partition",
        partition_bench,
        "parts of a step against METIS, Mt-KaHyPar, dynamic programming and HEFT",
        "python -m benchmarks partition resnet20 --parts 4 -o partition.json",
        (
            arg("--parts", type=count, metavar="K", help="devices (2, 4, 8; paced 2, 3, 4)", **SEVERAL),
            arg("--paced", action="store_true", help="pipelines of GPT-2, Llama, ResNet-18 and a U-Net that sleep"),
            arg("--hog", action="store_true", help="two ranks, one beside a program that takes its core; ops move"),
            arg("--search-s", type=float, default=5.0, metavar="S", help="seconds of each search (5)"),
            output("the result, after each graph, as JSON"),
            targets("workloads and zoo models (16 of them)", "GRAPH"),
        ),
    ),
)
