"""Twin jobs: two equal copies of a training job, one stepped eagerly, one by plan, compared after every step.

Nothing here uses Hocket's own list of what a step touches: a place that Hocket forgot would be forgotten in the
comparison too.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hocket.errors import StaleCaptureError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.job import Job
from hocket.tracing import capture
from hocket.tracing.captured import Captured

STEPS = 5


@dataclass
class Twins:
    """One job twice; `decayed` lowers the learning rate of both after every step."""

    eager: Job
    planned: Job
    schedulers: list[Any] = field(default_factory=list)

    def both(self) -> tuple[Job, Job]:
        return self.eager, self.planned


class Decay:
    """The plainest of schedulers; it asks no questions about whether the optimizer has been stepped."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.8)
            else:
                group["lr"] *= 0.8


def twins(make: Callable[[], Job], scheduler: Callable[[Any], Any] | None = None) -> Twins:
    """Two jobs from the same seed; every optimizer gets a scheduler that changes its rate after every step."""
    jobs = []
    for _ in range(2):
        torch.manual_seed(0)
        jobs.append(make())
    make_scheduler = scheduler or Decay
    schedulers = [make_scheduler(optimizer) for job in jobs for optimizer in job.optimizers]
    return Twins(jobs[0], jobs[1], schedulers)


def serial(captured: Captured, width: int | None = None) -> Plan:
    """All ops in program order on one lane, as wide as the caller by default."""
    return Plan((Lane("main", captured.graph.order, width=width or torch.get_num_threads()),))


class Planned:
    """Steps a job by plan, and captures it again where its graph no longer stands for the step.

    Every fourth step runs on Python's lanes, all others on native ones where there are any: each has its own way of
    reading and putting back the state, and finds it as the other has left it.
    """

    def __init__(self, job: Job, plan: Callable[[Captured], Plan] = serial, split: bool = False) -> None:
        self.job = job
        self.plan = plan
        self.split = split
        self.captures = 0
        self.steps = 0
        self.captured: Captured | None = None
        self.lanes: tuple[Executor, ...] = ()

    def capture(self, batch: Any) -> Captured:
        job = self.job
        self.captured = capture(job.step, job.model, job.optimizer, batch, split=self.split)
        self.close()
        plan = self.plan(self.captured)
        self.lanes = (executor(self.captured, plan), ThreadLanes(self.captured, plan))
        self.captures += 1
        return self.captured

    def close(self) -> None:
        for lanes in self.lanes:
            lanes.close()

    def __call__(self, batch: Any) -> Any:
        self.steps += 1
        if self.captured is None or not self.captured.fits(batch):
            self.capture(batch)
        which = self.steps % 4 == 0
        try:
            return self.lanes[which](batch)
        except StaleCaptureError:  # a guard: a number has crossed a threshold of the optimizer
            self.capture(batch)
            return self.lanes[which](batch)


def check_twins(
    make: Callable[[], Job],
    *,
    scheduler: Callable[[Any], Any] | None = None,
    plan: Callable[[Captured], Plan] = serial,
    split: bool = False,
    tolerance: float = 0.0,
    captures: int = 1,
    steps: int = STEPS,
    around: Callable[[], Any] = nullcontext,
) -> Captured:
    """One eager step for both; then `steps` steps, eager here and planned there, compared each time.

    `captures` is how often the planned twin may be captured, its first time included; `tolerance` is relative to
    the largest magnitude of a tensor, and 0 asks for the same bits. Every step is called within ``around()``.
    """
    pair = twins(make, scheduler)
    planned = Planned(pair.planned, plan, split)
    for number in range(steps + 1):
        batches = [job.batch(number) for job in pair.both()]
        torch.manual_seed(100 + number)
        with around():
            results = [pair.eager.step(batches[0])]
        random = [torch.get_rng_state()]
        torch.manual_seed(100 + number)
        with around():
            results.append(planned(batches[1]) if number else pair.planned.step(batches[1]))
        random.append(torch.get_rng_state())
        where = f"after step {number}"
        assert torch.equal(*random), f"{where}: the random states differ"
        assert_same(named_leaves("returned", results[0]), named_leaves("returned", results[1]), where, tolerance)
        assert_same(named_leaves("batch", batches[0]), named_leaves("batch", batches[1]), where, tolerance)
        assert_same(everything(pair.eager), everything(pair.planned), where, tolerance)
        for one in pair.schedulers:
            one.step()
    planned.close()
    assert planned.captures <= captures, f"captured {planned.captures} times"
    return planned.captured


def everything(job: Job) -> Iterator[tuple[str, Any]]:
    """All that a job holds: parameters, buffers, gradients, the optimizers' state and the numbers of their groups."""
    for number, model in enumerate(job.models):
        for name, parameter in model.named_parameters():
            yield f"model {number}: {name}", parameter
            yield f"model {number}: {name}.grad", parameter.grad
        yield from ((f"model {number}: {name}", buffer) for name, buffer in model.named_buffers())
    for number, optimizer in enumerate(job.optimizers):
        for at, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                yield f"optimizer {number}: group {at}, parameter {place}", parameter
                yield f"optimizer {number}: group {at}, parameter {place}.grad", parameter.grad
                state = optimizer.state.get(parameter, {})
                for key in sorted(state):
                    yield f"optimizer {number}: group {at}, parameter {place}, {key}", state[key]
            for key in sorted(group.keys() - {"params"}):
                yield from named_leaves(f"optimizer {number}: group {at}, {key}", group[key])


def named_leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    leaves, spec = tree_flatten(tree)
    yield f"{name}: structure", str(spec)
    yield from ((f"{name}[{place}]", leaf) for place, leaf in enumerate(leaves))


def copied(job: Job) -> list[tuple[str, Any]]:
    """A copy of the state of a job."""
    return [(n, v.detach().clone() if isinstance(v, torch.Tensor) else v) for n, v in everything(job)]


def assert_same(first: Any, second: Any, where: str = "", tolerance: float = 0.0) -> None:
    """Two lists of named values are equal; says which value is not."""
    first, second = list(first), list(second)
    assert [name for name, _ in first] == [name for name, _ in second], where
    for (name, a), (_, b) in zip(first, second, strict=True):
        problem = difference(a, b, tolerance)
        assert not problem, f"{where}: {name}: {problem}"


def difference(a: Any, b: Any, tolerance: float = 0.0) -> str:
    """In what way two values differ; empty where they do not."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        if type(a) is not type(b):
            return f"{a!r} is a {type(a).__name__}, {b!r} a {type(b).__name__}"
        return "" if a == b or (a != a and b != b) else f"{a!r} is not {b!r}"
    for what in ("shape", "dtype", "layout", "requires_grad"):
        mine, its = getattr(a, what), getattr(b, what)
        # A result may be part of a graph in eager mode; a planned step records none.
        if mine != its and not (what == "requires_grad" and a.grad_fn is not None):
            return f"{what} {mine} is not {its}"
    if a.layout is torch.strided and a.stride() != b.stride():
        return f"strides {a.stride()} are not {b.stride()}"
    if torch.equal(bits(a), bits(b)):
        return ""
    if not tolerance and torch.equal(a, b):
        return "zeros of another sign"
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    gap, size = float((x - y).abs().max()), float(x.abs().max())
    return "" if gap <= tolerance * size else f"differs by {gap:.3g} where the largest value is {size:.3g}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: tells -0.0 from 0.0, and NaN is equal to itself."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.to_dense()
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
