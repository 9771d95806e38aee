"""`hocket.distribute.server`: keeps a shard of the parameters, and updates it when all gradients are in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from hocket.arguments import packed, spreading
from hocket.distributed.channels import ServingChannel, SummingChannel
from hocket.distributed.desk import Desk
from hocket.distributed.membership import DEFAULT_TIMEOUT_S, join
from hocket.distributed.parts import WORKERS, server_part
from hocket.distributed.plans import SERVER_DEVICE, JobPlan, link_rates, parcels_of, server_plan, told_plan
from hocket.distributed.present import PresentWorker, PresentWorkers
from hocket.distributed.returning import SURVIVES, ReturningWorkers, come_again
from hocket.distributed.setup import CLOSE, GATHER, LET_IN, PUBLISH, Setup, lay_wire, set_up
from hocket.distributed.versions import NEWEST, Version, Versions
from hocket.distributed.wire import Wire
from hocket.errors import ExecutionError, InputError
from hocket.execution import EXECUTORS, executor
from hocket.execution.base import Executor
from hocket.execution.channels import Channel

__all__ = ["follow_orders", "server"]

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
        step: the user's own, as the workers have it.
        model: as well; its parameters are those of rank 0 from then on.
        optimizer: as well.
        args: what the step is called with once, so that it can be captured: a batch like the workers'.
        num_servers: how many of the ranks are servers, the last ones.
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        survive: whether the job goes on without a worker that is lost, unless it is rank 0, and lets in one that takes
            its place; the same at all servers.
        timeout_s: as of `worker`.
        kwargs: what the step is called with by name.

    Returns:
        How many steps there were.

    Raises:
        InputError: an unknown executor, or torchrun has not started this process as a server.
        PeerError: a rank is gone, silent or trains something else; names it.
    """
    if executor not in EXECUTORS:
        raise InputError(f"distribute: unknown executor {executor!r}; available: {', '.join(EXECUTORS)}")
    membership = come_again(join(num_servers, timeout_s))
    if membership.is_worker:
        raise InputError(f"distribute: rank {membership.rank} is a worker; call hocket.distribute.worker(...) there")
    if survive:
        membership.store.set(SURVIVES, "")
    made = set_up(spreading(step), model, optimizer, packed(args, kwargs), membership)
    try:
        steps = _serve(made, executor, survive)
    except BaseException as error:
        raise made.failed(error) from error
    made.close()
    return steps


def _serve(made: Setup, kind: str, survive: bool) -> int:
    versions = Versions()
    desk = Desk(made.membership, [value for value, _ in made.values.values()], versions)

    def let_go(worker: PresentWorker, error: BaseException) -> None:
        log.warning("hocket: %s; going on without it", error)
        made.membership.let_go(worker.number, worker.coming, error)

    try:
        return follow_orders(made, kind, versions, PresentWorkers(made.wires, let_go if survive else None))
    finally:
        desk.close()


def follow_orders(made: Setup, kind: str, versions: Versions, workers: PresentWorkers) -> int:
    """Do what worker 0 orders until it closes; how many steps there were. Versions are put where agents find them."""
    serving = ServingChannel(workers)
    updates, plan = _executor(made, kind, serving, workers)
    with ReturningWorkers(made.membership, workers, partial(_lay_returning, made, plan)) as returning:
        coming = _begin_to_send(made, serving, workers.now(), 0)
        batch = made.captured.batch
        steps = 0
        while True:
            command, argument = made.ordered()
            if command == CLOSE:
                break
            if command == GATHER:
                made.shard(made.membership.number).send(made.wires[0])
            elif command == PUBLISH:
                _publish(made, versions, steps)
            elif command == LET_IN:
                coming += _begin_to_send(made, serving, [returning.let_in(argument, steps)], steps)
            else:
                _wait_for_all(coming)
                frame = updates.captured.begin(batch)
                if frame is None:
                    raise ExecutionError("a number that the update branches on has changed since the job began")
                updates.run(frame)
                updates.captured.finish(frame)
                steps += 1
    updates.close()
    return steps


def _publish(made: Setup, versions: Versions, steps: int) -> None:
    """Copy what this server has, between two steps."""
    number = made.membership.number
    if number == 0:
        made.take_given(changed_only=versions.there()[1] != NEWEST)
    here = [(value, entry.get().detach()) for value, entry in made.values.values() if value.server == number]
    versions.publish(
        Version(
            steps,
            {value.name: tensor.clone() for value, tensor in here if value.changes},
            {value.name: tensor for value, tensor in here if not value.changes},
        )
    )


def _executor(made: Setup, kind: str, serving: ServingChannel, workers: PresentWorkers) -> tuple[Executor, JobPlan]:
    """What runs this server's part, and the plan of the workers."""
    number, assignment = made.membership.number, made.assignment
    part = server_part(made.captured, assignment, number)
    link_rates(made)
    told = told_plan(made)
    for wire in made.wires:
        _lay_transfers(made, told, wire)
    made.membership.meet("planned")
    averaged = frozenset(each.name for each in assignment.pushes if each.averaged)
    channels: dict[str, Channel] = {
        f"{WORKERS}->{SERVER_DEVICE}": SummingChannel(workers, averaged),
        f"{SERVER_DEVICE}->{WORKERS}": serving,
    }
    return executor(part, server_plan(part, told.plan, assignment, number), kind=kind, channels=channels), told


def _lay_transfers(made: Setup, plan: JobPlan, wire: Wire) -> None:
    pulls, pushes = parcels_of(plan, made.assignment, made.membership.number)
    wire.add(pulls, pushes, ordered=True)


def _lay_returning(made: Setup, plan: JobPlan, worker: int, wire: Wire) -> None:
    """What the wire to a worker that comes again carries, as at its other end."""
    lay_wire(made, wire, worker)
    _lay_transfers(made, plan, wire)


def _begin_to_send(
    made: Setup, serving: ServingChannel, workers: Sequence[PresentWorker], steps: int
) -> list[SimpleQueue[BaseException | None]]:
    """Begin to send what workers need for their first step; for each value what tells when all of them have it.

    The next update waits for that: a gradient may be there before its parameter has arrived everywhere.
    """
    coming = []
    for each in made.assignment.pulls:
        if each.server == made.membership.number:
            coming.append(SimpleQueue[BaseException | None]())
            serving.send_to(workers, each.name, made.value(each.buffer), steps, coming[-1].put)
    return coming


def _wait_for_all(coming: list[SimpleQueue[BaseException | None]]) -> None:
    while coming:
        if (error := coming.pop().get()) is not None:
            raise error
