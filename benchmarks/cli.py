"""The command line: ``python -m benchmarks NAME ...``, one name for each bench."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import (
    commands,
    fuse_commands,
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
    _add_backend(names)
    _add_strangers(names)
    _add_manycore(names)
    fuse_commands.add_fuse(names)
    _add_critical_path(names)
    transfer_commands.add_transfers(names)
    loading_commands.add_loading(names)
    partition_commands.add_partition(names)
    search_commands.add_tune(names)
    search_commands.add_tune_short(names)
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


def _add_backend(names: Verbs) -> None:
    backend = add_verb(
        names,
        "backend",
        schedule_commands.backend_bench,
        "torch.compile with this backend, with Inductor, and whole steps, over eager",
        "python -m benchmarks backend mlp gpt2 -o backend.json",
    )
    backend.add_argument("--rounds", type=count, default=12, metavar="N", help="blocks of steps of each contender (12)")
    backend.add_argument("--no-close", action="store_true", help="leave out what is not bitwise, which compiles")
    add_output(backend, "the result, after each target, as JSON")
    backend.add_argument("target", nargs="*", metavar="TARGET", help="only these, such as mlp or gpt2")


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
    concurrency.add_argument("--close", action="store_true", help="leave out what is bitwise (a search on each target)")
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
    commands.add_budget(manycore)


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
    commands.add_budget(critical)


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
