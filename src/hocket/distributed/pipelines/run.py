"""One rank of a step as a pipeline: cut, verified against eager, timed. What ``hocket run --ranks`` runs."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.pipelining import pipeline
from torch.utils._pytree import tree_flatten

from hocket.distributed.pipelines.split import has_one_stage_a_rank, made_by_first_rank, schedule_class, split_policy
from hocket.distributed.pipelines.step import PipelinedStep, farthest
from hocket.distributed.pipelines.traced import inline_grad_modes
from hocket.errors import ExecutionError, InputError
from hocket.ir import Link
from hocket.job import Job
from hocket.planning.partition.pipeline_cut import PipelineCut

PINGS = 20
PING_BYTES = 4 << 20
# As many messages as a pipeline has on their way; together they are larger than a core's cache.
PLACES = 8


def measured_link() -> Link:
    """Latency and bandwidth between the first two ranks of the job, by messages both ways at once, for all ranks.

    In a pipeline an activation and a gradient cross a border at the same time. As there, what is sent has just been
    made, and each of the last few messages has memory of its own. The other ranks wait meanwhile: with all pairs at it
    all the time, four ranks on two cores looked slower than they are in a pipeline, which computes in between. Every
    rank has to call it. In a job of one rank the link is as fast as can be said.
    """
    able = dist.get_rank() < 2 <= dist.get_world_size()
    short_us, long_us = _one_way_us(1, PING_BYTES) if able else (0.0, 0.0)
    latency_us, sending_us = made_by_first_rank(lambda: [short_us, max(long_us - short_us, 1.0)])
    return Link("rank0", "rank1", PING_BYTES / sending_us * 1e6, latency_us)


def _one_way_us(*sizes: int) -> tuple[float, ...]:
    """The median for messages of each size, in turns."""
    peer = 1 - dist.get_rank()
    places = {size: [torch.zeros(size, dtype=torch.uint8) for _ in range(PLACES)] for size in sizes}
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(PINGS):
        for size in sizes:
            sent, received = torch.ones(size, dtype=torch.uint8), places[size][number % PLACES]
            begin_s = perf_counter()
            both = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
            found[size].append((perf_counter() - begin_s) * 1e6)
    return tuple(median(found[size]) for size in sizes)


EAGER_RUNS = 5
# A schedule whose stages meet on one rank: torch's traced stages greet each other over the wire, which gloo refuses.
MEET_ON_ONE_RANK = ("zbvzerobubble", "dualpipev")


@dataclass(frozen=True)
class PipelineRun:
    """The result of a step in stages, as one rank knows it."""

    cut: PipelineCut  # which stage has what, and the predicted step
    parameters: dict[int, int]  # how many there are in each stage of this rank
    gradient_error: float  # how far any gradient of any rank is from eager's, as a share of the parameter's largest
    steps_us: tuple[float, ...]  # measured steps, from when all ranks were ready to when the last was done
    eager_us: float  # forward and backward of the same micro-batches in one process, on as many threads as a rank has
    link: Link  # between two ranks, measured
    threads: int  # of each rank

    @property
    def step_us(self) -> float:
        return median(self.steps_us)


def check_pipeline(
    job: Job, *, ranks: int, microbatches: int, schedule: str = "1f1b", memory_bytes: float | None = None
) -> None:
    """Raise an `InputError` if a job's step cannot be a pipeline, by this process alone, without timing."""
    if schedule.lower() in MEET_ON_ONE_RANK:
        raise InputError(f"pipeline: {schedule} has neighbouring stages on one rank, and gloo sends nothing to itself")
    stages = ranks if has_one_stage_a_rank(schedule) else 2 * ranks

    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        inline_grad_modes(traced)
        costs = {node.name: 1.0 for node in traced.graph.nodes}  # where it may be cut does not depend on them
        chosen = split_policy(
            stages, microbatches=microbatches, schedule=schedule, ranks=ranks, costs=costs, memory_bytes=memory_bytes
        )
        return chosen(traced)

    step = PipelinedStep(job, microbatches)
    output = step.model(*step.inputs[0])
    if not isinstance(output, torch.Tensor):
        raise InputError(
            f"pipeline: expected the model to return a tensor, got a value of type {type(output).__name__}"
        )
    step.loss(output, 0)
    _piped(step, policy)
    step.check(step.eager_gradients())


def run_pipeline(
    job: Job, *, microbatches: int, schedule: str = "1f1b", runs: int = 10, memory_bytes: float | None = None
) -> PipelineRun:
    """Run a job's forward and backward as a pipeline over the ranks of the process group. Nothing is updated.

    Parameters are those of rank 0. The batch is the job's first one, in `microbatches` equal parts.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stages = ranks if has_one_stage_a_rank(schedule) else 2 * ranks
    step = PipelinedStep(job, microbatches)
    _agree(step)
    expected = step.eager_gradients()
    link = measured_link()
    policy = split_policy(
        stages, microbatches=microbatches, schedule=schedule, ranks=ranks, links=link, memory_bytes=memory_bytes
    )
    eager_us = made_by_first_rank(lambda: _eager_us(step))
    pipe = _piped(step, policy)
    step.check(expected)
    mine = [number for number, home in enumerate(policy.order.rank_of) if home == rank]
    built = [pipe.build_stage(number, torch.device("cpu")) for number in mine]

    def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
        return step.loss(output, int(target[0]))

    made = schedule_class(schedule)(built[0] if stages == ranks else built, microbatches, loss_fn=loss)
    given = tuple(map(torch.cat, zip(*step.inputs, strict=True))) if 0 in mine else ()  # of all micro-batches
    target = {"target": torch.arange(microbatches)} if stages - 1 in mine else {}

    def once() -> float:
        for stage in built:
            stage.submod.zero_grad(set_to_none=True)
        dist.barrier()
        begin_s = perf_counter()
        made.step(*given, **target)
        took = torch.tensor(perf_counter() - begin_s, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return float(took) * 1e6

    once()  # the first step meets the neighbours
    error = _verified(built, expected)
    steps_us = tuple(once() for _ in range(runs))
    assert policy.cut is not None
    parameters = {number: len(list(stage.submod.parameters())) for number, stage in zip(mine, built, strict=True)}
    return PipelineRun(policy.cut, parameters, error, steps_us, eager_us, link, torch.get_num_threads())


def _agree(step: PipelinedStep) -> None:
    """All ranks have rank 0's parameters and buffers, and the same batch."""
    with torch.no_grad():
        for tensor in (*step.model.parameters(), *step.model.buffers()):
            dist.broadcast(tensor.data, src=0)
    digest = hashlib.sha256()
    for leaf in tree_flatten(step.batches)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            leaf = leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(leaf if isinstance(leaf, bytes) else repr(leaf).encode())
    number = torch.tensor(int.from_bytes(digest.digest()[:7], "big"), dtype=torch.int64)
    least, most = number.clone(), number.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if int(least) != int(most):
        raise ExecutionError("pipeline: batches differ between ranks: draw them with a seed")


def _piped(step: PipelinedStep, policy: Callable[[fx.GraphModule], fx.GraphModule]) -> Any:
    def cut(traced: fx.GraphModule) -> fx.GraphModule:
        for node in traced.graph.nodes:
            if _draws(node):
                raise InputError(
                    f"pipeline: op {node.name!r} draws random numbers, and ranks draw others than one process "
                    "(set its probability to 0)"
                )
        return policy(traced)

    try:
        with warnings.catch_warnings():  # torch 2.13 copies its own tree specifications in a way that it warns of
            warnings.filterwarnings("ignore", message=".isinstance.treespec, LeafSpec", category=FutureWarning)
            return pipeline(step.model, step.inputs[0], split_policy=cut)
    except InputError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        lines = str(error).strip().splitlines() or [""]
        raise InputError(f"pipeline: torch cannot trace the model: {type(error).__name__}: {lines[0]}") from error


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = node.target._schema  # type: ignore[union-attr]
    given = {a.name: node.kwargs.get(a.name, a.default_value) for a in schema.arguments}
    given |= {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    return not (0 in map(given.get, ("p", "dropout_p", "dropout")) or given.get("train") is False)


def _eager_us(step: PipelinedStep) -> float:
    found = []
    for _ in range(EAGER_RUNS):
        begin_s = perf_counter()
        step.eager_gradients()
        found.append((perf_counter() - begin_s) * 1e6)
    return median(found)


def _verified(built: list[Any], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest error of any rank. Too large a one is an `ExecutionError` that names the parameter."""
    found = {name: parameter.grad for stage in built for name, parameter in stage.submod.named_parameters()}
    *errors, where = farthest(found, expected)
    seen = torch.tensor(errors, dtype=torch.float64)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    if float(seen[1]) > 1.0:
        where = where if errors[1] > 1.0 else "those of another rank"
        raise ExecutionError(f"pipeline: gradients of its stages are not eager's: {where}")
    return float(seen[0])
