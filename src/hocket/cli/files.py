"""Verbs that work on files, one function each, without loading torch. Each takes the parsed arguments."""

from __future__ import annotations

import inspect
import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hocket.cache_folder import CHECKSUM_SUFFIX, KINDS, LOCK, cached, remove
from hocket.checking import check
from hocket.cli.console import Bar, UsageError, emit, print_json, table
from hocket.errors import InputError, PlanError
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.ir._fields import read_file, write_text
from hocket.planning import Bounds, bounds, efficiency, plan, planners
from hocket.reporting import Report, plan_table, timeline_table, write_report, write_trace
from hocket.reporting.summary import lane_uses
from hocket.reporting.words import duration_text, quantity_text
from hocket.simulation import simulate


def plan_verb(args: Namespace) -> None:
    """Make a plan from GRAPH and COSTS."""
    given: dict[str, Any] = {"lanes": args.lanes, "order": args.order, "strategies": args.strategies}
    options = {name: value for name, value in given.items() if value is not None}
    takes = inspect.signature(planners()[args.planner]).parameters
    for option in options:
        if option not in takes:
            raise UsageError(f"--{option} is no option of the planner {args.planner}")
    if args.strategies is not None:
        options |= {"lookahead_ms": 0.0, "coarsen_us": 0.0}  # a search would hide what the strategies do
    target = output_file(args.output)
    with Bar("plan", moving=True):
        graph, costs, machine = Graph.load(args.graph), Costs.load(args.costs), _machine(args)
        made = plan(graph, costs, machine, planner=args.planner, **options)
        check(graph, made, machine)
        timeline = simulate(graph, made, costs, machine)
        limits = bounds(graph, costs, machine)
    if target is not None:
        write_text(target, str(made))
    path = {} if target is None else {"path": str(target)}
    times = {"predicted_us": timeline.makespan_us, **_limits(limits, timeline)}
    document = {"planner": made.planner, "lanes": len(made.lanes), **times, **path, "plan": str(made)}
    if target is None and args.format == "table":
        print(made, end="", flush=True)
    found = _limits_table("prediction", limits, timeline)
    emit(args, document, plan_table(graph, made), found, *written(target), to_stderr=True)


def check_verb(args: Namespace) -> None:
    """Check that PLAN may run GRAPH."""
    graph, found = Graph.load(args.graph), read_plan(args.plan)
    machine = Machine.load(args.machine) if args.machine else None
    try:
        with Bar("check", moving=True):
            check(graph, found, machine)
    except PlanError as error:
        if args.format == "json":
            print_json({"legal": False, "error": str(error), "op": error.op, "lane": error.lane})
        raise
    emit(args, {"legal": True}, "legal")


def simulate_verb(args: Namespace) -> None:
    """Predict the timeline of PLAN."""
    target, trace = output_files(args.output, args.trace)
    with Bar("simulate", moving=True):
        graph, found, costs = Graph.load(args.graph), read_plan(args.plan), Costs.load(args.costs)
        machine = _machine(args)
        timeline = simulate(graph, found, costs, machine)
        limits = bounds(graph, costs, machine)
        misfits = _misfits(graph, found, machine)
    if target is not None:
        timeline.save(target)
    if trace is not None:
        write_trace(trace, {"simulated": timeline}, graph)
    document: dict[str, Any] = {
        "makespan_us": timeline.makespan_us,
        "utilisation": timeline.utilisation,
        "lanes": [use._asdict() for use in lane_uses(timeline)],
        **_limits(limits, timeline),
        "notes": misfits,
    }
    document |= {name: str(path) for name, path in (("timeline", target), ("trace", trace)) if path is not None}
    tables = timeline_table(timeline), _limits_table("bounds", limits, timeline)
    emit(args, document, *tables, *written(target, trace), notes=misfits)


def bounds_verb(args: Namespace) -> None:
    """Compute the bounds of all plans of GRAPH."""
    with Bar("bounds", moving=True):
        limits = bounds(Graph.load(args.graph), Costs.load(args.costs), _machine(args))
    emit(args, _limits(limits), _limits_table("bounds", limits))


def report_verb(args: Namespace) -> None:
    """Write the page, the trace and the files behind them."""
    folder = output_folder(args.output)
    with Bar("report", moving=True):
        graph, found, costs = Graph.load(args.graph), read_plan(args.plan), Costs.load(args.costs)
        machine = _machine(args)
        limits = bounds(graph, costs, machine)
        timelines = _timelines(args.timelines)
        notes = _misfits(graph, found, machine)
        if not timelines:
            timelines = {"simulated": simulate(graph, found, costs, machine)}
        paths = write_report(
            folder,
            Report(
                title=args.title,
                graph=graph,
                plan=found,
                costs=costs,
                timelines=timelines,
                lower_us=limits.lower_us,
                upper_us=limits.upper_us,
                notes=notes,
            ),
        )
    page = str(paths["index.html"])
    files = {name: str(path) for name, path in paths.items()}
    emit(args, {"report": page, "files": files, "notes": notes}, f"report: {page}", notes=notes)


def machine_verb(args: Namespace) -> None:
    """Describe this machine, as a file that the other verbs take."""
    target = output_file(args.output)
    machine = Machine.here()
    if args.measure:
        from hocket.profiling.analytic import measure_rates

        with Bar("measure rates"):
            machine = measure_rates(machine)
    if target is not None:
        machine.save(target)
    rows = [
        (
            device.name,
            device.kind,
            str(device.cores),
            str(device.smt),
            quantity_text(device.flops_per_s, "flop/s") if device.flops_per_s else "not measured",
            quantity_text(device.bytes_per_s, "B/s") if device.bytes_per_s else "not measured",
            quantity_text(device.memory_bytes, "B") if device.memory_bytes else "not known",
        )
        for device in machine.devices
    ]
    columns = ("device", "kind", "cores", "threads/core", "arithmetic", "memory traffic", "memory")
    # The document itself: redirected into a file it is one that --machine takes.
    emit(args, machine.document(), table("machine", columns, rows, words=2), *written(target))


def cache_verb(args: Namespace) -> None:
    """List what is in the user's cache folder, or delete it."""
    rows, document = [], {}
    for kind in KINDS:
        folder, found = cached(kind)
        size = sum(map(_size_bytes, found))
        number = sum(each.name != LOCK and not each.name.endswith(CHECKSUM_SUFFIX) for each in found)
        document[kind] = {"folder": str(folder), "entries": number, "bytes": size}
        rows.append((kind, str(folder), str(number), quantity_text(size, "B")))
        if args.action == "clear":
            for each in found:
                remove(each)
    title = "cache" if args.action == "info" else "cleared"
    emit(args, {title: document}, table(title, ("kind", "folder", "entries", "size"), rows, words=2))


def _size_bytes(path: Path) -> int:
    """Size of a file or a folder. What another process deletes meanwhile has none."""
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(map(_size_bytes, path.iterdir()))
    except OSError:
        return 0


def output_file(path: Path | None) -> Path | None:
    """Return `path` if a file can be written there. Called before the work, so that long work is not lost."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no directory {path.parent} to write into")
    if path.exists() and not path.is_file():
        raise InputError(
            f"{path}: expected a file to write, it is {'a directory' if path.is_dir() else 'not a regular file'}"
        )
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path}: the directory {path.parent} may not be written to")
    return path


def output_files(first: Path | None, second: Path | None) -> tuple[Path | None, Path | None]:
    """Return both paths if files can be written there, and if they are not of one file."""
    found = output_file(first), output_file(second)
    if first is not None and second is not None and first.resolve() == second.resolve():
        raise UsageError(f"{first}: expected two files to write, got one twice")
    return found


def output_folder(path: Path) -> Path:
    """Return `path` if it is a directory or one can be made there."""
    for place in (path, *path.parents):
        if place.exists():
            if not place.is_dir():
                raise InputError(f"{path}: expected a directory to write into, {place} is a file")
            if not os.access(place, os.W_OK):
                raise InputError(f"{path}: the directory {place} may not be written to")
            break
    return path


def written(*paths: Path | None) -> list[str]:
    """Return a line that names the files that were written, or no line."""
    return [f"written: {', '.join(str(path) for path in paths if path is not None)}"] if any(paths) else []


def _machine(args: Namespace) -> Machine:
    return Machine.load(args.machine) if args.machine else Machine.here()


def read_plan(path: Path) -> Plan:
    """Read a plan, or raise an `InputError` that names the line."""
    try:
        text = read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a plan: {error}") from None
    return Plan.parse(text, source=str(path))


def _misfits(graph: Graph, found: Plan, machine: Machine) -> list[str]:
    """Notes on why the plan may not run on the machine: it is simulated all the same."""
    try:
        check(graph, found, machine)
    except PlanError as error:
        return [f"this plan may not run on this machine: {error}"]
    return []


def _timelines(paths: list[Path]) -> dict[str, Timeline]:
    """Load timelines, named after their files without the prefix that a report adds."""
    found: dict[str, Timeline] = {}
    for path in paths:
        stem = path.stem.removeprefix("timeline-")
        name, number = stem, 2
        while name in found:
            name, number = f"{stem}-{number}", number + 1
        found[name] = Timeline.load(path)
    return found


def _limits(limits: Bounds, timeline: Timeline | None = None) -> dict[str, float]:
    return asdict(limits) | ({} if timeline is None else {"efficiency": efficiency(timeline, limits)})


def _limits_table(title: str, limits: Bounds, timeline: Timeline | None = None) -> Any:
    rows = [
        ("lower bound", duration_text(limits.lower_us), "no plan is shorter"),
        ("longest chain", duration_text(limits.critical_path_us), "each op where it is fastest"),
        ("all ops", duration_text(limits.work_us), "time by threads, at the least"),
        ("upper bound", duration_text(limits.upper_us), "one op after another, on all cores"),
    ]
    if timeline is not None:
        rows.insert(0, ("makespan", duration_text(timeline.makespan_us), "simulated"))
        rows.append(("efficiency", f"{efficiency(timeline, limits):.2f}", "0 at the upper bound, 1 at the lower"))
    made = table(title, ("", "", ""), rows)
    made.columns[2].justify = "left"
    made.columns[2].style = "dim"
    return made
