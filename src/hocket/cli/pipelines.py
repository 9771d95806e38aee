"""``hocket run TARGET --ranks K``: the target's step over K processes, as a pipeline or by a partition of its ops."""

from __future__ import annotations

import copy
import gc
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hocket.cli.console import UsageError, emit, prints_aside, table
from hocket.cli.files import read_plan
from hocket.cli.ranks import is_rank, start_ranks
from hocket.cli.steps import run_verb
from hocket.cli.targets import Target, wait_policy, working
from hocket.errors import InputError
from hocket.ir.limits import usable_cpus
from hocket.reporting.words import count_text, duration_text, quantity_text

if TYPE_CHECKING:
    from hocket.distributed.pipelines.run import PipelineRun
    from hocket.ir import Plan
    from hocket.job import Job

# Options of `hocket run` that a pipeline does not take, with their defaults.
_NOT_FOR_PIPELINES = {
    "planner": "auto",
    "plan": None,
    "simulate": None,
    "numerics": "bitwise",
    "strict": False,
    "report": None,
    "device": None,
}


def run_or_pipeline(args: Namespace) -> None:
    """``hocket run``, with ``--ranks`` or without."""
    of_pipeline = args.microbatches or args.schedule or args.memory_bytes
    if args.ranks is None:
        if of_pipeline:
            raise UsageError("--microbatches, --schedule and --memory-bytes are of a pipeline: add --ranks")
        if args.partition is not None:
            raise UsageError("--partition: parts run on several ranks: add --ranks")
        run_verb(args)
        return
    wait_policy()
    for name, default in _NOT_FOR_PIPELINES.items():
        if getattr(args, name) != default:
            raise UsageError(f"--{name}: not with --ranks: its ranks run on CPUs, by the plan of all of them")
    if args.partition is None:
        _pipeline(args)
    elif of_pipeline:
        raise UsageError("--partition: not with --microbatches, --schedule and --memory-bytes, which are of a pipeline")
    else:
        _parts(args)


def _set_threads(args: Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads or max(1, usable_cpus() // args.ranks))


def _parts(args: Namespace) -> None:
    """Run the ops of each part on its rank: one of the ranks of a torchrun job, or, alone, all of them."""
    plan = read_plan(args.partition)
    lanes = [lane for lane in plan.lanes if lane.kind != "channel"]
    if len(lanes) != args.ranks:
        raise UsageError(f"{args.partition}: it has {count_text(len(lanes), 'part')}, and --ranks is {args.ranks}")
    if not is_rank(args.ranks, f"--ranks is {args.ranks}"):
        start_ranks(args, args.ranks)
        return
    target = Target.of(args)
    with prints_aside():
        found = _run_parts(args, target, plan)
    if not found:
        return
    rows = [
        ("step, measured", duration_text(found["measured_us"])),
        ("eager, one process", duration_text(found["eager_us"])),
        ("ops of each rank", ", ".join(f"{number:,}" for number in found["ops"])),
        ("losses, parameters and state", "eager's, to the bit" if found["is_bitwise"] else "not eager's"),
    ]
    title = f"{args.target}: {count_text(args.ranks, 'rank')}, {count_text(found['threads'], 'thread')} each"
    emit(args, found, table(title, ("", ""), rows))
    if not found["is_bitwise"]:
        raise InputError(f"{args.target}: the step over {args.ranks} ranks has not given eager's bits")


def _run_parts(args: Namespace, target: Target, plan: Plan) -> dict[str, Any]:
    """Train for some steps, and, at rank 0, return what was measured, beside eager from the same state."""
    import torch

    from hocket import distribute

    _set_threads(args)
    job = target.job()
    before = copy.deepcopy(_state(job))
    random_state = torch.get_rng_state()
    batches = [job.batch(number) for number in range(1 + args.runs)]
    fast = distribute.stages(job.step, job.model, job.optimizer, partition=plan)
    with target.blamed("the step"), fast:
        losses, seconds = _timed(fast, batches)
        fast.gather()
    if fast.rank != 0:
        return {}
    after = copy.deepcopy(_state(job))
    for member, state in zip(_members(job), before, strict=True):
        member.load_state_dict(state)
    torch.set_rng_state(random_state)
    with target.blamed("the step"):
        eager_losses, eager_seconds = _timed(job.step, batches)
    return {
        "target": args.target,
        "ranks": args.ranks,
        "threads": torch.get_num_threads(),
        "ops": [len(lane.ops) for lane in plan.lanes if lane.kind != "channel"],
        "measured_us": median(seconds[1:]) * 1e6,  # the first step captures
        "steps_us": [each * 1e6 for each in seconds[1:]],
        "eager_us": median(eager_seconds[1:]) * 1e6,
        "is_bitwise": _are_equal((losses, after), (eager_losses, _state(job))),
    }


def _members(job: Job) -> tuple[Any, ...]:
    return (*job.models, *job.optimizers)


def _state(job: Job) -> list[dict[str, Any]]:
    return [member.state_dict() for member in _members(job)]


def _timed(step: Callable[[Any], Any], batches: Sequence[Any]) -> tuple[list[Any], list[float]]:
    """Copies of what the steps returned, and their durations."""
    import torch
    from torch.utils._pytree import tree_map_only

    results, seconds = [], []
    for batch in batches:
        start = perf_counter()
        result = step(batch)
        seconds.append(perf_counter() - start)
        results.append(tree_map_only(torch.Tensor, lambda value: value.detach().clone(), result))
    return results, seconds


def _are_equal(ours: Any, theirs: Any) -> bool:
    """True if all tensors have the same bits, and all other values are equal."""
    import torch
    from torch.utils._pytree import tree_flatten

    from hocket.profiling.exact_widths import same_bits

    (mine, shape), (other, other_shape) = tree_flatten(ours), tree_flatten(theirs)
    return shape == other_shape and all(
        same_bits(one, two) if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) else one == two
        for one, two in zip(mine, other, strict=True)
    )


def _pipeline(args: Namespace) -> None:
    """Run a step in stages: one of the ranks of a torchrun job, or, alone, all of them."""
    microbatches = args.microbatches or args.ranks
    if microbatches < args.ranks:
        raise UsageError(f"--microbatches: {microbatches} for {args.ranks} ranks: fewer than one for each")
    settings = {"microbatches": microbatches, "schedule": args.schedule or "1f1b", "memory_bytes": args.memory_bytes}
    if not is_rank(args.ranks, f"--ranks is {args.ranks}"):
        _check(args, settings)
        start_ranks(args, args.ranks)
        return
    target = Target.of(args)
    with prints_aside():
        made = _run(args, target, settings)
    if os.environ["RANK"] == "0":
        _tell(args, made, microbatches)


def _check(args: Namespace, settings: dict[str, Any]) -> None:
    """Refuse a step that cannot be a pipeline before ranks are started, each of which would report it."""
    from hocket.distributed.pipelines.run import check_pipeline

    with working(args, "load the step", moving=True) as (target, job, bar):
        bar.update("trace the model")
        with target.blamed("the step as a pipeline"):
            check_pipeline(job, ranks=args.ranks, **settings)


def _run(args: Namespace, target: Target, settings: dict[str, Any]) -> PipelineRun:
    import torch.distributed as dist

    from hocket.distributed.pipelines.run import run_pipeline

    _set_threads(args)
    job = target.job()
    dist.init_process_group("gloo")
    try:
        with target.blamed("the step as a pipeline"):
            return run_pipeline(job, runs=args.runs, **settings)
    finally:
        gc.collect()  # stages hold the group, whose threads abort the process if they outlive the interpreter
        dist.destroy_process_group()


def _tell(args: Namespace, made: PipelineRun, microbatches: int) -> None:
    cut = made.cut
    rows = [
        (
            str(number),
            str(stage.rank),
            f"{stage.ops:,}",
            duration_text(stage.forward_us),
            duration_text(stage.backward_us),
            quantity_text(stage.received_bytes, "B"),
            quantity_text(stage.kept_bytes, "B"),
            f"{stage.in_flight} x {quantity_text(stage.saved_bytes, 'B')}",
        )
        for number, stage in enumerate(cut.stages)
    ]
    columns = ("stage", "rank", "ops", "forward", "backward", "received", "parameters", "saved")
    facts = [
        ("step, measured", duration_text(made.step_us)),
        ("step, predicted", duration_text(cut.step_us)),
        ("eager, one process", duration_text(made.eager_us)),
        ("farthest gradient from eager's", f"{made.gradient_error:.2g}"),
        ("largest memory of a rank", quantity_text(max(cut.memory_bytes), "B")),
        ("link", f"{duration_text(made.link.latency_us)}, {quantity_text(made.link.bytes_per_s, 'B')}/s"),
    ]
    title = (
        f"{args.target}: {count_text(len(cut.stages), 'stage')} on {count_text(args.ranks, 'rank')}, "
        f"{cut.order.schedule}, {microbatches} micro-batches"
    )
    summary = table(f"forward and backward, {count_text(made.threads, 'thread')} a rank", ("", ""), facts)
    emit(args, _document(args, made, microbatches), table(title, columns, rows), summary)


def _document(args: Namespace, made: PipelineRun, microbatches: int) -> dict[str, Any]:
    cut = made.cut
    return {
        "target": args.target,
        "ranks": args.ranks,
        "microbatches": microbatches,
        "schedule": cut.order.schedule,
        "threads": made.threads,
        "stages": [stage._asdict() for stage in cut.stages],
        "memory_bytes": list(cut.memory_bytes),
        "predicted_us": cut.step_us,
        "measured_us": made.step_us,
        "steps_us": list(made.steps_us),
        "eager_us": made.eager_us,
        "gradient_error": made.gradient_error,
        "link": asdict(made.link),
    }
