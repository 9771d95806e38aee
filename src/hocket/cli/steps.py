"""The verbs of the command line that need a training step: run, capture, profile; and the zoo of such steps."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hocket.cli.console import Bar, UsageError, print_json, print_tables, table
from hocket.cli.files import output_file, output_folder, read_plan, written
from hocket.cli.targets import Target
from hocket.ir import ROLES, Costs, Graph, Machine
from hocket.reporting import comparison_table, ops_table, plan_table
from hocket.reporting.words import count_text, duration_text, quantity_text

if TYPE_CHECKING:
    from hocket.job import Job

__all__ = ["capture_verb", "explain_verb", "profile_verb", "run_verb", "wait_policy", "working", "zoo_verb"]


def run_verb(args: Namespace) -> None:
    """The main job: measure eager, plan, run, compare."""
    policy = wait_policy()
    folder = None if args.report is None else output_folder(args.report)
    plan = None if args.plan is None else read_plan(args.plan)
    with working(args, "load the step") as (target, job, bar):
        import torch

        from hocket.native import available
        from hocket.trial import try_out

        if args.simulate is None:
            bar.update("load the native lanes (they are compiled once)")
            available()
        bar.update("capture, profile and try plans")
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        with target.blamed("the step"):
            trial = try_out(
                job,
                planner=args.planner,
                plan=plan,
                numerics=args.numerics,
                cache=args.cache,
                runs=args.runs,
                strict=args.strict,
                simulated=args.simulate,
                progress=bar.update,
            )
    notes = (*trial.comparison.notes, *([policy] if args.simulate is None else []))
    trial = replace(trial, comparison=replace(trial.comparison, notes=notes))
    planned = trial.fast.candidate
    page = None
    if folder is not None and planned is not None:
        with Bar("write the report", moving=True):
            page = trial.report(folder)["index.html"]
    trial.fast.close()
    if args.format == "json":
        print_json(trial.comparison.to_json() | ({} if page is None else {"report": str(page)}))
    else:
        tables: list[Any] = [comparison_table(trial.comparison)]
        if planned is not None:
            tables.append(plan_table(planned.captured.graph, planned.plan))
        if page is not None:
            tables.append(f"report: {page}")
        elif planned is not None:
            tables.append("report: add --report DIR for the page, the trace and the files behind them")
        print_tables(*tables)
    if folder is not None and planned is None:
        # Asked for and not there: that must not look like success.
        trial.report(folder)


def explain_verb(args: Namespace) -> None:
    """TARGET to what keeps it from being planned."""
    wait_policy()
    with working(args, "load the step", moving=True) as (target, job, bar):
        from hocket.explanation import explain

        bar.update("watch and record a few steps")
        with target.blamed("the step"):
            found = explain(job)
    if args.format == "json":
        print_json(found.to_json())
        return
    lines = [f"{found.name}: {found.verdict}"]
    if found.roles:
        lines.append(", ".join(f"{count} {role.replace('_', ' ')}" for role, count in found.roles.items()) + " ops")
    if found.written:
        lines.append(f"written by planned steps, too: {', '.join(found.written)}")
    if found.python:
        lines.append(f"run as Python before and after the planned ops: {found.python}")
    for number, one in enumerate(found.obstacles, 1):
        lines.append(f"{number}. {one.line + ': ' if one.line else ''}{one.reason}")
        lines += [f"   cure: {one.cure}"] if one.cure else []
    print_tables("\n".join(lines))


def capture_verb(args: Namespace) -> None:
    """TARGET to a graph."""
    wait_policy()
    path = output_file(args.output)
    with working(args, "load the step", moving=True) as (target, job, bar):
        from hocket.distributed.stages.crossings import Borders
        from hocket.tracing import capture

        bar.update("capture")
        start = perf_counter()
        with target.blamed("the step"):
            graph = Borders(capture(job.step, job.model, job.optimizer, job.batch(0), split=not args.joint)).graph
        seconds = perf_counter() - start
    assert path is not None
    graph.save(path)
    roles = Counter(op.role for op in graph.ops)
    if args.format == "json":
        print_json(
            {
                "target": job.name,
                "graph": str(path),
                "ops": len(graph),
                "roles": {role: roles[role] for role in ROLES if role in roles},
                "edges": len(graph.edges),
                "carried": len(graph.carried),
                "bytes": sum(op.size_bytes for op in graph.ops),
                "flops": sum(op.flops for op in graph.ops),
                "seconds": seconds,
            }
        )
        return
    print_tables(_roles_table(job.name, graph, seconds), *written(path))


def profile_verb(args: Namespace) -> None:
    """TARGET to costs, and to the graph they belong to."""
    wait_policy()
    path, graph_path = output_file(args.output), output_file(args.graph)
    machine = Machine.here()
    if args.widths is not None and max(args.widths) > machine.cores:
        raise UsageError(f"--widths: this machine has {count_text(machine.cores, 'core')}, got {max(args.widths)}")
    with working(args, "load the step") as (target, job, bar):
        from hocket.distributed.stages.crossings import Borders
        from hocket.profiling import profile
        from hocket.profiling.tracer import default_widths
        from hocket.tracing import capture

        bar.update("capture")
        start = perf_counter()
        widths = args.widths or default_widths(machine.cores)
        costs = Costs({})
        with target.blamed("the step"):
            captured = capture(job.step, job.model, job.optimizer, job.batch(0), split=not args.joint)
            for done, width in enumerate(widths):
                bar.update(f"time the ops at width {width}", done, len(widths))
                costs = costs.merged(profile(captured, widths=[width], runs=args.runs, machine=machine))
        seconds = perf_counter() - start
    assert path is not None
    costs.save(path)
    if graph_path is not None:
        Borders(captured).graph.save(graph_path)
    totals_us = {w: sum(costs.duration_us(op.name, width=w) for op in captured.graph.ops) for w in widths}
    if args.format == "json":
        print_json(
            {
                "target": job.name,
                "costs": str(path),
                **({} if graph_path is None else {"graph": str(graph_path)}),
                "ops": len(captured.graph),
                "runs": args.runs,
                "total_us": {str(width): total_us for width, total_us in totals_us.items()},
                "seconds": seconds,
            }
        )
        return
    title = f"{job.name}: {count_text(len(captured.graph), 'op')}, the fastest of {count_text(args.runs, 'run')} each"
    rows = [(str(width), duration_text(total_us)) for width, total_us in totals_us.items()]
    print_tables(
        table(title, ("width in threads", "all ops together"), rows),
        ops_table(captured.graph, costs, top=10),
        *written(path, graph_path),
    )


def zoo_verb(args: Namespace) -> None:
    """The names that may stand for TARGET. The zoo loads torch to tell."""
    from hocket import zoo

    entries = list(zoo.entries().values())
    if args.format == "json":
        options = {
            entry.name: [{"name": o.name, "default": o.default, "summary": o.summary} for o in entry.options]
            for entry in entries
        }
        fields = ("name", "summary", "batch_size", "optimizer", "extra", "package", "source")
        print_json(
            {
                "entries": [
                    {field: getattr(entry, field) for field in fields} | {"settings": options[entry.name]}
                    for entry in entries
                ]
            }
        )
        return
    rows = [
        (
            entry.name,
            str(entry.batch_size),
            entry.extra or "",
            f"{entry.summary}\n{' '.join(f'{o.name}={o.default}' for o in entry.options)}\n{entry.source}",
        )
        for entry in entries
    ]
    made = table("zoo", ("name", "batch", "extra", "what it is, settings, source"), rows)
    made.show_lines = True
    for column in made.columns[2:]:
        column.justify = "left"
    made.columns[0].no_wrap = True
    extras = " or ".join(f"'hocket[{extra}]'" for extra in sorted({e.extra for e in entries if e.extra}))
    print_tables(made, f"Where an extra is named: pip install {extras}")


# About 20 microseconds: as fast as libgomp's own default for a step by itself, and off the core soon after.
SPIN_COUNT = "10000"


def wait_policy() -> str:
    """Let OpenMP's idle threads spin only briefly, unless the user has decided; returns a note on what holds.

    By default they spin for milliseconds after each parallel region, on cores that another lane may need. Without any
    spinning (OMP_WAIT_POLICY=passive) eager itself takes two to four times as long where ops are small, which would
    make a plan look better than it is. The variable is read once, when torch loads its OpenMP library, so it is set
    here, in this process, before anything imports torch.
    """
    for variable in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        if variable in os.environ:
            return f"{variable}={os.environ[variable]}, as the environment had it"
    if "torch" in sys.modules:
        return "GOMP_SPINCOUNT is not set: torch was loaded before it could be, and its idle threads may spin for long"
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    return f"GOMP_SPINCOUNT={SPIN_COUNT} was set for this process, eager included, so that idle threads spin briefly"


@contextmanager
def working(args: Namespace, what: str, *, moving: bool = False) -> Iterator[tuple[Target, Job, Bar]]:
    """The job that the arguments name, and a bar; what the user's code prints goes to stderr meanwhile."""
    device = getattr(args, "device", None)
    target = Target(args.target, args.batch_size, args.optimizer, args.seed, dict(args.settings), device)
    with redirect_stdout(sys.stderr), Bar(what, moving=moving) as bar:
        yield target, target.job(), bar


def _roles_table(name: str, graph: Graph, seconds: float) -> Any:
    rows = []
    for role in ROLES:
        ops = [op for op in graph.ops if op.role == role]
        if ops:
            rows.append((role.replace("_", " "), ops))
    title = (
        f"{name}: {count_text(len(graph), 'op')}, {count_text(len(graph.edges), 'edge')}, "
        f"{count_text(len(graph.carried), 'edge')} to the next step, captured in {duration_text(seconds * 1e6)}"
    )
    made = table(
        title,
        ("role", "ops", "bytes", "flops"),
        [
            (
                name,
                f"{len(ops):,}",
                quantity_text(sum(op.size_bytes for op in ops), "B"),
                quantity_text(sum(op.flops for op in ops), "flop"),
            )
            for name, ops in [*rows, ("all", list(graph.ops))]
        ],
    )
    return made
