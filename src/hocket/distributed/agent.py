"""`hocket.distribute.agent`: forwards on the parameters that a job trains, each call on one whole version of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hocket.arguments import packed, spreading
from hocket.distributed.agent_links import AgentLinks, Pulls, connect
from hocket.distributed.job import StepGuard, check_choice
from hocket.distributed.membership import DEFAULT_TIMEOUT_S
from hocket.distributed.parts import Exchanged, server_name
from hocket.distributed.plans import WORKER_DEVICE, machine_of, profiled, transfer_costs
from hocket.distributed.staging import TRAVELLING, check_default_streams, devices_of
from hocket.errors import ExecutionError, InputError, PeerError, StaleCaptureError
from hocket.execution import EXECUTORS
from hocket.execution import executor as executor_of
from hocket.execution.base import Executor
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.planning import Bounds, bounds, plan
from hocket.planning.transfers import ORDERS
from hocket.simulation import simulate
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from hocket.tracing.cut import cut
from hocket.tracing.division import Arrival
from hocket.tracing.sources import Entry
from hocket.tracing.state import inventory


class Agent:
    """A model whose parameters come from a job's servers. Call it as you would call the model. See `agent`.

    Attributes:
        calls: number of forwards that have run.
        version: version of the last one.
        plan: plan of a forward, from the first call on.
        costs, machine: input of the planner.
        bounds: bounds on the time for any order, if each call waits for its version.
        predicted_us: predicted time of such a call.
    """

    def __init__(
        self, model: torch.nn.Module, links: AgentLinks, order: str, kind: str, ahead: bool, every_call: bool
    ) -> None:
        self.calls = 0
        self.version: int | None = None
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.machine: Machine | None = None
        self.bounds: Bounds | None = None
        self.predicted_us = 0.0
        self._model, self._links, self._order, self._kind = model, links, order, kind
        self._forward = torch.no_grad()(spreading(model))
        self._places = _entries(model)
        self._pulls = Pulls(links, self._places, ahead, every_call)
        self._devices = devices_of(model)
        self._captured: Captured | None = None
        self._guard: StepGuard | None = None
        self._executor: Executor | None = None
        self._failure: PeerError | None = None
        self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward without gradients, on the newest version or the one that is held.

        Raises:
            VersionGoneError: the version that is held is gone, and is named.
            PeerError: a server is gone or silent.
            StaleCaptureError: the arguments, or a mode of a module, are not as in the first call. Nothing was run.
            InputError: the current stream of the model's GPU is not its default stream. Nothing was run.
        """
        if self._closed or self._failure is not None:
            raise self._failure or ExecutionError("agent: it was closed")
        check_default_streams(self._devices)
        batch = packed(args, kwargs)
        with torch.no_grad():
            try:
                if self._executor is None:
                    self._start(batch)
                result = self._run(batch)
            except ExecutionError as error:
                self._failure = _lost_peer(error)
                if self._failure is None or self._failure is error:
                    raise
                raise self._failure from error
        if self.calls == 0:
            self._check_result(result)
        self.calls += 1
        return result

    def hold(self, version: int | None = None) -> int:
        """Stay with a version, or with the newest, in all further calls. Return its number.

        A version that is to come is waited for. Before the first call, its values come with that.

        Raises:
            VersionGoneError: the servers do not have it any more, or never had, and it is named.
            PeerError: a server is gone or silent.
        """
        return self._pulls.hold(version)

    def follow(self) -> None:
        """Take the newest version again, from the next call on."""
        self._pulls.held = None

    def synchronize(self) -> None:
        """Wait until no transfer is under way, before the model is used by anything but calls.

        Raises:
            PeerError: a server is gone.
        """
        self._pulls.synchronize()

    def timeline(self) -> Timeline:
        """Return when each op and each transfer of the last call ran."""
        if self._executor is None:
            raise ExecutionError("agent: no call has run yet")
        return self._executor.timeline()

    def arrivals(self) -> dict[str, tuple[str, ...]]:
        """For each server the values of the last version in the order in which they arrived here, by the clock."""
        return self._pulls.arrivals()

    def close(self) -> None:
        """Leave the servers."""
        if self._closed:
            return
        self._closed = True
        self._pulls.close()
        if self._executor is not None:
            self._executor.close()
        self._links.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, batch: Any) -> Any:
        assert self._captured is not None
        assert self._guard is not None
        assert self._executor is not None
        if not self._captured.fits(batch):
            raise StaleCaptureError(
                "agent: this call is not like the first one (shape or dtype of the arguments, a value in them, a "
                "module's mode, autocast); hold a version, and call the model itself"
            )
        self._guard.check()
        version = self._pulls.decide(self.calls + 1)
        result = self._executor(batch)
        self.version = version
        return result

    def _start(self, batch: Any) -> None:
        self._guard = StepGuard(self._forward, self._model, [], batch)
        captured = self._captured = capture(self._forward, self._model, [], batch)
        lasting = {buffer.name for buffer in captured.graph.buffers if buffer.life == "lasting"}
        for op in captured.graph.ops:
            for buffer in op.writes:
                if buffer in lasting:
                    raise InputError(
                        f"agent: op {op.name!r} writes {buffer!r}, which comes from servers; call model.eval()"
                    )
        changing = [value for value in self._links.values if value.changes]
        pulls = [
            Exchanged(value.pull_name, value.name, value.server, value.size_bytes)
            for value in changing
            if value.name in lasting
        ]
        arrivals = [Arrival(each.name, each.buffer, server_name(each.server)) for each in pulls]
        part = cut(captured, captured.graph.order, arrivals, [])
        self.plan = self._planned(captured, part, pulls)
        first = [op.removeprefix("pull:") for lane in self.plan.lanes if lane.kind == "channel" for op in lane.ops]
        unread = [value.name for value in changing if value.name in self._places and value.name not in set(first)]
        self._links.order([*first, *unread])
        self._pulls.has_ops([each.name for each in pulls])
        channels = {f"{server_name(number)}->{WORKER_DEVICE}": self._pulls for number in range(len(self._links.wires))}
        self._executor = executor_of(part, self.plan, kind=self._kind, channels=channels)
        self._guard.begin()

    def _planned(self, captured: Captured, part: Captured, pulls: list[Exchanged]) -> Plan:
        self.machine = machine_of(torch.get_num_threads(), self._links.rates())
        self.costs = profiled(captured).merged(transfer_costs(pulls, (), self.machine))
        made = plan(part.graph, self.costs, self.machine, planner="transfers", order=self._order)
        self.bounds = bounds(part.graph, self.costs, self.machine)
        self.predicted_us = simulate(part.graph, made, self.costs, self.machine).makespan_us
        return made

    def _check_result(self, result: Any) -> None:
        memory = {_storage(entry.get()): name for name, entry in self._places.items() if entry.get().numel()}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) in memory:
                self.close()
                name = memory[_storage(leaf)]
                raise InputError(f"agent: the model returns the memory of {name!r}, where the next version comes")


def agent(
    model: torch.nn.Module,
    address: str,
    *,
    order: str = "auto",
    executor: str = "auto",
    ahead: bool = True,
    every_call: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Agent:
    """Run forwards on the parameters that a job of `worker` and `server` trains and publishes, as they change.

    Each call runs on one version that rank 0 has published (``fast.publish()``): the newest one, or the one that is
    held, never on a mixture. Parameters come in the order that lets the forward end soonest.

    Args:
        model: a module with the parameters and buffers of the trained one, in the mode of the forwards.
        address: ``HOST:PORT`` of the job's store, which torchrun gives its ranks as MASTER_ADDR and MASTER_PORT.
        order: order of the planner ``transfers`` (``docs/transfers.md``): ``auto``, ``tac``, ``layer``, ``random``, ...
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        ahead: True: parameters of a newer version may come while a call runs, each as soon as its last reader is done.
            False: the model itself has one version after each call.
        every_call: True: each call pulls, even if its version is in memory. For measurements.
        timeout_s: how long the job, its first version, and any server is waited for.

    Returns:
        An `Agent`. Its first call captures, profiles and plans the forward.

    Raises:
        InputError: an unknown order or executor, a malformed address, or a model on another device than a CPU or a CUDA
            GPU.
        PeerError: no job answers there, or it has another model.

    Example:
        >>> with hocket.distribute.agent(model.eval(), "10.0.0.1:29500") as fresh:  # doctest: +SKIP
        ...     for batch in my_batches:
        ...         print(fresh.version, fresh(batch))
    """
    check_choice("order", order, ORDERS, "agent")
    check_choice("executor", executor, EXECUTORS, "agent")
    tensors = {name: entry.get().detach() for name, entry in _entries(model).items()}
    for name, tensor in tensors.items():
        if tensor.device.type not in TRAVELLING:
            raise InputError(f"agent: {name!r} is on {tensor.device}, and agents have CPUs and CUDA GPUs")
    links = connect(address, tensors, timeout_s)
    try:
        links.begin(tensors)
    except BaseException:
        links.close()
        raise
    return Agent(model, links, order, executor, ahead, every_call)


def _entries(model: torch.nn.Module) -> Mapping[str, Entry]:
    places = inventory(model, [])
    return {entry.name: entry for entry in (*places.parameters, *places.tensors)}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _lost_peer(error: BaseException) -> PeerError | None:
    """Return the `PeerError` that caused the failure of a step, if any."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, PeerError):
        cause = cause.__cause__
    return cause
