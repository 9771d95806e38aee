"""A simulated GPU: steps are computed on the CPU, and a clock advances by their predicted duration on the GPU.

So the decisions of a schedule on a GPU can be tried and tested without one::

    step           computed on                     takes
    eager          CPU, the user's own Python      simulated: one stream, each op launched by itself
    planned        CPU, by the executor of GPUs    simulated: the plan's streams as one CUDA graph, and what cannot be
                                                   part of it (updates, where the rate is a number) launched behind it

The duration of an op is the estimate of `hocket.profiling.gpu` from its flops and bytes, and those of launches and
events are the machine's. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from hocket.backends.streams import StreamBackend
from hocket.errors import InputError
from hocket.execution.base import Executor, below_autograd
from hocket.execution.streams import GraphedLanes, StreamDevice
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.profiling.gpu import estimate_gpu
from hocket.simulation import simulate
from hocket.tracing.captured import Captured, Frame


class SimulatedClock:
    """Counts the seconds that simulated steps take, and none in between."""

    def __init__(self) -> None:
        self.slowdown = 1.0  # factor on simulated times, above 1 for a GPU that is throttled
        self._now_us = 0.0

    def __call__(self) -> float:
        return self._now_us / 1e6

    def advance(self, duration_us: float) -> None:
        """Advance the clock."""
        self._now_us += duration_us * self.slowdown


class SimulatedBackend(StreamBackend):
    """The streams of a simulated GPU, for the steps of one signature.

    Args:
        machine: has a GPU with rates, such as ``Machine.preset("a100")``. The first one is simulated.
        clock: the clock of the `Schedule`.

    Raises:
        InputError: there is no such GPU.
    """

    def __init__(self, machine: Machine, clock: SimulatedClock) -> None:
        gpus = [gpu for gpu in machine.devices if gpu.kind == "cuda" and gpu.flops_per_s and gpu.bytes_per_s]
        if not gpus:
            raise InputError("machine: expected a GPU with flops_per_s and bytes_per_s to simulate")
        name = machine.note.partition(". ")[0] or gpus[0].name
        super().__init__(_HostDevice(), Machine((gpus[0],), note=f"simulated {machine.note}"), f"simulated {name}")
        self.notes = (
            f"simulated, not measured: ops take what their flops and bytes say on {name}; "
            "results are computed on the CPU",
        )
        self._clock = clock
        self._eager_us = 0.0

    def eager(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the user's step, which takes no simulated time until its ops are known from a call of `executor`."""

        def simulated(batch: Any) -> Any:
            result = step(batch)
            self._clock.advance(self._eager_us)
            return result

        return simulated

    def executor(self, captured: Captured, plan: Plan) -> Executor:
        costs = self.costs(captured)
        if not self._eager_us:
            alone = simulate(captured.graph, self.serial_plan(captured), costs, self.machine, launches="eager")
            self._eager_us = alone.makespan_us
        return _SimulatedLanes(captured, plan, self.device, self.predict(captured, plan, costs), self._clock)

    def profiled(self, captured: Captured) -> Generator[Executor, None, Costs]:
        yield from ()  # nothing is measured
        return self.costs(captured)

    def costs(self, captured: Captured) -> Costs:
        """The estimated durations and shares of all ops."""
        return estimate_gpu(captured.graph, self.machine, device=self.gpu.name)


class _SimulatedLanes(GraphedLanes):
    """Runs a plan's ops on the CPU, and moves the clock on by its simulated timeline."""

    def __init__(
        self, captured: Captured, plan: Plan, device: StreamDevice, predicted: Timeline, clock: SimulatedClock
    ) -> None:
        super().__init__(captured, plan, device=device)
        self._predicted = predicted
        self._clock = clock

    def run(self, frame: Frame) -> None:
        super().run(frame)
        self._clock.advance(self._predicted.makespan_us)

    def timeline(self) -> Timeline:
        return self._predicted


class _HostDevice(StreamDevice):
    """Every stream is the calling thread: ops run when they are launched, which is an order that the plan allows."""

    def __init__(self) -> None:
        self._captured: list[Callable[[], None]] | None = None

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is one stream, and what was launched is done."""

    stream = current = default = event = record = wait = wait_on_host = synchronize = _nothing

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def launch(self, stream: Any, work: Callable[[], None]) -> None:
        if self._captured is None:
            work()
        else:
            self._captured.append(work)

    def elapsed_us(self, first: Any, second: Any) -> float:
        return 0.0

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        launches: list[Callable[[], None]] = []
        self._captured = launches
        try:
            work()
        finally:
            self._captured = None

        def replay() -> None:
            with below_autograd():
                for launch in launches:
                    launch()

        return replay
