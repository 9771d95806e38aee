"""Verbs that need a training step: run, explain, capture, profile, load and tune, and the zoo of such steps."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from contextlib import closing
from dataclasses import replace
from math import isfinite
from time import perf_counter
from typing import Any

from hocket.cli.console import Bar, UsageError, emit, prints_aside, table
from hocket.cli.files import output_file, output_files, output_folder, read_plan, written
from hocket.cli.targets import Target, only_model, wait_policy, working
from hocket.errors import InputError
from hocket.ir import ROLES, Costs, Graph, Machine
from hocket.reporting import Comparison, comparison_table, ops_table, plan_table
from hocket.reporting.words import count_text, duration_text, plain, quantity_text, value_text

# Places that a table names of those that a step writes. JSON has all of them.
MAX_WRITTEN = 8


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
    tables: list[Any] = [comparison_table(trial.comparison)]
    if planned is not None:
        tables.append(plan_table(planned.captured.graph, planned.plan))
        where = "add --report DIR for the page, the trace and the files behind them" if page is None else page
        tables.append(f"report: {where}")
    if sys.stdout.isatty():
        tables.insert(0, _headline(trial.comparison))
    emit(args, trial.comparison.to_json() | ({} if page is None else {"report": str(page)}), *tables)
    if folder is not None and planned is None:
        trial.report(folder)  # raises, so that the exit status tells that there is no report


def _headline(comparison: Comparison) -> str:
    """Return the outcome in one line and at most three lines of reasons, to stand above the figures on a terminal."""
    why = (f"verdict {comparison.verdict}: {comparison.why}", comparison.disagreement, comparison.bound)
    return "\n".join(plain(line) for line in (f"{comparison.outcome}, {comparison.result}", *why) if line)


def explain_verb(args: Namespace) -> None:
    """TARGET to what keeps it from being planned."""
    wait_policy()
    with working(args, "load the step", moving=True) as (target, job, bar):
        from hocket.explanation import explain
        from hocket.native import available

        bar.update("load the native lanes (they are compiled once)")
        available()
        bar.update("watch and record a few steps")
        with target.blamed("the step"):
            found = explain(job)
    lines = [f"{found.name}: {found.verdict}"]
    if found.has_regions:
        lines.append("its Python runs as it is, its models and updates by plan, where that turns out to be faster")
    if found.roles:
        lines.append(", ".join(f"{count} {role.replace('_', ' ')}" for role, count in found.roles.items()) + " ops")
    if found.written:
        further = len(found.written) - MAX_WRITTEN
        shown = [*found.written[:MAX_WRITTEN], *([f"and {further} more"] if further > 0 else [])]
        lines.append(f"written by planned steps, too: {', '.join(shown)}")
    if found.python:
        lines.append(f"run as Python before and after the planned ops: {found.python}")
    for number, one in enumerate(found.obstacles, 1):
        lines.append(f"{number}. {one.line + ': ' if one.line else ''}{one.reason}")
        lines += [f"   cure: {one.cure}"] if one.cure else []
    emit(args, found.to_json(), "\n".join(map(plain, lines)))


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
    found = {
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
    emit(args, found, _roles_table(job.name, graph, seconds), *written(path))


def profile_verb(args: Namespace) -> None:
    """TARGET to costs, and to the graph they belong to."""
    wait_policy()
    path, graph_path = output_files(args.output, args.graph)
    machine = Machine.here()
    if args.widths is not None and max(args.widths) > machine.cores:
        raise UsageError(f"--widths: this machine has {count_text(machine.cores, 'core')}, got {max(args.widths)}")
    with working(args, "load the step") as (target, job, bar):
        from hocket.distributed.stages.crossings import Borders
        from hocket.profiling import profile
        from hocket.profiling.hill_climb import FEW_CORES
        from hocket.profiling.tracer import default_widths
        from hocket.tracing import capture

        bar.update("capture")
        start = perf_counter()
        is_climb = args.widths is None and machine.cores > FEW_CORES
        widths = () if is_climb else args.widths or default_widths(machine.cores)
        costs = Costs({})
        with target.blamed("the step"):
            captured = capture(job.step, job.model, job.optimizer, job.batch(0), split=not args.joint)
            for done, width in enumerate(widths):
                bar.update(f"time the ops at width {width}", done, len(widths))
                costs = costs.merged(profile(captured, widths=[width], runs=args.runs, machine=machine))
            if is_climb:
                bar.update("time the ops at the widths of a hill climb")
                costs = profile(captured, runs=args.runs, machine=machine)
                widths = tuple(sorted({int(width) for row in costs.durations_us.values() for width in row}))
        seconds = perf_counter() - start
    assert path is not None
    costs.save(path)
    if graph_path is not None:
        Borders(captured).graph.save(graph_path)
    totals_us = {w: sum(costs.duration_us(op.name, width=w) for op in captured.graph.ops) for w in widths}
    found = {
        "target": job.name,
        "costs": str(path),
        **({} if graph_path is None else {"graph": str(graph_path)}),
        "ops": len(captured.graph),
        "runs": args.runs,
        "total_us": {str(width): total_us for width, total_us in totals_us.items()},
        "seconds": seconds,
    }
    title = f"{job.name}: {count_text(len(captured.graph), 'op')}, the fastest of {count_text(args.runs, 'run')} each"
    rows = [(str(width), duration_text(total_us)) for width, total_us in totals_us.items()]
    tables = table(title, ("width in threads", "all ops together"), rows), ops_table(captured.graph, costs, top=10)
    emit(args, found, *tables, *written(path, graph_path))


def zoo_verb(args: Namespace) -> None:
    """The names that may stand for TARGET. The zoo loads torch to tell."""
    from hocket import zoo

    entries = list(zoo.entries().values())
    fields = ("name", "summary", "batch_size", "optimizer", "extra", "package", "source")
    listed = [
        {field: getattr(entry, field) for field in fields}
        | {"settings": [{"name": o.name, "default": o.default, "summary": o.summary} for o in entry.options]}
        for entry in entries
    ]
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
    emit(args, {"entries": listed}, made, f"Where an extra is named: pip install {extras}")


def load_verb(args: Namespace) -> None:
    """Stream FILE into MODEL while its first step runs. With ``--reorder``, write FILE in the order of first use."""
    wait_policy()
    path, file = output_file(args.reorder), args.file.absolute()  # the user's code may leave the folder
    path = None if path is None else path.absolute()
    with working(args, "load the step") as (target, job, bar):
        from hocket.loading import finish, load, open_weights, recorded_first_use, reorder

        model = only_model(job, "load")
        with closing(open_weights(file)) as weights:
            tensors, size_bytes = len(weights.tensors), weights.size_bytes
        batch = job.batch(0)
        bar.update("load, and run the first step")
        start = perf_counter()
        load(model, file, order=args.order)
        with target.blamed("the step"):
            job.step(batch)
        first_s = perf_counter() - start
        finish(model)
        bar.update("run the step again")
        start = perf_counter()
        with target.blamed("the step"):
            job.step(batch)
        next_s = perf_counter() - start
        if path is not None:
            bar.update("write the tensors in the order of their use")
            with target.blamed("the step"), recorded_first_use(model) as order:
                job.step(batch)
            reorder(file, path, order)
    found = {
        "target": job.name,
        "file": str(args.file),
        "tensors": tensors,
        "bytes": size_bytes,
        "first_step_s": first_s,
        "next_step_s": next_s,
        **({} if path is None else {"reordered": str(path)}),
    }
    title = f"{job.name}: {count_text(tensors, 'tensor')}, {quantity_text(size_bytes, 'B')}"
    rows = [
        ("loading and the first step", duration_text(first_s * 1e6)),
        ("the next step", duration_text(next_s * 1e6)),
    ]
    emit(args, found, table(title, ("", "took"), rows), *written(path))


def tune_verb(args: Namespace) -> None:
    """Run the search that a function makes, and list its best trials."""
    wait_policy()
    target = Target(args.target)
    path = target.path
    if path is None:
        raise UsageError(f"{args.target}: expected file.py:function")
    with prints_aside():
        study = target.result(path)
    if not all(hasattr(study, name) for name in ("best_trials", "trials", "directions")):
        got = "None" if study is None else f"a value of type {type(study).__name__}"
        raise InputError(f"{args.target}: expected it to return the study of hocket.tune(...), got {got}")
    if len(study.directions) != 1:
        raise UsageError(f"{args.target}: expected a study of one direction, got {len(study.directions)}")
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    maximize = study.direction.name == "MAXIMIZE"
    best = sorted(complete, key=lambda trial: (-trial.value if maximize else trial.value, trial.number))[: args.top]
    counts = Counter(trial.state.name.lower() for trial in study.trials)
    shown = [_plain({"number": trial.number, "value": trial.value, "params": trial.params}) for trial in best]
    document = {"study": study.study_name, "trials": dict(counts), "best": shown}
    words = ", ".join(f"{number} {state}" for state, number in counts.items())
    title = f"{study.study_name}: {len(study.trials)} trials, {words}"
    names = list(dict.fromkeys(name for trial in best for name in trial.params))
    rows = [
        (str(trial.number), f"{trial.value:.6g}", *(value_text(trial.params.get(name)) for name in names))
        for trial in best
    ]
    emit(args, document, table(title, ("trial", "value", *names), rows))


def _plain(value: Any) -> Any:
    """Return a value for JSON. Values that JSON cannot represent, such as infinity, become text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    is_known = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if is_known else str(value)


def _roles_table(name: str, graph: Graph, seconds: float) -> Any:
    by_role = {role: [op for op in graph.ops if op.role == role] for role in ROLES}
    title = (
        f"{name}: {count_text(len(graph), 'op')}, {count_text(len(graph.edges), 'edge')}, "
        f"{count_text(len(graph.carried), 'edge')} to the next step, captured in {duration_text(seconds * 1e6)}"
    )
    rows = [
        (
            *(role.replace("_", " "), f"{len(ops):,}", quantity_text(sum(op.size_bytes for op in ops), "B")),
            quantity_text(sum(op.flops for op in ops), "flop"),
        )
        for role, ops in (by_role | {"all": list(graph.ops)}).items()
        if ops or role == "all"
    ]
    return table(title, ("role", "ops", "bytes", "flops"), rows)
