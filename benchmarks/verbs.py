"""All benches as commands. An option has the name of the parameter that it is for, in the ``run`` of its module."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks.bench import BUDGET, Bench, first_given, several, targets, without
from hocket.cli.arguments import Verb, arg, count, output
from hocket.errors import ExecutionError

_AFTER_EACH = output("the result, after each target, as JSON")
_BATCHES = "zoo names, or NAME/BATCH (a selection)"
_OVER_LINKS = "every order on each model, over real links"


def _gpu(args: Namespace) -> None:
    """Run all parts, print what there is, and fail if a part failed.

    Raises:
        ExecutionError: a part failed.
    """
    if failed := Bench("gpu", "every bench in turn", "gpu").run(args)["failed"]:
        raise ExecutionError("; ".join(failed.values()))


VERBS = (
    Verb(
        "simulate",
        Bench("simulate", "simulate with both engines in turn", "simulate"),
        "the simulator against SimPy, on one random plan",
        "python -m benchmarks simulate --ops 10000",
        (
            arg("--ops", dest="num_ops", type=count, default=100_000, metavar="N", help="ops in the plan (100000)"),
            arg("--lanes", dest="num_lanes", type=count, default=8, metavar="N", help="lanes in the plan (8)"),
            arg("--repeats", type=count, default=5, metavar="N", help="rounds (5)"),
            arg("--seed", type=int, default=0, metavar="N", help="draws another plan (0)"),
        ),
    ),
    Verb(
        "overhead",
        Bench("overhead", "eager and both executors in turn", "overhead"),
        "what capture, profile and the time between ops cost",
        "python -m benchmarks overhead mlp resnet20",
        (targets("zoo names (a selection)"),),
    ),
    Verb(
        "promises",
        Bench("promises", "decide each target in a new process, then time it", "promises"),
        "the speedup of a verdict, beside that of the 200 steps after it",
        "python -m benchmarks promises mlp gpt2 --runs 5 -o promises.json",
        (
            arg("--runs", type=count, default=20, metavar="N", help="processes of each kind (20)"),
            several("--neighbour", choices=("none", "before", "after"), help="only this kind (all three)"),
            _AFTER_EACH,
            targets(_BATCHES),
        ),
    ),
    Verb(
        "compiling",
        Bench("compiling", "compile each target beside its own steps", "compiling"),
        "what compiling a step takes, and eager steps beside it",
        "python -m benchmarks compiling mlp densenet40/32 -o compiling.json",
        (_AFTER_EACH, targets(_BATCHES)),
    ),
    Verb(
        "memory",
        Bench("memory", "schedule each target in its own process", "memory"),
        "peak memory of a process while a step is searched, and by its plan",
        "python -m benchmarks memory mlp resnet20/64 -o memory.json",
        (
            arg("--numerics", choices=("bitwise", "close"), default="close", help="of the schedule (close)"),
            without("--no-compile", "compiled", "without the search of compiled forms"),
            _AFTER_EACH,
            targets("zoo names, gpt2, or NAME/BATCH (a selection)"),
        ),
    ),
    Verb(
        "versions",
        Bench("versions", "prepare each target in two processes, and make steps in turns", "versions"),
        "scheduled or fused steps of another version's sources and of these, in turns",
        "python -m benchmarks versions ../older/src mlp own-mlp-32:8 -o FILE",
        (
            arg("other", type=Path, metavar="SOURCES", help="the folder that the other package is in"),
            targets(
                "zoo names, NAME:MODELS of fuse, or search-NAME:TRIALS; own-NAME has own rates, lengths-NAME 40 "
                "lengths of batches"
            ),
            arg("--rounds", type=count, default=10, metavar="N", help="blocks of steps of each kind (10)"),
            output("the result as JSON"),
        ),
    ),
    Verb(
        "backend",
        Bench("backend", "every backend in turn, on each target", "backend"),
        "torch.compile with this backend, with Inductor, and whole steps, over eager",
        "python -m benchmarks backend mlp gpt2 -o backend.json",
        (
            arg("--rounds", type=count, default=12, metavar="N", help="blocks of steps of each contender (12)"),
            without("--no-close", "close", "leave out what is not bitwise, which compiles"),
            _AFTER_EACH,
            targets("only these, such as mlp or gpt2"),
        ),
    ),
    Verb(
        "concurrency",
        Bench("concurrency", "every contender in turn, on each target", "concurrency"),
        "every way of running a step on these cores, side by side",
        "python -m benchmarks concurrency --quick",
        (
            arg("--quick", action="store_true", help="only the steps of small ops"),
            without("--no-compile", "compiled", "leave torch.compile out (it takes minutes)"),
            without("--no-plans", "planned", "only what a user would choose from, no single plans"),
            without("--close", "bitwise", "leave out what is bitwise (a search on each target)"),
            arg("--rounds", type=count, metavar="N", help="blocks of steps of each contender"),
            arg(
                "--report",
                type=Path,
                metavar="DIR",
                help="draw how many ops run side by side, one picture a step",
            ),
            _AFTER_EACH,
            targets("only these, such as mlp or resnet20/64"),
        ),
    ),
    Verb(
        "strangers",
        Bench("strangers", "schedule models of pytorchcv and transformers", "strangers"),
        "models of pytorchcv and transformers, in both promises of numerics",
        "python -m benchmarks strangers nin_cifar10 GPT2LMHeadModel",
        (
            arg("--compile", dest="compiled", action="store_true", help="measure torch.compile too (it takes minutes)"),
            arg("--rounds", type=count, default=8, metavar="N", help="blocks of steps of each contender (8)"),
            _AFTER_EACH,
            targets("only these (all)"),
        ),
        "Needs: pip install pytorchcv transformers.",
    ),
    Verb(
        "manycore",
        first_given(
            Bench("manycore", "every plan of each network", "manycore"),
            measured=Bench("manycore", "every plan of each network", "manycore", "measured"),
        ),
        "the paper's strategies on 16 and 68 cores, simulated, or on this machine's",
        "python -m benchmarks manycore --quick",
        (
            arg("--quick", action="store_true", help="only two of the four networks, nothing assumed anew"),
            arg("--measured", action="store_true", help="run on this machine's own cores, if more than 2"),
            *BUDGET,
        ),
        "Simulated on published curves; docs/concurrency.md says what that assumes.",
    ),
    Verb(
        "critical-path",
        Bench("critical-path", "every contender on each network", "critical_path"),
        "streams by critical path against layer by layer, on TurboDL's networks",
        "python -m benchmarks critical-path --quick --device sim",
        (
            arg("--quick", action="store_true", help="fewer networks and batch sizes"),
            arg("--device", choices=("cpu", "cuda", "sim"), default="sim", help="what to run on (sim)"),
            arg("--machine", default="p100", metavar="NAME", help="the GPU to simulate (p100)"),
            *BUDGET,
        ),
    ),
    Verb(
        "gpu-papers",
        Bench("gpu-papers", "rows of the papers on a GPU", "gpu_papers"),
        "co-runs, blocks of a kernel, occupancy: rows that need a GPU",
        "python -m benchmarks gpu-papers",
        BUDGET,
        "Without a GPU each row says that it is not measured.",
    ),
    Verb(
        "gpu",
        _gpu,
        "all benches for a machine with a GPU, into one file",
        "python -m benchmarks gpu --budget-s 360 -o gpu.json",
        (
            arg("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (cuda)"),
            arg("--budget-s", type=count, default=360, metavar="S", help="seconds for all of it (360)"),
            output("all results"),
        ),
        "With --device cpu the same in small, to see that it works.",
    ),
    Verb(
        "fuse",
        Bench("fuse", "every way of training B models in turn", "fuse", spins_briefly=True),
        "training B models at once, against one after another",
        "python -m benchmarks fuse mlp-32 --device cpu --models 8 --models 64",
        (
            arg("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)"),
            several("--models", type=count, metavar="B", help="models (1, 2, 4, 8)", dest="sizes"),
            several("--contender", metavar="NAME", help="serial and this one only (all but close)"),
            arg("--steps", type=count, default=7, metavar="N", help="steps of each contender, at least (7)"),
            several(
                "--precision",
                choices=("float32", "bfloat16", "float16"),
                help="also several (float32); others: autocast",
            ),
            arg("--optimizer", choices=("sgd", "adam"), default="sgd", help="what updates (sgd, with momentum)"),
            arg("--own-rates", action="store_true", help="a rate and a weight decay for each model"),
            arg("--own-batches", action="store_true", help="a batch for each model"),
            without("--no-memory", "memory", "leave the measurement of memory out"),
            *BUDGET,
            targets("such as mlp-128 or pointnet-cls (a selection)"),
        ),
    ),
    Verb(
        "tune",
        Bench("tune", "every search by every executor", "tune", spins_briefly=True),
        "whole hyper-parameter searches: serial, in processes, fused, auto, scheduled",
        "python -m benchmarks tune mlp-32 --algorithm random -o tune.json",
        (
            several("--contender", metavar="NAME", help="serial and this one only (all)"),
            several("--algorithm", metavar="NAME", help="random or hyperband only (what the target has)"),
            arg("--trials", type=count, metavar="N", help="trials of random search (60, of MobileNet 8)"),
            arg("--quick", action="store_true", help="few trials and epochs, to see that it works"),
            *BUDGET,
            targets("such as mlp-128 or pointnet (all)"),
        ),
    ),
    Verb(
        "resnet18",
        Bench("resnet18", "curves, and partial fusion", "fuse.resnet18", spins_briefly=True),
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
        Bench("tune-simulated", "steps, and searches simulated with them", "tune.simulated"),
        "searches of HFHT's settings, simulated with measured times of steps",
        "OMP_NUM_THREADS=1 python -m benchmarks tune-simulated -o tune-simulated.json",
        (
            several(
                "--models", type=count, metavar="B", help="measure a step of this number (1, 4, 16, 32)", dest="sizes"
            ),
            arg("--searches", type=count, default=20, metavar="N", help="simulated ones of each setting (20)"),
            output("the result, as JSON"),
            targets("of the fuse bench, such as mlp-128 (mlp-32 and pointnet-tuned)"),
        ),
    ),
    Verb(
        "tune-short",
        Bench("tune-short", "short searches, by every executor", "tune.short"),
        "short searches of a small MLP, in turns with one trial at a time: CPU time",
        "OMP_NUM_THREADS=1 python -m benchmarks tune-short --trials 12",
        (
            arg("--trials", type=count, default=48, metavar="N", help="of each search (48)"),
            arg("--repeats", type=count, default=5, metavar="N", help="searches by each executor (5)"),
            output("the result, as JSON"),
        ),
    ),
    Verb(
        "transfers",
        first_given(
            Bench("transfers", "every order on each model", "transfers"),
            urgent=Bench("transfers-urgent", "a small value behind a large one", "urgent"),
            paced=Bench("transfers-paced", "paced workers, over real links", "paced"),
            agents=Bench("transfers-agents", _OVER_LINKS, "transfers_real"),
            mbits=Bench("transfers-real", _OVER_LINKS, "transfers_real"),
        ),
        "orders of received parameters: simulated, to 1,024 workers; or measured",
        "python -m benchmarks transfers --workers 1024 resnet152",
        (
            arg("--workers", type=count, default=1024, metavar="N", help="workers of the cluster (1024)"),
            arg("--ratio", type=float, default=1.0, metavar="R", help="communication over computation (1)"),
            arg("--seed", type=int, default=0, metavar="N", help="draws other random orders (0)"),
            several(
                "--mbit",
                type=count,
                metavar="N",
                help="measured: a worker and a server, over a link of this rate; may be given again; needs root",
            ),
            several("--order", metavar="ORDER", help="measured: only this one; may be given again"),
            arg("--rounds", type=count, default=2, metavar="N", help="turns of each order, measured (2)"),
            arg("--steps", type=count, default=10, metavar="N", help="steps of a turn, at the most (10)"),
            arg(
                "--batch-size", type=count, metavar="N", help="of the measured models (computes as long as it receives)"
            ),
            arg("--agents", action="store_true", help="measured: forwards that pull in every call"),
            arg("--paced", action="store_true", help="many workers that sleep to compute, over real links; needs root"),
            arg("--urgent", action="store_true", help="a small value behind a large one, over a link; needs root"),
            arg("--seconds", type=float, metavar="S", help="about how long to measure (paced: 240)"),
            output("the result, after each model, as JSON"),
            targets("zoo models (those of TicTac)", "MODEL"),
        ),
    ),
    Verb(
        "loading",
        Bench("loading", "every contender in turn, on each model", "loading", spins_briefly=True),
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
        first_given(
            Bench("partition", "every objective on each graph", "partition"),
            paced=Bench("partition-paced", "paced pipelines, split in two ways, in turns", "partition.paced"),
            hog=Bench("partition-hog", "a job beside a hog, without moves, then with them", "partition.hog"),
        ),
        "parts of a step against METIS, Mt-KaHyPar, dynamic programming and HEFT",
        "python -m benchmarks partition resnet20 --parts 4 -o partition.json",
        (
            several("--parts", type=count, metavar="K", help="devices (2, 4, 8; paced 2, 3, 4)", dest="parts"),
            arg("--paced", action="store_true", help="pipelines of GPT-2, Llama, ResNet-18 and a U-Net that sleep"),
            arg("--hog", action="store_true", help="two ranks, one beside a program that takes its core; ops move"),
            arg("--search-s", type=float, default=5.0, metavar="S", help="seconds of each search (5)"),
            output("the result, after each graph, as JSON"),
            targets("workloads and zoo models (16 of them)", "GRAPH"),
        ),
    ),
)
