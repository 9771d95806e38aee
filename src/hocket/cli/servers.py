"""Verbs of jobs with parameter servers: ``ps`` trains, and ``agent`` runs forwards on what such a job publishes."""

from __future__ import annotations

import os
from argparse import Namespace
from math import isfinite
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hocket.cli.console import UsageError, emit, note, prints_aside, table
from hocket.cli.files import output_file
from hocket.cli.ranks import is_rank, start_ranks
from hocket.cli.targets import Target, only_model, wait_policy, working
from hocket.ir._fields import written_whole
from hocket.reporting.words import count_text, duration_text

if TYPE_CHECKING:
    from hocket.distributed.worker import DistributedStep
    from hocket.ir import Plan
    from hocket.job import Job
    from hocket.planning import Bounds

# Loading torch in this process, to count parameters, takes longer than starting a few ranks too many.
FEW_SERVERS = 4


def ps_verb(args: Namespace) -> None:
    """Train with workers and servers, as one of the ranks of a torchrun job, or by starting all of them."""
    ranks = args.workers + args.servers
    path = None if args.output is None else output_file(args.output.absolute())  # the user's code may leave the folder
    if not is_rank(ranks, f"{args.workers} workers and {args.servers} servers need {ranks}"):
        if args.servers > FEW_SERVERS:
            _check_servers(args)
        may_fail = range(1, args.workers) if args.survive else ()
        start_ranks(args, ranks, with_agents=args.publish_every is not None, may_fail=may_fail)
        return
    wait_policy()
    target = Target.of(args)
    rank = int(os.environ["RANK"])
    with prints_aside():
        job = target.job()
        if rank >= args.workers:
            _serve(args, job)
            return
        found = _work(args, target, job, rank)
        if rank == 0 and path is not None:
            _save(job, path)
    if rank != 0:
        return
    rows = [
        ("step, median", duration_text(found["step_us"])),
        ("step, predicted", duration_text(found["predicted_us"])),
        ("order", found["planner"]),
        ("steps in which parameters arrived in this order", f"{found['steps_in_order']} of {found['steps']}"),
    ]
    first, last = found["first_loss"], found["last_loss"]
    rows += [] if None in (first, last) else [("loss", f"{first:.6g} to {last:.6g}")]
    workers, servers = count_text(args.workers, "worker"), count_text(args.servers, "server")
    title = f"{found['target']}: {workers}, {servers}, {count_text(args.steps, 'step')}"
    emit(args, found, table(title, ("", ""), rows))


def _check_servers(args: Namespace) -> None:
    """Raise if there are more servers than parameters, before their processes start."""
    with prints_aside():
        models = Target.of(args).job().models
    trained = {each for model in models for each in model.parameters() if each.requires_grad}
    if args.servers > len(trained):
        have = count_text(len(trained), "parameter")
        raise UsageError(f"--servers: {args.target} has {have} for {args.servers} servers")


def _serve(args: Namespace, job: Job) -> None:
    from hocket import distribute

    settings = {"num_servers": args.servers, "timeout_s": args.timeout, "survive": args.survive}
    distribute.server(job.step, job.model, job.optimizer, job.batch(0), **settings)


def _work(args: Namespace, target: Target, job: Job, rank: int) -> dict[str, Any]:
    """Train as a worker, and return the summary that rank 0 prints."""
    from hocket import distribute

    settings = {"num_servers": args.servers, "order": args.order, "timeout_s": args.timeout}
    fast = distribute.worker(job.step, job.model, job.optimizer, **settings)
    seconds, in_order, losses = [], 0, []
    if args.publish_every is not None and rank == 0:
        note(f"agents: hocket agent {args.target} {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    with fast:
        with target.blamed("the step"):
            first = fast.start(job.batch(rank))
        for step in range(first, args.steps):
            batch = job.batch(step * args.workers + rank)
            start = perf_counter()
            with target.blamed("the step"):
                loss = fast(batch)
            seconds.append(perf_counter() - start)
            losses.append(_number(loss))
            in_order += fast.arrivals() == _planned(fast)
            if args.publish_every is not None and fast.steps % args.publish_every == 0:
                fast.publish()
        fast.gather()
    assert fast.plan is not None
    return {
        "target": job.name or args.target,
        "workers": args.workers,
        "servers": args.servers,
        "steps": args.steps,
        "planner": fast.plan.planner,
        "order": {server: list(names) for server, names in _planned(fast).items()},
        "steps_in_order": in_order,
        "step_us": median(seconds[1:] or seconds) * 1e6,  # the first one warms up
        "steps_us": [each * 1e6 for each in seconds],
        **_predicted(fast.predicted_us, fast.bounds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _predicted(predicted_us: float, bounds: Bounds | None) -> dict[str, float]:
    lower_us, upper_us = (0.0, 0.0) if bounds is None else (bounds.lower_us, bounds.upper_us)
    return {"predicted_us": predicted_us, "lower_us": lower_us, "upper_us": upper_us}


def _planned(fast: DistributedStep) -> dict[str, tuple[str, ...]]:
    """Map each server to its parameters in the order of the plan."""
    assert fast.plan is not None
    lanes = {lane.device.partition("->")[0]: lane for lane in fast.plan.lanes if lane.device.startswith("server")}
    return {
        server: tuple(op.removeprefix("pull:") for op in lanes[server].ops) if server in lanes else ()
        for server in fast.arrivals()
    }


def _number(value: Any) -> float | None:
    """Return a loss if it is one finite number, which JSON can represent, else None."""
    try:
        found = float(value.item() if hasattr(value, "item") else value)  # torch warns of gradients in `float`
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if isfinite(found) else None


def _save(job: Job, path: Any) -> None:
    import torch

    states = {
        "model": [model.state_dict() for model in job.models],
        "optimizer": [optimizer.state_dict() for optimizer in job.optimizers],
    }
    with written_whole(path, binary=True) as file:
        torch.save(states, file)
    note(f"checkpoint of the plain model and optimizer: {path}")


def agent_verb(args: Namespace) -> None:
    """Run forwards of MODEL, each on the newest version that the job at ADDRESS has published."""
    wait_policy()
    with working(args, "wait for the job, and for a version") as (target, job, bar):
        from hocket import distribute

        model = only_model(job, "an agent")
        seconds, versions = [], []
        options = {"order": args.order, "every_call": args.every_call, "ahead": not args.not_ahead}
        with distribute.agent(model.eval(), args.address, timeout_s=args.timeout, **options) as fresh:
            bar.update("run forwards")
            for call in range(args.calls):
                batch = job.batch(call)
                inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
                start = perf_counter()
                with target.blamed("the forward"):
                    fresh(inputs)
                seconds.append(perf_counter() - start)
                versions.append(fresh.version)
    plan: Plan | None = fresh.plan
    assert plan is not None
    call_us = median(seconds[1:] or seconds) * 1e6  # the first one captures and plans
    found = {
        "target": job.name or args.target,
        "calls": fresh.calls,
        "versions": versions,
        "planner": plan.planner,
        "call_us": call_us,
        "calls_us": [each * 1e6 for each in seconds],
        **_predicted(fresh.predicted_us, fresh.bounds),
    }
    rows = [
        ("call, median", duration_text(call_us)),
        ("call with a new version, predicted", duration_text(fresh.predicted_us)),
        ("order", plan.planner),
        ("versions", f"{len(set(versions))}, from {versions[0]} to {versions[-1]}"),
    ]
    emit(args, found, table(f"{found['target']}: {count_text(fresh.calls, 'call')}", ("", ""), rows))
