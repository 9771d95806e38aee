"""The verbs of the command line with their files and options, as one table."""

from __future__ import annotations

import argparse
from pathlib import Path

from hocket.cli import arguments, files, partitions, pipelines, servers, steps
from hocket.cli.about import SHELLS, VersionAction, print_completion
from hocket.cli.arguments import Argument, ArgumentGroup, Verb, arg, count, counts_of, make_parser_of, output, setting
from hocket.errors import HocketError
from hocket.ir import Machine
from hocket.planning import planners
from hocket.planning.partition import OBJECTIVES
from hocket.planning.transfers import ORDERS

# `hocket.loading.loader` has these, too, and needs torch.
_LOAD_ORDERS = ("auto", "registration", "file")
NUM_STRATEGIES = 4

_WORDS = """\
a name that `hocket zoo` lists, or file.py:function, a function
without arguments that returns hocket.Job(step, model, optimizer, batches)."""
_TARGET_IS = f"TARGET is {_WORDS}"


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all verbs."""
    parser = make_parser_of(
        (*_verbs_of_steps(), *_verbs_of_files(), *_verbs_of_processes()),
        prog="hocket",
        description="Schedules the ops of a PyTorch training step into the time that its hardware is idle, "
        "without changing\nwhat the step computes.",
        epilog="start with:\n  hocket run mlp\n\n`hocket VERB --help` has an example for each verb.\n"
        "Exit status: 0 done, 1 the work failed, 2 a usage error.",
    )
    parser.add_argument("--version", action=VersionAction, nargs=0, help="show the version")
    parser.add_argument("--json", action=VersionAction, nargs=0, help="with --version: all that a bug report needs")
    return parser


def existing_path(text: str) -> Path:
    """Parse the path of an existing file or folder."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"no such file: {text}")
    return path


def input_file(text: str) -> Path:
    """Parse the path of an existing file."""
    path = existing_path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    return path


def gpu_machine(text: str) -> Machine:
    """Parse a machine, given by the name of its GPU or by its file."""
    try:
        return Machine.load(text) if Path(text).exists() else Machine.preset(text)
    except HocketError as error:
        raise argparse.ArgumentTypeError(f"{error}; or a machine file") from None


def strategies_of(text: str) -> list[int]:
    """Parse ``1,2,3``, numbers of the strategies of the planner `concurrency`."""
    found = counts_of(text)
    if found[-1] > NUM_STRATEGIES:
        raise argparse.ArgumentTypeError(f"expected some of 1, 2, 3 and 4, got {text!r}")
    return found


def _target(name: str = "TARGET", *more: Argument) -> tuple[Argument, ArgumentGroup]:
    """Make the target and the options of zoo targets."""
    options = (
        arg("--batch-size", type=count, metavar="N", help="examples in a batch (the entry's own)"),
        arg("--optimizer", metavar="NAME", help="sgd, adam or adamw (the entry's own)"),
        arg("--seed", type=int, metavar="N", help="of weights and data (0)"),
        arg(
            "--set",
            type=setting,
            action="append",
            default=[],
            dest="settings",
            metavar="KEY=VALUE",
            help="a setting that `hocket zoo` lists, or lr or num_batches; may be given again",
        ),
        *more,
    )
    return (
        arg("target", metavar=name, help="a zoo name, or file.py:function"),
        ArgumentGroup("options of zoo targets", options),
    )


def _inputs(*names: str) -> tuple[Argument, ...]:
    """Make the files that a verb reads, in this order."""
    return tuple(arg(name.lower(), type=input_file, metavar=name, help=f"a {name.lower()} file") for name in names)


def _timeout(whom: str) -> Argument:
    words = f"how long to wait for {whom} (1800)"
    return arg("--timeout", type=arguments.seconds, default=1800.0, metavar="S", help=words)


def _choice(flag: str, choices: tuple[str, ...], default: str | None, words: str) -> Argument:
    return arg(flag, choices=choices, default=default, metavar="NAME", help=words)


_MACHINE = arg("--machine", type=input_file, metavar="FILE", help="what to plan for (this machine)")
_JOINT = arg("--joint", action="store_true", help="leave a convolution's backward in one piece")


def _verbs_of_steps() -> tuple[Verb, ...]:
    names = ", ".join(planners())
    device = arg("--device", choices=("cpu", "cuda"), metavar="NAME", help="where to train: cpu or cuda (cpu)")
    run = (
        *_target("TARGET", device),
        ArgumentGroup(
            "",
            (
                _choice("--planner", ("auto", *planners()), "auto", f"auto (the default) tries all; or {names}"),
                arg("--plan", type=input_file, metavar="FILE", help="run this plan, edited by hand perhaps"),
            ),
        ),
        arg("--no-cache", action="store_false", dest="cache", help="search anew, and remember nothing"),
        arg("--runs", type=count, default=10, metavar="N", help="measured steps of each kind (10)"),
        arg("--threads", type=arguments.threads, metavar="N", help="threads of the eager step (torch's own choice)"),
        arg(
            "--simulate",
            type=gpu_machine,
            metavar="GPU",
            help="simulated times on a GPU: p100, v100, a100, h100, h200 or a machine file",
        ),
        _choice(
            "--numerics",
            ("bitwise", "rounding", "close"),  # `hocket.session` has these, too, and needs torch
            "bitwise",
            "bitwise; rounding: ops with any number of threads; close: also forms that round otherwise (bitwise)",
        ),
        arg("--strict", action="store_true", help="fail where the step cannot be captured"),
        arg("--report", type=Path, metavar="DIR", help="write the page, the trace and all files there"),
        ArgumentGroup(
            "over processes, as a pipeline or by a partition",
            (
                arg("--ranks", type=count, metavar="K", help="cut the model into stages, for K processes"),
                arg(
                    "--partition",
                    type=input_file,
                    metavar="FILE",
                    help="in place of stages, the parts of `hocket partition -o FILE`, with eager's bits",
                ),
                arg("--microbatches", type=count, metavar="M", help="parts of a batch (K)"),
                arg("--memory-bytes", type=count, metavar="N", help="what a process may hold (any amount)"),
                arg("--schedule", metavar="NAME", help="torch's: 1f1b, gpipe, interleaved1f1b, ... (1f1b)"),
            ),
        ),
    )
    return (
        Verb(
            "run",
            pipelines.run_or_pipeline,
            "measure a training step eagerly, plan it, run the plan, and compare",
            "hocket run mlp --set depth=4 --report report",
            run,
            _TARGET_IS,
        ),
        Verb(
            "explain",
            steps.explain_verb,
            "say whether a training step can be planned, and what keeps it from that",
            "hocket explain train.py:job",
            _target(),
            f"Four to eight steps are made. {_TARGET_IS}",
        ),
        Verb(
            "capture",
            steps.capture_verb,
            "turn a training step into a graph",
            "hocket capture mlp -o graph.json",
            (*_target(), output("the graph", required=True), _JOINT),
            _TARGET_IS,
        ),
        Verb(
            "profile",
            steps.profile_verb,
            "measure how long each op of a training step takes",
            "hocket profile mlp -o costs.json --graph graph.json",
            (
                *_target(),
                output("the costs", required=True),
                arg("--graph", type=Path, metavar="OUT", help="where to write the graph, too"),
                arg("--runs", type=count, default=5, metavar="N", help="counted steps at each width (5)"),
                arg(
                    "--widths",
                    type=counts_of,
                    metavar="1,2",
                    help="numbers of threads (1, 2, 4 up to four cores, a hill climb on more)",
                ),
                _JOINT,
            ),
            _TARGET_IS,
        ),
    )


def _verbs_of_files() -> tuple[Verb, ...]:
    orders = f"of received parameters (planner transfers): {', '.join(ORDERS)} (auto)"
    return (
        Verb(
            "plan",
            files.plan_verb,
            "find an order and lanes for the ops of a graph",
            "hocket plan graph.json costs.json --planner list -o plan.txt",
            (
                *_inputs("GRAPH", "COSTS"),
                _MACHINE,
                _choice("--planner", tuple(planners()), "list", f"{', '.join(planners())} (list)"),
                arg("--lanes", type=count, metavar="N", help="this many lanes on each CPU device (planner list)"),
                _choice("--order", ORDERS, None, orders),
                arg("--strategies", type=strategies_of, metavar="1,2", help="by these alone (planner concurrency)"),
                output("the plan"),
            ),
            "The plan goes to stdout, or into the file of -o; what it is predicted to take\ngoes to stderr.",
        ),
        Verb(
            "check",
            files.check_verb,
            "say whether a plan may run a graph",
            "hocket check graph.json plan.txt",
            (
                *_inputs("GRAPH", "PLAN"),
                arg("--machine", type=input_file, metavar="FILE", help="does the plan fit this machine, too"),
            ),
            "Without --machine it is checked against the graph alone.",
        ),
        Verb(
            "simulate",
            files.simulate_verb,
            "predict when each op of a plan would run",
            "hocket simulate graph.json plan.txt costs.json --trace trace.json",
            (
                *_inputs("GRAPH", "PLAN", "COSTS"),
                _MACHINE,
                output("the timeline"),
                arg("--trace", type=Path, metavar="FILE", help="where to write the timeline as a trace"),
            ),
            "The trace opens in ui.perfetto.dev.",
        ),
        Verb(
            "bounds",
            files.bounds_verb,
            "say between which times every plan of a graph lies",
            "hocket bounds graph.json costs.json",
            (*_inputs("GRAPH", "COSTS"), _MACHINE),
        ),
        Verb(
            "report",
            files.report_verb,
            "write the page that shows a plan",
            "hocket report graph.json plan.txt costs.json timeline.json -o report",
            (
                *_inputs("GRAPH", "PLAN", "COSTS"),
                arg("timelines", type=input_file, nargs="*", metavar="TIMELINE", help="measured or simulated"),
                _MACHINE,
                arg("-o", "--output", type=Path, metavar="DIR", required=True, help="where to write the page"),
                arg("--title", default="Hocket report", metavar="WORDS", help="what the page is called"),
            ),
            "Without a TIMELINE the plan is simulated.",
        ),
        Verb(
            "machine",
            files.machine_verb,
            "describe this machine, for --machine of the other verbs",
            "hocket machine --measure -o machine.json",
            (
                output("the machine"),
                arg("--measure", action="store_true", help="measure arithmetic and memory traffic, too"),
            ),
            "With --format json the description itself goes to stdout.",
        ),
        Verb(
            "cache",
            files.cache_verb,
            "list or delete remembered decisions and compiled libraries",
            "hocket cache info",
            (arg("action", choices=("info", "clear"), metavar="ACTION", help="info or clear"),),
            "A process that has loaded a library keeps it. What is missing is made again.",
        ),
        Verb(
            "completion",
            lambda args: print_completion(args, make_parser()),
            "print a script that completes verbs and options in a shell",
            "hocket completion bash > ~/.local/share/bash-completion/completions/hocket",
            (arg("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS)),),
        ),
        Verb("zoo", steps.zoo_verb, "list the training steps that come with Hocket", "hocket zoo --format json"),
    )


def _verbs_of_processes() -> tuple[Verb, ...]:
    return (
        Verb(
            "tune",
            steps.tune_verb,
            "run a search for hyper-parameters, whose trials train together",
            "hocket tune search.py:study",
            (
                arg("target", metavar="TARGET", help="file.py:function"),
                arg("--top", type=count, default=5, metavar="N", help="how many trials are listed, best first (5)"),
            ),
            "TARGET is file.py:function, a function without arguments that returns the study\n"
            "of hocket.tune(train, space, ...). See docs/tune.md.",
        ),
        Verb(
            "partition",
            partitions.partition_verb,
            "spread the ops of a step over several devices",
            "hocket partition mlp --devices 2 --objective cut -o plan.txt",
            (
                *_target(),
                ArgumentGroup(
                    "",
                    (
                        arg("--devices", type=count, default=2, metavar="K", help="devices like this one (2)"),
                        arg("--machine", type=input_file, metavar="FILE", help="its devices and links"),
                    ),
                ),
                arg("--memory-bytes", type=count, metavar="N", help="limit of each device's peak (the machine's)"),
                arg("--costs", type=input_file, metavar="FILE", help="of a GRAPH (estimated)"),
                _choice("--objective", OBJECTIVES, "cut", f"{', '.join(OBJECTIVES)} (cut)"),
                arg("--epsilon", type=float, metavar="E", help="allowed imbalance of a part (0.03 for cut, else any)"),
                arg("--acyclic", action="store_true", help="no devices that wait for each other in a circle"),
                arg("--twins", action="store_true", help="keep forward and backward of a layer together"),
                arg("--expensive", type=float, default=1.0, metavar="X", help="place ops of this share of time (1)"),
                arg("--microbatches", type=count, metavar="M", help="of the objective pipeline (K)"),
                arg("--budget-s", type=arguments.seconds, default=5.0, metavar="S", help="seconds to search for (5)"),
                arg("--report", type=Path, metavar="DIR", help="write the page with a picture of the parts"),
                output("the plan"),
            ),
            f"{_TARGET_IS}\nA GRAPH file will do, too. See docs/partition.md.",
        ),
        Verb(
            "ps",
            servers.ps_verb,
            "train with parameter servers, parameters in a planned order",
            "hocket ps mlp -w 2 -s 1 --order auto",
            (
                *_target(),
                arg("-w", "--workers", type=count, default=2, metavar="N", help="how many compute gradients (2)"),
                arg("-s", "--servers", type=count, default=1, metavar="N", help="how many keep parameters (1)"),
                _choice("--order", ORDERS, "auto", f"auto or {', '.join(ORDERS[1:])}"),
                arg("--steps", type=count, default=10, metavar="N", help="how many steps (10)"),
                _timeout("a rank"),
                arg("--survive", action="store_true", help="go on without a lost worker, unless it is rank 0"),
                arg("--publish-every", type=count, metavar="N", help="publish to agents after each N steps"),
                output("a checkpoint of the plain model and optimizer"),
            ),
            f"{_TARGET_IS}\n\nAlone, it starts all ranks on this machine. On several machines torchrun starts them:\n"
            "  torchrun --nnodes 2 --nproc-per-node 3 ... -m hocket ps TARGET -w 4 -s 2\n"
            "The last ranks are the servers. See docs/distributed.md.",
        ),
        Verb(
            "agent",
            servers.agent_verb,
            "run forwards on the parameters of a job as they change",
            "hocket agent mlp 10.0.0.1:29500",
            (
                *_target("MODEL"),
                arg("address", metavar="ADDRESS", help="HOST:PORT of the job; rank 0 of `hocket ps` prints it"),
                _choice("--order", ORDERS, "auto", "as for ps"),
                arg("--calls", type=count, default=10, metavar="N", help="how many forwards (10)"),
                arg("--every-call", action="store_true", help="pull in every call, even an old version: to measure"),
                arg("--not-ahead", action="store_true", help="pull nothing while a call runs"),
                _timeout("a server"),
            ),
            f"MODEL is {_WORDS}\nIt has one model, which is called with the first value of each batch.",
        ),
        Verb(
            "load",
            steps.load_verb,
            "load weights from a safetensors file while the first step runs",
            "hocket load mlp weights.safetensors --reorder ordered.safetensors",
            (
                *_target("MODEL"),
                arg("file", type=existing_path, metavar="FILE", help="a file, the index of several, or their folder"),
                _choice("--order", _LOAD_ORDERS, "auto", f"{', '.join(_LOAD_ORDERS)} (auto)"),
                arg(
                    "--reorder", type=Path, metavar="OUT", help="write the tensors into OUT, in the order of first use"
                ),
            ),
            f"MODEL is {_WORDS}\nIt has one model.",
        ),
    )
