"""The words of the command line: verbs, their files and options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from hocket.cli import bench, files, steps
from hocket.plan import planners

__all__ = ["make_parser"]

_TARGET = """\
TARGET is a name that `hocket zoo` lists, or file.py:function, a function
without arguments that returns hocket.Job(step, model, optimizer, batches)."""


class _Parser(argparse.ArgumentParser):
    """A parser that takes options by their whole names only: a shortened one would change meaning with a new one."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; the function that does a verb's work is the ``work`` of what it returns."""
    parser = _Parser(
        prog="hocket",
        description="Finds the rests in a PyTorch training step and fills them, without changing\n"
        "what the step computes.",
        epilog="start with:\n  hocket run mlp\n\n`hocket VERB --help` has an example for each verb.\n"
        "Exit status: 0 done, 1 the work failed, 2 the words were wrong.",
    )
    # Only this way: a plain import would make the command line one of the modules that the package stands on.
    version = import_module("hocket").__version__
    parser.add_argument("--version", action="version", version=f"hocket {version}")
    verbs = parser.add_subparsers(metavar="VERB", title="verbs", dest="verb")
    _add_steps(verbs)
    _add_files(verbs)
    _add_report(verbs)
    _add_rest(verbs)
    return parser


_Verbs: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _verb(
    verbs: _Verbs, name: str, work: Callable[[argparse.Namespace], None], summary: str, example: str, more: str = ""
) -> argparse.ArgumentParser:
    description = f"{summary[0].upper()}{summary[1:]}." + (f"\n\n{more}" if more else "")
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=summary, description=description, epilog=f"example:\n  {example}"
    )
    parser.set_defaults(work=work)
    parser.add_argument("--format", choices=("table", "json"), default="table", help="json: one object on stdout")
    parser.add_argument("--traceback", action="store_true", help="where an error came from, in full")
    return parser


def _add_steps(verbs: _Verbs) -> None:
    run = _verb(
        verbs,
        "run",
        steps.run_verb,
        "measure a training step eagerly, plan it, run the plan, and compare",
        "hocket run mlp --set depth=4 --report report",
        _TARGET,
    )
    _target(run)
    names = ", ".join(planners())
    run.add_argument(
        "--planner",
        choices=("auto", *planners()),
        default="auto",
        metavar="NAME",
        help=f"auto (the default) tries all; or {names}",
    )
    run.add_argument("--runs", type=_count, default=10, metavar="N", help="measured steps of each kind (10)")
    run.add_argument("--threads", type=_count, metavar="N", help="threads of the eager step (torch's own choice)")
    run.add_argument("--strict", action="store_true", help="fail where the step cannot be captured")
    run.add_argument("--report", type=Path, metavar="DIR", help="write the page, the trace and all files there")

    capture = _verb(
        verbs,
        "capture",
        steps.capture_verb,
        "turn a training step into a graph",
        "hocket capture mlp -o graph.json",
        _TARGET,
    )
    _target(capture)
    _output(capture, "the graph", required=True)
    _joint(capture)

    profile = _verb(
        verbs,
        "profile",
        steps.profile_verb,
        "measure how long each op of a training step takes",
        "hocket profile mlp -o costs.json --graph graph.json",
        _TARGET,
    )
    _target(profile)
    _output(profile, "the costs", required=True)
    profile.add_argument("--graph", type=Path, metavar="FILE", help="write the graph, too")
    profile.add_argument("--runs", type=_count, default=5, metavar="N", help="counted steps at each width (5)")
    profile.add_argument("--widths", type=_widths, metavar="1,2", help="numbers of threads (1, 2, 4, ... all cores)")
    _joint(profile)


def _add_files(verbs: _Verbs) -> None:
    plan = _verb(
        verbs,
        "plan",
        files.plan_verb,
        "find an order and lanes for the ops of a graph",
        "hocket plan graph.json costs.json --planner list -o plan.txt",
        "The plan goes to stdout, or into the file of -o; what it is predicted to take\ngoes to stderr.",
    )
    _inputs(plan, "GRAPH", "COSTS")
    _machine(plan)
    plan.add_argument(
        "--planner", choices=tuple(planners()), default="list", metavar="NAME", help=f"{', '.join(planners())} (list)"
    )
    plan.add_argument("--lanes", type=_count, metavar="N", help="this many lanes on each CPU device (planner list)")
    _output(plan, "the plan")

    check = _verb(
        verbs,
        "check",
        files.check_verb,
        "say whether a plan may run a graph",
        "hocket check graph.json plan.txt",
        "Without --machine it is checked against the graph alone.",
    )
    _inputs(check, "GRAPH", "PLAN")
    check.add_argument("--machine", type=_input, metavar="FILE", help="does the plan fit this machine, too")

    simulate = _verb(
        verbs,
        "simulate",
        files.simulate_verb,
        "predict when each op of a plan would run",
        "hocket simulate graph.json plan.txt costs.json --trace trace.json",
        "The trace opens in ui.perfetto.dev.",
    )
    _inputs(simulate, "GRAPH", "PLAN", "COSTS")
    _machine(simulate)
    _output(simulate, "the timeline")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="where to write the timeline as a trace")

    bounds = _verb(
        verbs,
        "bounds",
        files.bounds_verb,
        "say between which times every plan of a graph lies",
        "hocket bounds graph.json costs.json",
    )
    _inputs(bounds, "GRAPH", "COSTS")
    _machine(bounds)


def _add_report(verbs: _Verbs) -> None:
    report = _verb(
        verbs,
        "report",
        files.report_verb,
        "write the page that shows a plan",
        "hocket report graph.json plan.txt costs.json timeline.json -o report",
        "Without a TIMELINE the plan is simulated.",
    )
    _inputs(report, "GRAPH", "PLAN", "COSTS")
    report.add_argument("timelines", type=_input, nargs="*", metavar="TIMELINE", help="measured or simulated")
    _machine(report)
    report.add_argument("-o", "--output", type=Path, metavar="DIR", required=True, help="where to write the page")
    report.add_argument("--title", default="Hocket report", metavar="WORDS", help="what the page is called")


def _add_rest(verbs: _Verbs) -> None:
    machine = _verb(
        verbs,
        "machine",
        files.machine_verb,
        "describe this machine, for --machine of the other verbs",
        "hocket machine --measure -o machine.json",
        "With --format json the description itself goes to stdout.",
    )
    _output(machine, "the machine")
    machine.add_argument("--measure", action="store_true", help="measure arithmetic and memory traffic, too")

    _verb(verbs, "zoo", steps.zoo_verb, "list the training steps that come with Hocket", "hocket zoo --format json")

    parser = verbs.add_parser("bench", help="measure Hocket itself", description="Measure Hocket itself.")
    parser.set_defaults(work=lambda _: parser.print_help())
    names = parser.add_subparsers(metavar="NAME", title="what there is", dest="bench")
    simulate = _verb(
        names,
        "simulate",
        bench.simulate_bench,
        "the simulator against SimPy, on one random plan",
        "hocket bench simulate --ops 10000",
    )
    overhead = _verb(
        names,
        "overhead",
        bench.overhead_bench,
        "what capture, profile and the time between ops cost",
        "hocket bench overhead mlp resnet20",
    )
    overhead.add_argument("target", nargs="*", metavar="TARGET", help="zoo names (a selection)")
    concurrency = _verb(
        names,
        "concurrency",
        bench.concurrency_bench,
        "every way of running a step on these cores, side by side",
        "hocket bench concurrency --quick",
    )
    concurrency.add_argument("--quick", action="store_true", help="only the steps of small ops")
    concurrency.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes minutes)")
    concurrency.add_argument("--rounds", type=_count, metavar="N", help="blocks of steps of each contender")
    concurrency.add_argument("--report", metavar="DIR", help="draw how many ops run side by side, one picture a step")
    concurrency.add_argument("target", nargs="*", metavar="TARGET", help="only these, such as mlp or resnet20/64")
    manycore = _verb(
        names,
        "manycore",
        bench.manycore_bench,
        "the paper's strategies on 16 and 68 cores, simulated, or on this machine's",
        "hocket bench manycore --quick",
        "Simulated on published curves; docs/concurrency.md says what that assumes.",
    )
    manycore.add_argument("--quick", action="store_true", help="only two of the four networks, nothing assumed anew")
    manycore.add_argument("--measured", action="store_true", help="run on this machine's own cores, if more than 2")
    _budget(manycore)
    fuse = _verb(
        names,
        "fuse",
        bench.fuse_bench,
        "training B models at once, against one after another",
        "hocket bench fuse mlp-32 --device cpu --models 8 --models 64",
    )
    fuse.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (cpu)")
    fuse.add_argument("--models", type=_count, action="append", default=[], metavar="B", help="models (1, 2, 4, 8)")
    fuse.add_argument("--contender", action="append", default=[], metavar="NAME", help="serial and this one only (all)")
    fuse.add_argument("--steps", type=_count, default=7, metavar="N", help="steps of each contender, at least (7)")
    fuse.add_argument("--amp", action="store_true", help="train under autocast to bfloat16")
    fuse.add_argument("--both", action="store_true", help="in single precision, and again under autocast")
    fuse.add_argument("--partial", action="append", default=[], metavar="TARGET", help="fuse it block by block, too")
    fuse.add_argument("--no-memory", action="store_true", help="leave the measurement of memory out")
    _budget(fuse)
    fuse.add_argument("target", nargs="*", metavar="TARGET", help="such as mlp-128 or pointnet-cls (a selection)")
    critical = _verb(
        names,
        "critical-path",
        bench.critical_path_bench,
        "streams by critical path against layer by layer and one stream, on the networks of TurboDL",
        "hocket bench critical-path --quick --device sim",
    )
    critical.add_argument("--quick", action="store_true", help="fewer networks and batch sizes")
    critical.add_argument("--device", choices=("cpu", "cuda", "sim"), default="sim", help="what to run on (sim)")
    critical.add_argument("--machine", default="p100", metavar="NAME", help="the GPU to simulate (p100)")
    _budget(critical)
    gpu = _verb(
        names,
        "gpu",
        bench.gpu_bench,
        "all that is to be measured on a machine with a GPU, into one file",
        "hocket bench gpu --budget-s 360 -o gpu.json",
        "With --device cpu the same in small, to see that it works.",
    )
    gpu.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (cuda)")
    gpu.add_argument("--budget-s", type=_count, default=360, metavar="S", help="seconds for all of it (360)")
    _output(gpu, "all results")
    simulate.add_argument("--ops", type=_count, default=100_000, metavar="N", help="ops in the plan (100000)")
    simulate.add_argument("--lanes", type=_count, default=8, metavar="N", help="lanes in the plan (8)")
    simulate.add_argument("--repeats", type=_count, default=5, metavar="N", help="rounds (5)")
    simulate.add_argument("--seed", type=int, default=0, metavar="N", help="draws another plan (0)")


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a zoo name, or file.py:function")
    zoo = parser.add_argument_group("options of zoo targets")
    zoo.add_argument("--batch-size", type=_count, metavar="N", help="examples in a batch (the entry's own)")
    zoo.add_argument("--optimizer", metavar="NAME", help="sgd, adam or adamw (the entry's own)")
    zoo.add_argument("--seed", type=int, metavar="N", help="of weights and data (0)")
    zoo.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="a setting that `hocket zoo` lists, or lr or num_batches; may be given again",
    )


def _inputs(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name.lower(), type=_input, metavar=name, help=f"a {name.lower()} file")


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", type=_input, metavar="FILE", help="what to plan for (this machine)")


def _budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget-s", type=_count, metavar="S", help="seconds; what they do not suffice for is left out"
    )
    _output(parser, "the result, after each item, as JSON")


def _output(parser: argparse.ArgumentParser, what: str, *, required: bool = False) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", required=required, help=f"where to write {what}")


def _joint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--joint", action="store_true", help="leave a convolution's backward in one piece")


def _input(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    return path


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _widths(text: str) -> list[int]:
    return sorted({_count(word) for word in text.split(",")})


def _setting(text: str) -> tuple[str, int | float | str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, such as image_size=64, got {text!r}")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value
