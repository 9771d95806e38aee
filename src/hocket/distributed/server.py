"""`hocket.distribute.server`: keeps a shard of the parameters, and updates it when all gradients have arrived."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import Any

from hocket.arguments import packed, spreading
from hocket.distributed.agent_server import NEWEST, AgentServer, Version, Versions
from hocket.distributed.channels import ServingChannel, SummingChannel
from hocket.distributed.job import CLOSE, GATHER, PUBLISH, REJOIN, ending_on_error
from hocket.distributed.membership import DEFAULT_TIMEOUT_S
from hocket.distributed.parts import WORKERS, server_part
from hocket.distributed.plans import SERVER_DEVICE, JobPlan, announced_plan, link_rates, server_plan, step_packets
from hocket.distributed.rejoin import SURVIVES, LiveWorkers, RejoiningWorkers, WorkerLink
from hocket.distributed.setup import ShardedJob, joined_as, set_up
from hocket.distributed.wire import Wire
from hocket.errors import ExecutionError
from hocket.execution import EXECUTORS
from hocket.execution import executor as executor_of
from hocket.execution.base import Executor
from hocket.execution.channels import Channel

log = logging.getLogger(__name__)


def server(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    *args: Any,
    num_servers: int = 1,
    executor: str = "auto",
    survive: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **kwargs: Any,
) -> int:
    """Serve a shard of the parameters until rank 0 has closed its step.

    Args:
        step: the user's own step, the same as at the workers.
        model: the model, the same as at the workers. Its parameters become those of rank 0.
        optimizer: the optimizer, the same as at the workers.
        args: arguments for one call, a batch like the workers', so that the step can be captured.
        num_servers: how many of the ranks are servers, the last ones.
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        survive: True: the job goes on if a worker other than rank 0 is lost, and another process may take its place.
            The same at all servers.
        timeout_s: as of `worker`.
        kwargs: keyword arguments of the step.

    Returns:
        The number of steps.

    Raises:
        InputError: an unknown executor, or torchrun has not started this process as a server.
        PeerError: a rank is gone, silent or trains something else, and is named.
    """
    membership = joined_as("server", num_servers, timeout_s, executor=(executor, EXECUTORS))
    if survive:
        membership.store.set(SURVIVES, "")
    job = set_up(spreading(step), model, optimizer, packed(args, kwargs), membership)

    def drop(worker: WorkerLink, error: BaseException) -> None:
        log.warning("hocket: %s; going on without it", error)
        membership.drop(worker.number, worker.rejoin, error)

    with ending_on_error(job.failed):
        versions = Versions()
        with closing(AgentServer(membership, [value for value, _ in job.values.values()], versions)):
            steps = serve_steps(job, executor, versions, LiveWorkers(job.wires, drop if survive else None))
    membership.leave(job.wires)
    return steps


def serve_steps(job: ShardedJob, executor: str, versions: Versions, workers: LiveWorkers) -> int:
    """Follow worker 0's commands until it closes the job, and return the number of steps."""
    serving = ServingChannel(workers)
    plan, updates = _prepared(job, executor, serving, workers)

    def prepare(worker: int, wire: Wire) -> None:
        job.add_packets(wire, worker)
        _add_step_packets(job, plan, wire)

    with closing(updates), RejoiningWorkers(job.membership, workers, prepare) as rejoining:
        pending = _begin_to_send(job, serving, workers.now(), 0)
        batch = job.captured.batch
        steps = 0
        while True:
            command, argument = job.receive_command()
            if command == CLOSE:
                break
            if command == GATHER:
                job.shard(job.membership.number).send(job.wires[0])
            elif command == PUBLISH:
                _publish(job, versions, steps)
            elif command == REJOIN:
                pending += _begin_to_send(job, serving, [rejoining.admit(argument, steps)], steps)
            else:
                while pending:
                    if (error := pending.pop().get()) is not None:
                        raise error
                frame = updates.captured.begin(batch)
                if frame is None:
                    raise ExecutionError(f"the captured update does not stand: {updates.captured.why_not(batch)}")
                updates.run(frame)
                updates.captured.finish(frame)
                steps += 1
    return steps


def _publish(job: ShardedJob, versions: Versions, steps: int) -> None:
    """Copy the values of this server between two steps."""
    number = job.membership.number
    if number == 0:
        job.take_given(changed_only=versions.range()[1] != NEWEST)
    here = [(value, entry.get().detach()) for value, entry in job.values.values() if value.server == number]
    changing = {value.name: tensor.clone() for value, tensor in here if value.changes}
    versions.publish(Version(steps, changing, {value.name: tensor for value, tensor in here if not value.changes}))


def _prepared(job: ShardedJob, kind: str, serving: ServingChannel, workers: LiveWorkers) -> tuple[JobPlan, Executor]:
    """The plan of the workers, and the executor of this server's part."""
    number, assignment = job.membership.number, job.assignment
    part = server_part(job.captured, assignment, number)
    link_rates(job)
    plan = announced_plan(job)
    for wire in job.wires.values():
        _add_step_packets(job, plan, wire)
    job.membership.meet("planned")
    averaged = frozenset(each.name for each in assignment.pushes if each.averaged)
    channels: dict[str, Channel] = {
        f"{WORKERS}->{SERVER_DEVICE}": SummingChannel(workers, averaged),
        f"{SERVER_DEVICE}->{WORKERS}": serving,
    }
    mine = server_plan(part, plan.plan, assignment, number)
    return plan, executor_of(part, mine, kind=kind, channels=channels)


def _add_step_packets(job: ShardedJob, plan: JobPlan, wire: Wire) -> None:
    pulls, pushes = step_packets(plan, job.assignment, job.membership.number)
    wire.add(pulls, pushes, ordered=True)


def _begin_to_send(
    job: ShardedJob, serving: ServingChannel, workers: Sequence[WorkerLink], steps: int
) -> list[SimpleQueue[BaseException | None]]:
    """Begin to send the values of the workers' first step. For each value, a queue gets its end or its error.

    The next update waits for them, since a gradient may come before its parameter has arrived everywhere.
    """
    pending = []
    for each in job.assignment.pulls:
        if each.server == job.membership.number:
            pending.append(SimpleQueue[BaseException | None]())
            serving.send_to(workers, each.name, job.value(each.buffer), steps, pending[-1].put)
    return pending
