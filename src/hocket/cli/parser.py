"""The words of the command line: verbs, their files and options."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from hocket.cli import agents, files, partitions, searches, servers, steps, weights
from hocket.cli.arguments import Parser, Verbs, add_output, add_verb, count
from hocket.errors import HocketError
from hocket.ir import Machine
from hocket.planning import planners
from hocket.planning.transfers import ORDERS

__all__ = ["make_parser"]

# `hocket.loading.loader` has these, too, and needs torch.
_LOAD_ORDERS = ("auto", "registration", "file")

_TARGET = """\
TARGET is a name that `hocket zoo` lists, or file.py:function, a function
without arguments that returns hocket.Job(step, model, optimizer, batches)."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; the function that does a verb's work is the ``work`` of what it returns."""
    parser = Parser(
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


def _add_steps(verbs: Verbs) -> None:
    run = add_verb(
        verbs,
        "run",
        steps.run_verb,
        "measure a training step eagerly, plan it, run the plan, and compare",
        "hocket run mlp --set depth=4 --report report",
        _TARGET,
    )
    _target(run).add_argument(
        "--device", choices=("cpu", "cuda"), metavar="NAME", help="where to train: cpu or cuda (cpu)"
    )
    names = ", ".join(planners())
    planned = run.add_mutually_exclusive_group()
    planned.add_argument(
        "--planner",
        choices=("auto", *planners()),
        default="auto",
        metavar="NAME",
        help=f"auto (the default) tries all; or {names}",
    )
    planned.add_argument("--plan", type=_input, metavar="FILE", help="run this plan, edited by hand perhaps")
    run.add_argument(
        "--no-cache", action="store_false", dest="cache", help="search, whatever is remembered; keep nothing"
    )
    run.add_argument("--runs", type=count, default=10, metavar="N", help="measured steps of each kind (10)")
    run.add_argument("--threads", type=count, metavar="N", help="threads of the eager step (torch's own choice)")
    run.add_argument(
        "--simulate",
        type=_gpu,
        metavar="GPU",
        help="simulated times on a GPU: p100, v100, a100, h200 or a machine file",
    )
    run.add_argument(
        "--numerics",
        choices=("bitwise", "close"),
        default="bitwise",
        metavar="NAME",
        help="bitwise, or close: also forms of the step that round otherwise, as near to float64 as eager (bitwise)",
    )
    run.add_argument("--strict", action="store_true", help="fail where the step cannot be captured")
    run.add_argument("--report", type=Path, metavar="DIR", help="write the page, the trace and all files there")

    capture = add_verb(
        verbs,
        "capture",
        steps.capture_verb,
        "turn a training step into a graph",
        "hocket capture mlp -o graph.json",
        _TARGET,
    )
    _target(capture)
    add_output(capture, "the graph", required=True)
    _joint(capture)

    profile = add_verb(
        verbs,
        "profile",
        steps.profile_verb,
        "measure how long each op of a training step takes",
        "hocket profile mlp -o costs.json --graph graph.json",
        _TARGET,
    )
    _target(profile)
    add_output(profile, "the costs", required=True)
    profile.add_argument("--graph", type=Path, metavar="FILE", help="write the graph, too")
    profile.add_argument("--runs", type=count, default=5, metavar="N", help="counted steps at each width (5)")
    profile.add_argument("--widths", type=_widths, metavar="1,2", help="numbers of threads (1, 2, 4, ... all cores)")
    _joint(profile)


def _add_files(verbs: Verbs) -> None:
    plan = add_verb(
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
    plan.add_argument("--lanes", type=count, metavar="N", help="this many lanes on each CPU device (planner list)")
    orders = ", ".join(ORDERS)
    plan.add_argument(
        "--order", choices=ORDERS, metavar="NAME", help=f"of received parameters (planner transfers): {orders} (auto)"
    )
    add_output(plan, "the plan")

    check = add_verb(
        verbs,
        "check",
        files.check_verb,
        "say whether a plan may run a graph",
        "hocket check graph.json plan.txt",
        "Without --machine it is checked against the graph alone.",
    )
    _inputs(check, "GRAPH", "PLAN")
    check.add_argument("--machine", type=_input, metavar="FILE", help="does the plan fit this machine, too")

    simulate = add_verb(
        verbs,
        "simulate",
        files.simulate_verb,
        "predict when each op of a plan would run",
        "hocket simulate graph.json plan.txt costs.json --trace trace.json",
        "The trace opens in ui.perfetto.dev.",
    )
    _inputs(simulate, "GRAPH", "PLAN", "COSTS")
    _machine(simulate)
    add_output(simulate, "the timeline")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="where to write the timeline as a trace")

    bounds = add_verb(
        verbs,
        "bounds",
        files.bounds_verb,
        "say between which times every plan of a graph lies",
        "hocket bounds graph.json costs.json",
    )
    _inputs(bounds, "GRAPH", "COSTS")
    _machine(bounds)


def _add_report(verbs: Verbs) -> None:
    report = add_verb(
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


def _add_rest(verbs: Verbs) -> None:
    machine = add_verb(
        verbs,
        "machine",
        files.machine_verb,
        "describe this machine, for --machine of the other verbs",
        "hocket machine --measure -o machine.json",
        "With --format json the description itself goes to stdout.",
    )
    add_output(machine, "the machine")
    machine.add_argument("--measure", action="store_true", help="measure arithmetic and memory traffic, too")

    tune = add_verb(
        verbs,
        "tune",
        searches.tune_verb,
        "run a search for hyper-parameters, whose trials train together",
        "hocket tune search.py:study",
        "TARGET is file.py:function, a function without arguments that returns the study\n"
        "of hocket.tune(train, space, ...). See docs/tune.md.",
    )
    tune.add_argument("target", metavar="TARGET", help="file.py:function")
    tune.add_argument("--top", type=count, default=5, metavar="N", help="how many trials are listed, best first (5)")

    _add_partition(verbs)
    _add_servers(verbs)
    _add_load(verbs)
    add_verb(verbs, "zoo", steps.zoo_verb, "list the training steps that come with Hocket", "hocket zoo --format json")


def _add_partition(verbs: Verbs) -> None:
    partition = add_verb(
        verbs,
        "partition",
        partitions.partition_verb,
        "spread the ops of a step over several devices",
        "hocket partition mlp --devices 2 --objective cut -o plan.txt",
        f"{_TARGET}\nA GRAPH file will do, too. See docs/partition.md.",
    )
    _target(partition)
    partitions.add_options(partition, _input)


def _add_servers(verbs: Verbs) -> None:
    ps = add_verb(
        verbs,
        "ps",
        servers.ps_verb,
        "train with parameter servers, parameters in a planned order",
        "hocket ps mlp -w 2 -s 1 --order auto",
        f"{_TARGET}\n\nAlone, it starts all ranks on this machine. On several machines torchrun starts them:\n"
        "  torchrun --nnodes 2 --nproc-per-node 3 ... -m hocket ps TARGET -w 4 -s 2\n"
        "The last ranks are the servers. See docs/distributed.md.",
    )
    _target(ps)
    ps.add_argument("-w", "--workers", type=count, default=2, metavar="N", help="how many compute gradients (2)")
    ps.add_argument("-s", "--servers", type=count, default=1, metavar="N", help="how many keep parameters (1)")
    ps.add_argument("--order", choices=ORDERS, default="auto", metavar="NAME", help=f"auto or {', '.join(ORDERS[1:])}")
    ps.add_argument("--steps", type=count, default=10, metavar="N", help="how many steps (10)")
    ps.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="how long a rank is waited for (1800)")
    ps.add_argument("--survive", action="store_true", help="go on without a worker that is lost, unless it is rank 0")
    ps.add_argument("--publish-every", type=count, metavar="N", help="let agents have a version after each N steps")
    add_output(ps, "a checkpoint of the plain model and optimizer")
    agent = add_verb(
        verbs,
        "agent",
        agents.agent_verb,
        "run forwards on the parameters of a job as they change",
        "hocket agent mlp 10.0.0.1:29500",
        "MODEL is a TARGET of one model, which is called with the first value of each batch. "
        + _TARGET.removeprefix("TARGET is "),
    )
    _target(agent, "MODEL")
    agent.add_argument("address", metavar="ADDRESS", help="HOST:PORT of the job; rank 0 of `hocket ps` says it")
    agent.add_argument("--order", choices=ORDERS, default="auto", metavar="NAME", help="as for ps")
    agent.add_argument("--calls", type=count, default=10, metavar="N", help="how many forwards (10)")
    agent.add_argument("--every-call", action="store_true", help="pull in every call, also an old version: to measure")
    agent.add_argument("--not-ahead", action="store_true", help="pull nothing while a call runs")
    agent.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="how long a server is waited for")


def _add_load(verbs: Verbs) -> None:
    load = add_verb(
        verbs,
        "load",
        weights.load_verb,
        "load weights from a safetensors file while the first step runs",
        "hocket load mlp weights.safetensors --reorder ordered.safetensors",
        "MODEL is a TARGET of one model: " + _TARGET.removeprefix("TARGET is "),
    )
    _target(load, "MODEL")
    load.add_argument("file", type=_existing, metavar="FILE", help="a file, the index of several, or their folder")
    load.add_argument(
        "--order", choices=_LOAD_ORDERS, default="auto", metavar="NAME", help=f"{', '.join(_LOAD_ORDERS)} (auto)"
    )
    load.add_argument(
        "--reorder", type=Path, metavar="OUT", help="write the tensors into this file, in the order of their first use"
    )


def _target(parser: argparse.ArgumentParser, name: str = "TARGET") -> argparse._ArgumentGroup:
    """The target and the options of zoo targets, which may be added to."""
    parser.add_argument("target", metavar=name, help="a zoo name, or file.py:function")
    zoo = parser.add_argument_group("options of zoo targets")
    zoo.add_argument("--batch-size", type=count, metavar="N", help="examples in a batch (the entry's own)")
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
    return zoo


def _inputs(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(name.lower(), type=_input, metavar=name, help=f"a {name.lower()} file")


def _machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", type=_input, metavar="FILE", help="what to plan for (this machine)")


def _joint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--joint", action="store_true", help="leave a convolution's backward in one piece")


def _existing(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def _input(text: str) -> Path:
    path = _existing(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    return path


def _gpu(text: str) -> Machine:
    """A machine by the name of its GPU or from its file."""
    try:
        return Machine.load(text) if Path(text).exists() else Machine.preset(text)
    except HocketError as error:
        raise argparse.ArgumentTypeError(f"{error}; or a machine file") from None


def _widths(text: str) -> list[int]:
    return sorted({count(word) for word in text.split(",")})


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
