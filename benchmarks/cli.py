"""The command line: ``python -m benchmarks NAME ...``, one name for each bench.

An option has the name of the parameter that it is for, in the ``run`` of the bench's module.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench
from hocket.cli.arguments import Argument, Verb, arg, count, make_parser_of, output, run_command
from hocket.errors import ExecutionError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench of `argv` (the process's own arguments if None), and return the exit status.

    0 done, 1 the work failed, 2 a usage error, 130 interrupted.
    """
    return run_command(make_parser(), argv)


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all benches."""
    return make_parser_of(
        VERBS,
        prog="python -m benchmarks",
        description="Measure Hocket itself, each time against a baseline in the same run.",
        epilog="`python -m benchmarks NAME --help` has an example for each name.\n"
        "Exit status: 0 done, 1 the work failed, 2 a usage error.",
        metavar="NAME",
    )


def _verb(
    name: str,
    summary: str,
    *arguments: Argument,
    module: str = "",
    example: str = "",
    more: str = "",
    spins_briefly: bool = False,
    fails: bool = False,
    **others: Bench,
) -> Verb:
    """A bench as a command, with the words behind its name in the example.

    With `fails`, errors that the result names are raised once it is printed. `others` are by an option the benches that
    run where it is given.
    """
    bench = Bench(name, module or name.replace("-", "_"), spins_briefly)

    def work(args: argparse.Namespace) -> None:
        result = next((other for option, other in others.items() if getattr(args, option)), bench).run(args)
        if fails and result["failed"]:
            raise ExecutionError("; ".join(result["failed"].values()))

    saved = output("the result, after each item, as JSON")
    words = f"python -m benchmarks {name} {example or f'-o {name}.json'}"
    return Verb(name, work, summary, words, (*arguments, saved), more)


def _targets(words: str, metavar: str = "TARGET") -> Argument:
    return arg("targets", nargs="*", metavar=metavar, help=words)


def _several(flag: str, **settings: Any) -> Argument:
    """Make an option that may be given again. The parameter for it is its plural, unless `settings` name another."""
    return arg(flag, **{"dest": f"{flag.strip('-')}s", "action": "append", "default": [], **settings})


def _count(flag: str, words: str, **settings: Any) -> Argument:
    return arg(flag, **{"type": count, "metavar": "N", "help": words, **settings})


def _switch(flag: str, words: str, **settings: Any) -> Argument:
    return arg(flag, **{"action": "store_true", "help": words, **settings})


_BUDGET = _count("--budget-s", "seconds; what they do not suffice for is left out", metavar="S")
_ROUNDS = _count("--rounds", "blocks of steps of each contender, or runs")
_BATCHES = _targets("zoo names, gpt2, or NAME/BATCH (a selection)")

VERBS = (
    _verb(
        "simulate",
        "the simulator against SimPy, on one random plan",
        _count("--ops", "ops in the plan (100000)", dest="num_ops"),
    ),
    _verb("overhead", "what capture, profile and the time between ops cost", _targets("zoo names (a selection)")),
    _verb(
        "promises",
        "the speedup of a verdict, beside that of the 200 steps after it",
        *(_count("--runs", "processes of each kind (20)"), _BATCHES),
    ),
    _verb("compiling", "what compiling a step takes, and eager steps beside it", _BATCHES),
    _verb("memory", "peak memory of a process while a step is searched, and by its plan", _BATCHES),
    _verb(
        "versions",
        "scheduled or fused steps of another version's sources and of these, in turns",
        arg("other", type=Path, metavar="SOURCES", help="the folder that the other package is in"),
        _targets(
            "zoo names, NAME:MODELS of fuse, or search-NAME:TRIALS; own-NAME has own rates, lengths-NAME 40 lengths "
            "of batches"
        ),
        _ROUNDS,
        example="../older/src mlp own-mlp-32:8 -o FILE",
    ),
    _verb(
        "backend",
        "torch.compile with this backend, with Inductor, and whole steps, over eager",
        *(_ROUNDS, _targets("only these, such as mlp or gpt2")),
    ),
    _verb(
        "concurrency",
        "every way of running a step on these cores, side by side",
        _switch("--quick", "only the steps of small ops"),
        _switch("--no-compile", "leave torch.compile out (it takes minutes)", dest="compiled", action="store_false"),
        _switch("--close", "leave out what is bitwise, and rounding", dest="bitwise", action="store_false"),
        *(_ROUNDS, _targets("only these, such as mlp or resnet20/64")),
        example="--quick",
    ),
    _verb(
        "strangers",
        "models of pytorchcv and transformers, in both promises of numerics",
        *(_ROUNDS, _targets("only these (all), such as nin_cifar10 or GPT2LMHeadModel")),
        more="Needs: pip install pytorchcv transformers.",
    ),
    _verb(
        "manycore",
        "the paper's strategies on 16 and 68 cores, simulated, or on this machine's",
        _switch("--quick", "only two of the four networks, nothing assumed anew"),
        _switch("--measured", "run on this machine's own cores, if more than 2"),
        _BUDGET,
        more="Simulated on published curves; docs/concurrency.md says what that assumes.",
    ),
    _verb(
        "critical-path",
        "streams by critical path against layer by layer, on TurboDL's networks",
        _switch("--quick", "fewer networks and batch sizes"),
        arg("--device", choices=("cpu", "cuda", "sim"), default="sim", help="what to run on (sim: a P100)"),
        _BUDGET,
    ),
    _verb(
        "gpu-papers",
        "co-runs, blocks of a kernel, occupancy: rows that need a GPU",
        _BUDGET,
        more="Without a GPU each row says that it is not measured.",
    ),
    _verb(
        "gpu",
        "all benches for a machine with a GPU, into one file",
        arg("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (cuda)"),
        _BUDGET,
        more="With --device cpu the same in small, to see that it works.",
        fails=True,
    ),
    _verb(
        "fuse",
        "training B models at once, against one after another",
        arg("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)"),
        _several("--models", type=count, metavar="B", help="models (1, 2, 4, 8)", dest="sizes"),
        _several("--contender", metavar="NAME", help="serial and this one only (all but close)"),
        _count("--steps", "steps of each contender, at least (7)"),
        _several("--precision", choices=("float32", "bfloat16", "float16"), help="also several (float32)"),
        arg("--optimizer", choices=("sgd", "adam"), default="sgd", help="what updates (sgd, with momentum)"),
        _switch("--own-rates", "a rate and a weight decay for each model"),
        _switch("--no-memory", "leave the measurement of memory out", dest="memory", action="store_false"),
        *(_BUDGET, _targets("such as mlp-128 or pointnet-cls (a selection)")),
        spins_briefly=True,
    ),
    _verb(
        "tune",
        "whole hyper-parameter searches: serial, in processes, fused, auto, scheduled",
        _several("--contender", metavar="NAME", help="serial and this one only (all)"),
        _switch("--quick", "few trials and epochs, to see that it works"),
        _targets("such as mlp-128 or pointnet (all)"),
        spins_briefly=True,
    ),
    _verb(
        "resnet18",
        "HFTA's experiments with ResNet-18: curves at three rates, and partial fusion",
        _count("--steps", "of the curves (24; 0: none)", type=int),
        _count("--rounds", "steps with each number of separate blocks (20; 0: none)", type=int),
        module="fuse.resnet18",
        spins_briefly=True,
    ),
    _verb(
        "tune-simulated",
        "searches of HFHT's settings, simulated with measured times of steps",
        _targets("of the fuse bench, such as mlp-128 (mlp-32 and pointnet-tuned)"),
        module="tune.simulated",
        more="With OMP_NUM_THREADS=1.",
    ),
    _verb(
        "tune-short",
        "short searches of a small MLP, in turns with one trial at a time: CPU time",
        *(_count("--trials", "of each search (48)"), _ROUNDS),
        module="tune.short",
        more="With OMP_NUM_THREADS=1.",
    ),
    _verb(
        "transfers",
        "orders of received parameters: simulated, to 1,024 workers; or measured",
        _count("--workers", "workers of the cluster (1024)"),
        _several("--mbit", type=count, metavar="N", help="measured: two ranks, a link of this rate; needs root"),
        _several("--order", metavar="ORDER", help="measured: only this one; may be given again"),
        _count("--rounds", "turns of each order, measured (2)"),
        _count("--steps", "steps of a turn, at the most (10)"),
        _switch("--agents", "measured: forwards that pull in every call"),
        _switch("--paced", "many workers that sleep to compute, over real links; needs root"),
        _switch("--urgent", "a small value behind a large one, over a link; needs root"),
        _count("--seconds", "about how long to measure (paced: 240)", type=float, metavar="S"),
        _targets("zoo models (those of TicTac)", "MODEL"),
        urgent=Bench("transfers-urgent", "urgent"),
        paced=Bench("transfers-paced", "paced"),
        agents=Bench("transfers-agents", "transfers_real", spins_briefly=True),
        mbits=Bench("transfers-real", "transfers_real", spins_briefly=True),
    ),
    _verb(
        "loading",
        "from a file to the first output: load then run, and streamed in several orders",
        *(_ROUNDS, _targets("resnet50, bert-base, bert-tiny (all)", "MODEL")),
        spins_briefly=True,
    ),
    _verb(
        "partition",
        "parts of a step against METIS, Mt-KaHyPar, dynamic programming and HEFT",
        _switch("--paced", "pipelines of GPT-2, Llama, ResNet-18 and a U-Net that sleep"),
        _switch("--hog", "two ranks, one beside a program that takes its core; ops move"),
        _targets("workloads and zoo models (16 of them)", "GRAPH"),
        paced=Bench("partition-paced", "partition.paced"),
        hog=Bench("partition-hog", "partition.hog"),
    ),
)
