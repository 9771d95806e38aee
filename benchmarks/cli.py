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
    bench: Bench, summary: str, example: str, *arguments: Argument, more: str = "", fails: bool = False, **others: Bench
) -> Verb:
    """A bench as a command whose example is `example` behind its name.

    With `fails`, errors that the result names are raised once it is printed. `others` are by an option the benches that
    run where it is given.
    """

    def work(args: argparse.Namespace) -> None:
        result = next((other for option, other in others.items() if getattr(args, option)), bench).run(args)
        if fails and result["failed"]:
            raise ExecutionError("; ".join(result["failed"].values()))

    return Verb(bench.name, work, summary, f"python -m benchmarks {bench.name} {example}", arguments, more)


def _targets(words: str, metavar: str = "TARGET") -> Argument:
    return arg("targets", nargs="*", metavar=metavar, help=words)


def _several(flag: str, **settings: Any) -> Argument:
    """Make an option that may be given again. The parameter for it is its plural, unless `settings` name another."""
    return arg(flag, **{"dest": f"{flag.strip('-')}s", "action": "append", "default": [], **settings})


def _switch(flag: str, words: str, **settings: Any) -> Argument:
    return arg(flag, action="store_true", help=words, **settings)


_OUTPUT = output("the result, after each item, as JSON")
_BUDGET = (
    arg("--budget-s", type=count, metavar="S", help="seconds; what does not fit is left out"),
    _OUTPUT,
)
_ROUNDS = arg("--rounds", type=count, metavar="N", help="blocks of steps of each contender, or runs")
_BATCHES = _targets("zoo names, gpt2, or NAME/BATCH (a selection)")

VERBS = (
    _verb(
        Bench("simulate", "simulate"),
        "the simulator against SimPy, on one random plan",
        "--ops 10000",
        arg("--ops", dest="num_ops", type=count, metavar="N", help="ops in the plan (100000)"),
    ),
    _verb(
        Bench("overhead", "overhead"),
        "what capture, profile and the time between ops cost",
        "mlp resnet20",
        _targets("zoo names (a selection)"),
    ),
    _verb(
        Bench("promises", "promises"),
        "the speedup of a verdict, beside that of the 200 steps after it",
        "mlp gpt2 --runs 5 -o promises.json",
        arg("--runs", type=count, metavar="N", help="processes of each kind (20)"),
        *(_OUTPUT, _BATCHES),
    ),
    _verb(
        Bench("compiling", "compiling"),
        "what compiling a step takes, and eager steps beside it",
        "mlp densenet40/32 -o compiling.json",
        *(_OUTPUT, _BATCHES),
    ),
    _verb(
        Bench("memory", "memory"),
        "peak memory of a process while a step is searched, and by its plan",
        "mlp resnet20/64 -o memory.json",
        *(_OUTPUT, _BATCHES),
    ),
    _verb(
        Bench("versions", "versions"),
        "scheduled or fused steps of another version's sources and of these, in turns",
        "../older/src mlp own-mlp-32:8 -o FILE",
        arg("other", type=Path, metavar="SOURCES", help="the folder that the other package is in"),
        _targets(
            "zoo names, NAME:MODELS of fuse, or search-NAME:TRIALS; own-NAME has own rates, lengths-NAME 40 lengths "
            "of batches"
        ),
        *(_ROUNDS, _OUTPUT),
    ),
    _verb(
        Bench("backend", "backend"),
        "torch.compile with this backend, with Inductor, and whole steps, over eager",
        "mlp gpt2 -o backend.json",
        *(_ROUNDS, _OUTPUT, _targets("only these, such as mlp or gpt2")),
    ),
    _verb(
        Bench("concurrency", "concurrency"),
        "every way of running a step on these cores, side by side",
        "--quick",
        _switch("--quick", "only the steps of small ops"),
        arg("--no-compile", dest="compiled", action="store_false", help="leave torch.compile out (it takes minutes)"),
        arg("--close", dest="bitwise", action="store_false", help="leave out what is bitwise, and rounding"),
        *(_ROUNDS, _OUTPUT, _targets("only these, such as mlp or resnet20/64")),
    ),
    _verb(
        Bench("strangers", "strangers"),
        "models of pytorchcv and transformers, in both promises of numerics",
        "nin_cifar10 GPT2LMHeadModel",
        *(_ROUNDS, _OUTPUT, _targets("only these (all)")),
        more="Needs: pip install pytorchcv transformers.",
    ),
    _verb(
        Bench("manycore", "manycore"),
        "the paper's strategies on 16 and 68 cores, simulated, or on this machine's",
        "--quick",
        _switch("--quick", "only two of the four networks, nothing assumed anew"),
        _switch("--measured", "run on this machine's own cores, if more than 2"),
        *_BUDGET,
        more="Simulated on published curves; docs/concurrency.md says what that assumes.",
    ),
    _verb(
        Bench("critical-path", "critical_path"),
        "streams by critical path against layer by layer, on TurboDL's networks",
        "--quick --device sim",
        _switch("--quick", "fewer networks and batch sizes"),
        arg("--device", choices=("cpu", "cuda", "sim"), default="sim", help="what to run on (sim: a P100)"),
        *_BUDGET,
    ),
    _verb(
        Bench("gpu-papers", "gpu_papers"),
        "co-runs, blocks of a kernel, occupancy: rows that need a GPU",
        "-o gpu-papers.json",
        *_BUDGET,
        more="Without a GPU each row says that it is not measured.",
    ),
    _verb(
        Bench("gpu", "gpu"),
        "all benches for a machine with a GPU, into one file",
        "--budget-s 360 -o gpu.json",
        arg("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (cuda)"),
        *_BUDGET,
        more="With --device cpu the same in small, to see that it works.",
        fails=True,
    ),
    _verb(
        Bench("fuse", "fuse", spins_briefly=True),
        "training B models at once, against one after another",
        "mlp-32 --device cpu --models 8 --models 64",
        arg("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)"),
        _several("--models", type=count, metavar="B", help="models (1, 2, 4, 8)", dest="sizes"),
        _several("--contender", metavar="NAME", help="serial and this one only (all but close)"),
        arg("--steps", type=count, metavar="N", help="steps of each contender, at least (7)"),
        _several(
            "--precision", choices=("float32", "bfloat16", "float16"), help="also several (float32); others: autocast"
        ),
        arg("--optimizer", choices=("sgd", "adam"), default="sgd", help="what updates (sgd, with momentum)"),
        _switch("--own-rates", "a rate and a weight decay for each model"),
        arg("--no-memory", dest="memory", action="store_false", help="leave the measurement of memory out"),
        *(*_BUDGET, _targets("such as mlp-128 or pointnet-cls (a selection)")),
    ),
    _verb(
        Bench("tune", "tune", spins_briefly=True),
        "whole hyper-parameter searches: serial, in processes, fused, auto, scheduled",
        "mlp-32 -o tune.json",
        _several("--contender", metavar="NAME", help="serial and this one only (all)"),
        _switch("--quick", "few trials and epochs, to see that it works"),
        *(_OUTPUT, _targets("such as mlp-128 or pointnet (all)")),
    ),
    _verb(
        Bench("resnet18", "fuse.resnet18", spins_briefly=True),
        "HFTA's experiments with ResNet-18: curves at three rates, and partial fusion",
        "-o resnet18.json",
        arg("--steps", type=int, metavar="N", help="of the curves (24; 0: none)"),
        arg("--rounds", type=int, metavar="N", help="steps with each number of separate blocks (20; 0: none)"),
        _OUTPUT,
    ),
    _verb(
        Bench("tune-simulated", "tune.simulated"),
        "searches of HFHT's settings, simulated with measured times of steps",
        "-o tune-simulated.json",
        *(_OUTPUT, _targets("of the fuse bench, such as mlp-128 (mlp-32 and pointnet-tuned)")),
        more="With OMP_NUM_THREADS=1.",
    ),
    _verb(
        Bench("tune-short", "tune.short"),
        "short searches of a small MLP, in turns with one trial at a time: CPU time",
        "--trials 12",
        arg("--trials", type=count, metavar="N", help="of each search (48)"),
        *(_ROUNDS, _OUTPUT),
        more="With OMP_NUM_THREADS=1.",
    ),
    _verb(
        Bench("transfers", "transfers"),
        "orders of received parameters: simulated, to 1,024 workers; or measured",
        "--workers 1024 resnet152",
        arg("--workers", type=count, metavar="N", help="workers of the cluster (1024)"),
        _several("--mbit", type=count, metavar="N", help="measured: two ranks, a link of this rate; needs root"),
        _several("--order", metavar="ORDER", help="measured: only this one; may be given again"),
        arg("--rounds", type=count, metavar="N", help="turns of each order, measured (2)"),
        arg("--steps", type=count, metavar="N", help="steps of a turn, at the most (10)"),
        _switch("--agents", "measured: forwards that pull in every call"),
        _switch("--paced", "many workers that sleep to compute, over real links; needs root"),
        _switch("--urgent", "a small value behind a large one, over a link; needs root"),
        arg("--seconds", type=float, metavar="S", help="about how long to measure (paced: 240)"),
        *(_OUTPUT, _targets("zoo models (those of TicTac)", "MODEL")),
        urgent=Bench("transfers-urgent", "urgent"),
        paced=Bench("transfers-paced", "paced"),
        agents=Bench("transfers-agents", "transfers_real", spins_briefly=True),
        mbits=Bench("transfers-real", "transfers_real", spins_briefly=True),
    ),
    _verb(
        Bench("loading", "loading", spins_briefly=True),
        "from a file to the first output: load then run, and streamed in several orders",
        "resnet50 --rounds 3 -o loading.json",
        *(_ROUNDS, _OUTPUT, _targets("resnet50, bert-base, bert-tiny (all)", "MODEL")),
    ),
    _verb(
        Bench("partition", "partition"),
        "parts of a step against METIS, Mt-KaHyPar, dynamic programming and HEFT",
        "resnet20 -o partition.json",
        _switch("--paced", "pipelines of GPT-2, Llama, ResNet-18 and a U-Net that sleep"),
        _switch("--hog", "two ranks, one beside a program that takes its core; ops move"),
        *(_OUTPUT, _targets("workloads and zoo models (16 of them)", "GRAPH")),
        paced=Bench("partition-paced", "partition.paced"),
        hog=Bench("partition-hog", "partition.hog"),
    ),
)
