"""The command line: ``python -m benchmarks NAME ...``, one name for each bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    commands,
    loading_commands,
    partition_commands,
    schedule_commands,
    search_commands,
    transfer_commands,
)
from hocket.cli.arguments import Parser, Verbs, add_output, add_verb, count, run_command

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of `argv`, of the process's own arguments if None; returns the exit status.

    0 done, 1 the work failed, 2 a usage error, 130 interrupted.
    """
    return run_command(make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all benches; the function that runs one is the ``work`` of what it returns."""
    parser = Parser(
        prog="python -m benchmarks",
        description="Measure Hocket itself, each time against a baseline in the same run.",
        epilog="`python -m benchmarks NAME --help` has an example for each name.\n"
        "Exit status: 0 done, 1 the work failed, 2 a usage error.",
    )
    names = parser.add_subparsers(metavar="NAME", title="benches", dest="bench")
    _add_simulate(names)
    _add_overhead(names)
    _add_guards(names)
    _add_decision(names)
    _add_compiling(names)
    _add_memory(names)
    _add_call(names)
    _add_versions(names)
    _add_concurrency(names)
    _add_strangers(names)
    _add_manycore(names)
    _add_fuse(names)
    _add_critical_path(names)
    _add_transfers(names)
    _add_loading(names)
    _add_partition(names)
    _add_tune(names)
    _add_gpu(names)
    return parser


def _add_simulate(names: Verbs) -> None:
    simulate = add_verb(
        names,
        "simulate",
        commands.simulate_bench,
        "the simulator against SimPy, on one random plan",
        "python -m benchmarks simulate --ops 10000",
    )
    simulate.add_argument("--ops", type=count, default=100_000, metavar="N", help="ops in the plan (100000)")
    simulate.add_argument("--lanes", type=count, default=8, metavar="N", help="lanes in the plan (8)")
    simulate.add_argument("--repeats", type=count, default=5, metavar="N", help="rounds (5)")
    simulate.add_argument("--seed", type=int, default=0, metavar="N", help="draws another plan (0)")


def _add_overhead(names: Verbs) -> None:
    overhead = add_verb(
        names,
        "overhead",
        commands.overhead_bench,
        "what capture, profile and the time between ops cost",
        "python -m benchmarks overhead mlp resnet20",
    )
    overhead.add_argument("target", nargs="*", metavar="TARGET", help="zoo names (a selection)")


def _add_guards(names: Verbs) -> None:
    guards = add_verb(
        names,
        "guards",
        schedule_commands.guards_bench,
        "what guards, watching and audits cost on zoo steps",
        "python -m benchmarks guards mlp digits-cnn -o guards.json",
    )
    add_output(guards, "the result, after each target, as JSON")
    guards.add_argument("target", nargs="*", metavar="TARGET", help="zoo names (all of them)")


def _add_decision(names: Verbs) -> None:
    decision = add_verb(
        names,
        "decision",
        schedule_commands.decision_bench,
        "calls and seconds until a schedule has decided",
        "python -m benchmarks decision mlp digits-cnn -o decision.json",
    )
    add_output(decision, "the result, after each target, as JSON")
    decision.add_argument("target", nargs="*", metavar="TARGET", help="zoo names (all of them)")


def _add_compiling(names: Verbs) -> None:
    compiling = add_verb(
        names,
        "compiling",
        schedule_commands.compiling_bench,
        "what compiling a step takes, and eager steps beside it",
        "python -m benchmarks compiling mlp densenet40/32 -o compiling.json",
    )
    add_output(compiling, "the result, after each target, as JSON")
    compiling.add_argument("target", nargs="*", metavar="TARGET", help="zoo names, or NAME/BATCH (a selection)")


def _add_memory(names: Verbs) -> None:
    memory = add_verb(
        names,
        "memory",
        schedule_commands.memory_bench,
        "what a process holds at most while a step is searched, and by its plan",
        "python -m benchmarks memory mlp resnet20/64 -o memory.json",
    )
    memory.add_argument("--numerics", choices=("bitwise", "close"), default="close", help="of the schedule (close)")
    memory.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave the search with compiled forms out"
    )
    add_output(memory, "the result, after each target, as JSON")
    memory.add_argument("target", nargs="*", metavar="TARGET", help="zoo names, gpt2, or NAME/BATCH (a selection)")


def _add_call(names: Verbs) -> None:
    call = add_verb(
        names,
        "call",
        schedule_commands.call_bench,
        "what a call of a schedule takes beyond the ops of its plan",
        "python -m benchmarks call mlp gpt2 gpt2-tiny -o call.json",
    )
    call.add_argument("--rounds", type=count, default=300, metavar="N", help="calls that are timed (300)")
    add_output(call, "the result, after each target, as JSON")
    call.add_argument("target", nargs="*", metavar="TARGET", help="zoo names, gpt2, or with -tiny (a selection)")


def _add_versions(names: Verbs) -> None:
    versions = add_verb(
        names,
        "versions",
        schedule_commands.versions_bench,
        "scheduled or fused steps of another version's sources and of these, in turns",
        "python -m benchmarks versions ../older/src mlp lenet mlp-32:8 -o versions.json",
    )
    versions.add_argument("sources", type=Path, metavar="SOURCES", help="the folder that the other package is in")
    versions.add_argument(
        "target",
        nargs="*",
        default=["mlp", "lenet", "digits-cnn"],
        metavar="TARGET",
        help="zoo names, or NAME:MODELS of fuse",
    )
    versions.add_argument("--rounds", type=count, default=10, metavar="N", help="blocks of steps of each kind (10)")
    add_output(versions, "the result as JSON")


def _add_concurrency(names: Verbs) -> None:
    concurrency = add_verb(
        names,
        "concurrency",
        commands.concurrency_bench,
        "every way of running a step on these cores, side by side",
        "python -m benchmarks concurrency --quick",
    )
    concurrency.add_argument("--quick", action="store_true", help="only the steps of small ops")
    concurrency.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes minutes)")
    concurrency.add_argument(
        "--no-plans", action="store_true", help="only what a user would choose from, no single plans"
    )
    concurrency.add_argument("--rounds", type=count, metavar="N", help="blocks of steps of each contender")
    concurrency.add_argument("--report", metavar="DIR", help="draw how many ops run side by side, one picture a step")
    add_output(concurrency, "the result, after each target, as JSON")
    concurrency.add_argument("target", nargs="*", metavar="TARGET", help="only these, such as mlp or resnet20/64")


def _add_strangers(names: Verbs) -> None:
    strangers = add_verb(
        names,
        "strangers",
        schedule_commands.strangers_bench,
        "models of pytorchcv and transformers, in both promises of numerics",
        "python -m benchmarks strangers nin_cifar10 GPT2LMHeadModel",
        "Needs: pip install pytorchcv transformers.",
    )
    strangers.add_argument("--compile", action="store_true", help="measure torch.compile too (it takes minutes)")
    strangers.add_argument("--rounds", type=count, default=8, metavar="N", help="blocks of steps of each contender (8)")
    add_output(strangers, "the result, after each target, as JSON")
    strangers.add_argument("target", nargs="*", metavar="TARGET", help="only these (all)")


def _add_manycore(names: Verbs) -> None:
    manycore = add_verb(
        names,
        "manycore",
        commands.manycore_bench,
        "the paper's strategies on 16 and 68 cores, simulated, or on this machine's",
        "python -m benchmarks manycore --quick",
        "Simulated on published curves; docs/concurrency.md says what that assumes.",
    )
    manycore.add_argument("--quick", action="store_true", help="only two of the four networks, nothing assumed anew")
    manycore.add_argument("--measured", action="store_true", help="run on this machine's own cores, if more than 2")
    _add_budget(manycore)


def _add_fuse(names: Verbs) -> None:
    fuse = add_verb(
        names,
        "fuse",
        commands.fuse_bench,
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
    _add_budget(fuse)
    fuse.add_argument("target", nargs="*", metavar="TARGET", help="such as mlp-128 or pointnet-cls (a selection)")


def _add_critical_path(names: Verbs) -> None:
    critical = add_verb(
        names,
        "critical-path",
        commands.critical_path_bench,
        "streams by critical path against layer by layer, on TurboDL's networks",
        "python -m benchmarks critical-path --quick --device sim",
    )
    critical.add_argument("--quick", action="store_true", help="fewer networks and batch sizes")
    critical.add_argument("--device", choices=("cpu", "cuda", "sim"), default="sim", help="what to run on (sim)")
    critical.add_argument("--machine", default="p100", metavar="NAME", help="the GPU to simulate (p100)")
    _add_budget(critical)


def _add_transfers(names: Verbs) -> None:
    transfers = add_verb(
        names,
        "transfers",
        transfer_commands.transfers_bench,
        "orders of received parameters: simulated, to 1,024 workers; or measured",
        "python -m benchmarks transfers --workers 1024 resnet152",
    )
    transfers.add_argument("--workers", type=count, default=1024, metavar="N", help="workers of the cluster (1024)")
    transfers.add_argument("--ratio", type=float, default=1.0, metavar="R", help="communication over computation (1)")
    transfers.add_argument("--seed", type=int, default=0, metavar="N", help="draws other random orders (0)")
    transfers.add_argument(
        "--mbit",
        type=count,
        action="append",
        default=[],
        metavar="N",
        help="measured instead: a worker and a server, over a link of so many Mbit/s; may be given again; needs root",
    )
    transfers.add_argument(
        "--order", action="append", default=[], metavar="ORDER", help="measured: only this one; may be given again"
    )
    transfers.add_argument("--rounds", type=count, default=2, metavar="N", help="turns of each order, measured (2)")
    transfers.add_argument("--steps", type=count, default=10, metavar="N", help="steps of a turn, at the most (10)")
    transfers.add_argument(
        "--batch-size", type=count, metavar="N", help="of the measured models (what takes as long as receiving)"
    )
    transfers.add_argument("--agents", action="store_true", help="with --mbit: forwards that pull in every call")
    transfers.add_argument(
        "--paced", action="store_true", help="many workers whose computing is slept, over real links; needs root"
    )
    transfers.add_argument(
        "--urgent", action="store_true", help="a small value behind a large one, over a link; needs root"
    )
    transfers.add_argument("--seconds", type=float, metavar="S", help="about how long to measure (paced: 240)")
    add_output(transfers, "the result, after each model, as JSON")
    transfers.add_argument("target", nargs="*", metavar="MODEL", help="zoo models (those of TicTac that the zoo has)")


def _add_loading(names: Verbs) -> None:
    loading = add_verb(
        names,
        "loading",
        loading_commands.loading_bench,
        "from a file to the first output: load then run, and streamed in several orders",
        "python -m benchmarks loading resnet50 --rounds 3 -o loading.json",
    )
    loading.add_argument("--gbit", type=float, default=1.0, metavar="R", help="rate of the link in Gbit/s (1)")
    loading.add_argument("--rounds", type=count, default=5, metavar="N", help="runs of each contender (5)")
    loading.add_argument("--batch-size", type=count, metavar="N", help="of the forward (as long as reading takes)")
    add_output(loading, "the result, after each model, as JSON")
    loading.add_argument(
        "target", nargs="*", metavar="MODEL", help="resnet50, vgg16, bert-base, gpt2, inception-v3 (the first four)"
    )


def _add_partition(names: Verbs) -> None:
    partition = add_verb(
        names,
        "partition",
        partition_commands.partition_bench,
        "parts of a step against METIS, Mt-KaHyPar, dynamic programming and HEFT",
        "python -m benchmarks partition Layer-gnmt_training resnet20 --parts 4 -o partition.json",
    )
    partition.add_argument(
        "--parts", type=count, action="append", default=[], metavar="K", help="devices (2, 4, 8; paced 2, 3, 4)"
    )
    partition.add_argument(
        "--paced", action="store_true", help="pipelines of GPT-2, Llama, ResNet-18 and a U-Net, computing slept"
    )
    partition.add_argument(
        "--hog", action="store_true", help="two ranks, one of them beside a program that takes its core; ops move"
    )
    partition.add_argument("--search-s", type=float, default=5.0, metavar="S", help="seconds of each search (5)")
    add_output(partition, "the result, after each graph, as JSON")
    partition.add_argument("target", nargs="*", metavar="GRAPH", help="workloads and zoo models (16 of them)")


def _add_tune(names: Verbs) -> None:
    tune = add_verb(
        names,
        "tune",
        search_commands.tune_bench,
        "whole searches for hyper-parameters: serial, in processes, fused, auto, fused and scheduled",
        "python -m benchmarks tune mlp-32 --algorithm random -o tune.json",
    )
    tune.add_argument("--contender", action="append", default=[], metavar="NAME", help="serial and this one only (all)")
    tune.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME",
        help="random or hyperband only (what the target has)",
    )
    tune.add_argument("--trials", type=count, metavar="N", help="trials of random search (60, of MobileNet 8)")
    tune.add_argument("--quick", action="store_true", help="few trials and epochs, to see that it works")
    _add_budget(tune)
    tune.add_argument("target", nargs="*", metavar="TARGET", help="such as mlp-128 or pointnet (all)")


def _add_gpu(names: Verbs) -> None:
    gpu = add_verb(
        names,
        "gpu",
        commands.gpu_bench,
        "all that is to be measured on a machine with a GPU, into one file",
        "python -m benchmarks gpu --budget-s 360 -o gpu.json",
        "With --device cpu the same in small, to see that it works.",
    )
    gpu.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (cuda)")
    gpu.add_argument("--budget-s", type=count, default=360, metavar="S", help="seconds for all of it (360)")
    add_output(gpu, "all results")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget-s", type=count, metavar="S", help="seconds; what they do not suffice for is left out")
    add_output(parser, "the result, after each item, as JSON")
