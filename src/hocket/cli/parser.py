"""The words of the command line: verbs, their files and options."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from hocket.cli import agents, files, partitions, pipelines, searches, servers, steps, weights
from hocket.cli.arguments import Parser, Verbs, add_output, add_verb, count
from hocket.cli.options import (
    TARGET_WORDS,
    existing_path,
    gpu_machine,
    input_file,
    input_files,
    joint_option,
    machine_option,
    target_options,
    widths_of,
)
from hocket.planning import planners
from hocket.planning.transfers import ORDERS

__all__ = ["make_parser"]

# `hocket.loading.loader` has these, too, and needs torch.
_LOAD_ORDERS = ("auto", "registration", "file")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all verbs; the function that does a verb's work is the ``work`` of what it returns."""
    parser = Parser(
        prog="hocket",
        description="Schedules the ops of a PyTorch training step into the time that its hardware is idle, "
        "without changing\nwhat the step computes.",
        epilog="start with:\n  hocket run mlp\n\n`hocket VERB --help` has an example for each verb.\n"
        "Exit status: 0 done, 1 the work failed, 2 a usage error.",
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
        pipelines.run_or_pipeline,
        "measure a training step eagerly, plan it, run the plan, and compare",
        "hocket run mlp --set depth=4 --report report",
        TARGET_WORDS,
    )
    target_options(run).add_argument(
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
    planned.add_argument("--plan", type=input_file, metavar="FILE", help="run this plan, edited by hand perhaps")
    run.add_argument(
        "--no-cache", action="store_false", dest="cache", help="search, whatever is remembered; keep nothing"
    )
    run.add_argument("--runs", type=count, default=10, metavar="N", help="measured steps of each kind (10)")
    run.add_argument("--threads", type=count, metavar="N", help="threads of the eager step (torch's own choice)")
    run.add_argument(
        "--simulate",
        type=gpu_machine,
        metavar="GPU",
        help="simulated times on a GPU: p100, v100, a100, h200 or a machine file",
    )
    run.add_argument(
        "--numerics",
        choices=("bitwise", "rounding", "close"),  # `hocket.session` has these, too, and needs torch
        default="bitwise",
        metavar="NAME",
        help="bitwise; rounding: ops with any number of threads; close: also forms that round otherwise (bitwise)",
    )
    run.add_argument("--strict", action="store_true", help="fail where the step cannot be captured")
    run.add_argument("--report", type=Path, metavar="DIR", help="write the page, the trace and all files there")
    pipelines.add_options(run)

    explain = add_verb(
        verbs,
        "explain",
        steps.explain_verb,
        "say whether a training step can be planned, and what keeps it from that",
        "hocket explain train.py:job",
        f"Four to eight steps are made. {TARGET_WORDS}",
    )
    target_options(explain)

    capture = add_verb(
        verbs,
        "capture",
        steps.capture_verb,
        "turn a training step into a graph",
        "hocket capture mlp -o graph.json",
        TARGET_WORDS,
    )
    target_options(capture)
    add_output(capture, "the graph", required=True)
    joint_option(capture)

    profile = add_verb(
        verbs,
        "profile",
        steps.profile_verb,
        "measure how long each op of a training step takes",
        "hocket profile mlp -o costs.json --graph graph.json",
        TARGET_WORDS,
    )
    target_options(profile)
    add_output(profile, "the costs", required=True)
    profile.add_argument("--graph", type=Path, metavar="FILE", help="write the graph, too")
    profile.add_argument("--runs", type=count, default=5, metavar="N", help="counted steps at each width (5)")
    profile.add_argument("--widths", type=widths_of, metavar="1,2", help="numbers of threads (1, 2, 4, ... all cores)")
    joint_option(profile)


def _add_files(verbs: Verbs) -> None:
    plan = add_verb(
        verbs,
        "plan",
        files.plan_verb,
        "find an order and lanes for the ops of a graph",
        "hocket plan graph.json costs.json --planner list -o plan.txt",
        "The plan goes to stdout, or into the file of -o; what it is predicted to take\ngoes to stderr.",
    )
    input_files(plan, "GRAPH", "COSTS")
    machine_option(plan)
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
    input_files(check, "GRAPH", "PLAN")
    check.add_argument("--machine", type=input_file, metavar="FILE", help="does the plan fit this machine, too")

    simulate = add_verb(
        verbs,
        "simulate",
        files.simulate_verb,
        "predict when each op of a plan would run",
        "hocket simulate graph.json plan.txt costs.json --trace trace.json",
        "The trace opens in ui.perfetto.dev.",
    )
    input_files(simulate, "GRAPH", "PLAN", "COSTS")
    machine_option(simulate)
    add_output(simulate, "the timeline")
    simulate.add_argument("--trace", type=Path, metavar="FILE", help="where to write the timeline as a trace")

    bounds = add_verb(
        verbs,
        "bounds",
        files.bounds_verb,
        "say between which times every plan of a graph lies",
        "hocket bounds graph.json costs.json",
    )
    input_files(bounds, "GRAPH", "COSTS")
    machine_option(bounds)


def _add_report(verbs: Verbs) -> None:
    report = add_verb(
        verbs,
        "report",
        files.report_verb,
        "write the page that shows a plan",
        "hocket report graph.json plan.txt costs.json timeline.json -o report",
        "Without a TIMELINE the plan is simulated.",
    )
    input_files(report, "GRAPH", "PLAN", "COSTS")
    report.add_argument("timelines", type=input_file, nargs="*", metavar="TIMELINE", help="measured or simulated")
    machine_option(report)
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
        f"{TARGET_WORDS}\nA GRAPH file will do, too. See docs/partition.md.",
    )
    target_options(partition)
    partitions.add_options(partition, input_file)


def _add_servers(verbs: Verbs) -> None:
    ps = add_verb(
        verbs,
        "ps",
        servers.ps_verb,
        "train with parameter servers, parameters in a planned order",
        "hocket ps mlp -w 2 -s 1 --order auto",
        f"{TARGET_WORDS}\n\nAlone, it starts all ranks on this machine. On several machines torchrun starts them:\n"
        "  torchrun --nnodes 2 --nproc-per-node 3 ... -m hocket ps TARGET -w 4 -s 2\n"
        "The last ranks are the servers. See docs/distributed.md.",
    )
    target_options(ps)
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
        + TARGET_WORDS.removeprefix("TARGET is "),
    )
    target_options(agent, "MODEL")
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
        "MODEL is a TARGET of one model: " + TARGET_WORDS.removeprefix("TARGET is "),
    )
    target_options(load, "MODEL")
    load.add_argument("file", type=existing_path, metavar="FILE", help="a file, the index of several, or their folder")
    load.add_argument(
        "--order", choices=_LOAD_ORDERS, default="auto", metavar="NAME", help=f"{', '.join(_LOAD_ORDERS)} (auto)"
    )
    load.add_argument(
        "--reorder", type=Path, metavar="OUT", help="write the tensors into this file, in the order of their first use"
    )
