"""`hocket.split_policy`: where `torch.distributed.pipelining` cuts a model, by measured time, and what it hands on.

    pipe = pipeline(model, (batch,), split_policy=hocket.split_policy(4, microbatches=8))

Torch runs the stages, with any of its schedules. Two things are done to the traced graph first:

- **Cuts** with which a step by the schedule ends the earliest: by dynamic programming for the slowest stage, with what
  crosses its borders, and then by simulating the schedule as torch lists it.
- **Relays**: what one stage makes and a later one reads is handed on by each stage between, through an identity op, so
  that every edge between stages is one between neighbours. A parameter that several stages read (tied embeddings) lives
  in the first of them (see `_bring_home`), and goes the same way. Its gradient comes back and is summed there. Torch by
  itself would give each stage a copy, and each copy a part of the gradient.

Nothing of torch's schedules is re-written: one is made for stages that compute nothing, in this process alone, and
asked for the order of its actions. Results of rank 0 go to all others as JSON text, so that nothing is unpickled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hocket.distributed.pipelines.traced import (
    BACKWARD,
    carries_gradients,
    chain_of,
    inline_grad_modes,
    join_aliases,
    node_times,
    read_by_one_alias,
    tensor_of,
    with_gradients,
    write_early,
)
from hocket.errors import InputError, PeerError
from hocket.ir import Link
from hocket.planning.partition.graph_problem import LINK_BYTES_PER_S, LINK_LATENCY_US
from hocket.planning.partition.pipeline_cut import PipelineCut, cut_for_schedule
from hocket.planning.partition.pipeline_order import PipelineAction, PipelineOrder


def made_by_first_rank(make: Callable[[], Any]) -> Any:
    """The result of `make`, something that JSON can hold, on rank 0, on every rank of the job, or without a job.

    An error of rank 0 is a `PeerError` on the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return make()
    if dist.get_rank() != 0:
        document = json.loads(_broadcast(b""))
        if "error" in document:
            raise PeerError(f"rank 0 failed: {document['error']}")
        return document["value"]
    try:
        value = make()
    except Exception as error:
        _broadcast(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        raise
    _broadcast(json.dumps({"value": value}).encode())
    return value


def _broadcast(text: bytes) -> bytes:
    """Rank 0's bytes: their number first, then they themselves."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(data, src=0)
    return bytes(data.cpu().tolist())


# By lower-case name, without the word that they begin with.
SCHEDULES: dict[str, Any] = {
    name.removeprefix("Schedule").lower(): getattr(pipelining, name)
    for name in pipelining.__all__
    if name.startswith("Schedule")
}


def schedule_class(name: str) -> Any:
    """Torch's class of a schedule, by its name in any case, with or without ``Schedule``, or an `InputError`."""
    found = SCHEDULES.get(name.lower().removeprefix("schedule"))
    if found is None:
        raise InputError(f"split_policy: unknown schedule {name!r}; one of {', '.join(SCHEDULES)}")
    return found


def has_one_stage_a_rank(name: str) -> bool:
    """True if a schedule takes one stage for each rank. The others take any number, or two."""
    return issubclass(schedule_class(name), PipelineScheduleSingle)


def torch_order(name: str, *, stages: int, ranks: int, microbatches: int) -> PipelineOrder:
    """The actions of each rank, which has as many stages as every other one, by torch's schedule of that name."""
    made = schedule_class(name)
    per_rank, remainder = divmod(stages, ranks)
    if remainder or per_rank < 1:
        raise InputError(f"split_policy: {stages} stages cannot be shared by {ranks} ranks evenly")
    single = has_one_stage_a_rank(name)
    if single and per_rank > 1:
        raise InputError(
            f"split_policy: schedule {name!r} has one stage for each rank, got {stages} stages for {ranks} ranks"
        )
    stand_in = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=None)
    try:
        listed = made(*([stand_in] if single else [[stand_in] * per_rank]), microbatches).pipeline_order
    except (AssertionError, ValueError) as error:
        problem = str(error).strip().splitlines()[0]
        raise InputError(
            f"split_policy: schedule {name!r} does not take {microbatches} micro-batches for {stages} stages on "
            f"{ranks} ranks: {problem}"
        ) from error
    actions = tuple(tuple(_flat(listed[rank])) for rank in range(ranks))
    # Torch 2.13 lists the forwards of the last stage of 1F1B from micro-batch 1 on; it runs them from 0 on.
    actions = tuple(map(_renumbered, actions)) if single else actions
    return PipelineOrder(name.lower(), actions, stages, microbatches, receives_ahead=not single)


def _flat(listed: Iterable[Any]) -> Iterator[PipelineAction]:
    for action in listed:
        for each in () if action is None else action.sub_actions or (action,):
            if each.computation_type.value in ("F", "B", "I", "W"):  # the others are about sharded parameters
                yield PipelineAction(each.stage_index, each.computation_type.value, each.microbatch_index)


def _renumbered(actions: tuple[PipelineAction, ...]) -> tuple[PipelineAction, ...]:
    counted = {"F": 0, "B": 0}
    found = []
    for action in actions:
        found.append(action._replace(micro_batch=counted[action.kind]))
        counted[action.kind] += 1
    return tuple(found)


def split_policy(
    k: int,
    *,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    ranks: int | None = None,
    costs: Mapping[str, float] | None = None,
    links: Link | None = None,
    memory_bytes: float | None = None,
) -> SplitPolicy:
    """A ``split_policy`` for ``torch.distributed.pipelining.pipeline`` that cuts a model into `k` stages.

    Args:
        k: how many stages.
        microbatches: how many there will be in a step, by default `k`.
        schedule: a schedule of `torch.distributed.pipelining` by its name (``1f1b``, ``gpipe``, ``interleaved1f1b``,
            ``loopedbfs``, ``interleavedzerobubble``, ``zbvzerobubble``, ``dualpipev``). Cuts are those with which a
            step by it is the shortest.
        ranks: how many share the stages. When not given, as many as stages for ``1f1b`` and ``gpipe``, which take one
            stage a rank, and half as many for the others.
        costs: microseconds of forward and backward for the nodes of the traced graph, by name (two thirds of them are
            the backward). When not given, each node is measured (in a job on rank 0, for all).
        links: between neighbouring stages, by default PCIe by its order of magnitude.
        memory_bytes: of a rank's device, by default any amount.

    Returns:
        A function that changes a traced graph in place and returns it. Its `cut` then says which stage has what.

    Raises:
        InputError: a number below 1, fewer micro-batches than ranks, an unknown schedule, or numbers that it does not
            take. By the policy: a missing cost, or no cuts that are allowed or fit.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        >>> traced = torch.export.export(model, (torch.randn(2, 4),)).module()
        >>> policy = split_policy(2, microbatches=4)
        >>> sum("pipe_split" in node.name for node in policy(traced).graph.nodes)
        1
        >>> [stage.in_flight for stage in policy.cut.stages]
        [2, 1]
    """
    microbatches = k if microbatches is None else microbatches
    if k < 1 or microbatches < 1 or (ranks is not None and ranks < 1):
        raise InputError(f"split_policy: expected at least one stage and micro-batch, got {k} and {microbatches}")
    single = has_one_stage_a_rank(schedule)
    if ranks is None:
        ranks = k if single else max(1, k // 2)
    if microbatches < ranks:
        where = "stages" if single else "ranks"
        raise InputError(
            f"split_policy: {microbatches} micro-batches for {ranks} {where}: "
            f"fewer than one for each leave {where} idle"
        )
    return SplitPolicy(
        torch_order(schedule, stages=k, ranks=ranks, microbatches=microbatches), costs, links, memory_bytes
    )


class SplitPolicy:
    """The result of `split_policy`: called with a traced graph it cuts it.

    Attributes:
        order: what each rank will run.
        cut: where the last graph was cut, what each stage has, and what a step is expected to take, or None before.
    """

    def __init__(
        self,
        order: PipelineOrder,
        costs: Mapping[str, float] | None = None,
        links: Link | None = None,
        memory_bytes: float | None = None,
    ) -> None:
        self.order = order
        self.cut: PipelineCut | None = None
        self._costs = costs
        self._latency_us = LINK_LATENCY_US if links is None else links.latency_us
        self._bytes_per_s = LINK_BYTES_PER_S if links is None else links.bytes_per_s
        self._memory_bytes = memory_bytes

    def __call__(self, traced: fx.GraphModule) -> fx.GraphModule:
        inline_grad_modes(traced)
        join_aliases(traced)
        write_early(traced)
        if self._costs is None:
            # Measured times differ from rank to rank, and all have to cut at the same places.
            times = made_by_first_rank(lambda: node_times(traced))
        else:
            forward = 1.0 / (1.0 + BACKWARD)
            times = {name: (us * forward, us * (1.0 - forward)) for name, us in self._costs.items()}
        ops, chain = chain_of(traced, times)
        self.cut = cut_for_schedule(
            *(chain, self.order),
            latency_us=self._latency_us,
            bytes_per_s=self._bytes_per_s,
            memory_bytes=self._memory_bytes,
        )
        in_halves = any(action.kind == "I" for actions in self.order.ranks for action in actions)
        _cut(traced, ops, self.cut.begins, in_halves=in_halves)
        return traced


def _cut(traced: fx.GraphModule, ops: tuple[fx.Node, ...], begins: tuple[int, ...], *, in_halves: bool) -> None:
    """Put a split before each of `begins`, and hand on what crosses more than one, or belongs to an earlier stage.

    A wire carries a tensor as it lies in memory, so its axes are handed on in that order, and turned back behind it:
    ops find the layout that they were traced with.

    Where backwards run in halves (`in_halves`), torch detaches a stage's results in place between them, so they may be
    neither views nor saved by an op: each is a copy. And it sends gradients as autograd made them, so what is received
    is read through a slice of the whole, whose gradient is contiguous.
    """
    graph = traced.graph
    stage_of: dict[fx.Node, int] = {}
    for position, node in enumerate(ops):
        stage_of[node] = sum(position >= begin for begin in begins)
    last = len(begins)
    stages = [ops[begin:end] for begin, end in zip((0, *begins), (*begins, len(ops)), strict=True)]
    firsts = [ops[begin] for begin in begins]
    ends = [ops[begin - 1] for begin in begins] + [ops[-1]]
    output = next(node for node in graph.nodes if node.op == "output")
    for first in firsts:
        with graph.inserting_before(first):
            graph.call_function(torch.ops.pippy._pipe_split.default)
    users_of = {
        value: {user: last if user is output else stage_of[user] for user in value.users}
        for value in graph.nodes
        if value.users
    }
    home_of = {
        value: min(users.values()) if value.op == "get_attr" else stage_of.get(value, 0)
        for value, users in users_of.items()
    }
    if in_halves:
        _bring_home(traced, users_of, home_of)
    for value, users in users_of.items():
        home, furthest = home_of[value], max(users.values())
        here = value
        if value.op == "get_attr":
            readers = [user for user, where in users.items() if where == home and user is not output]
            here = read_by_one_alias(traced, value, stages[home], readers)
        if home == furthest:
            continue
        like, order = tensor_of(value), _order(tensor_of(value))
        is_turned = order != sorted(order)
        wire = like.permute(order).contiguous()
        read = handed = here
        for stage in range(home, furthest):
            put = _Put(graph, wire, ends[stage])
            if stage == home and is_turned:
                handed = put(torch.ops.aten.permute.default, handed, order)
            # Torch has no edge between a parameter or an input and another stage: those need an op even at home.
            if in_halves:
                handed = put(torch.ops.aten.clone.default, handed, memory_format=torch.contiguous_format)
            elif stage == home and handed.op == "call_function":
                handed = put(torch.ops.aten.contiguous.default, handed)
            else:
                handed = put(torch.ops.aten.alias.default, handed)
            ends[stage] = handed
            put = _Put(graph, wire, firsts[stage], before=True)
            if in_halves and like.is_floating_point() and like.dim():
                handed = put(torch.ops.aten.slice.Tensor, handed, 0, 0, sys.maxsize)
            read = handed
            if is_turned:
                back = [order.index(axis) for axis in sorted(order)]
                read = put(torch.ops.aten.permute.default, handed, back, like=like)
            for user, where in users.items():
                if where == stage + 1 and user is not output:
                    user.replace_input_with(value, read)
        if output in users:  # which has to be an op of the last stage
            output.replace_input_with(value, _Put(graph, like, ends[last])(torch.ops.aten.clone.default, read))
    graph.lint()
    traced.recompile()


def _bring_home(
    traced: fx.GraphModule, users_of: Mapping[fx.Node, Mapping[fx.Node, int]], home_of: dict[fx.Node, int]
) -> None:
    """Let parameters live in the first stage where what a later one makes of them alone is handed on, or read twice.

    Where backwards run in halves, torch loses the gradient of a stage's result that does not lead to what the stage has
    received, and may go twice through what leads there by two ways. The first stage has a backward in one piece.
    """
    trained = with_gradients(traced)

    def lost() -> fx.Node | None:
        leading: set[fx.Node] = set()
        for node, users in users_of.items():
            given = node.all_input_nodes
            received = any(home_of[one] < home_of[node] and tensor_of(one).is_floating_point() for one in given)
            if carries_gradients(node) and (received or not leading.isdisjoint(given)):
                leading.add(node)
            elif node in trained and home_of[node] and (len(users) > 1 or home_of[node] < max(users.values())):
                return node
        return None

    while (node := lost()) is not None:
        ahead = dict.fromkeys([node])
        for each in (todo := list(ahead)):
            todo += [one for one in trained.intersection(each.all_input_nodes) if one not in ahead]
            ahead |= dict.fromkeys(todo)
        home_of |= {each: 0 for each in ahead if each.op == "get_attr"}


def _order(like: torch.Tensor) -> list[int]:
    """The axes of a tensor as they lie in memory, what is repeated there first."""
    axes = range(like.dim())
    strides = like.contiguous().stride() if like.is_contiguous() else like.stride()
    return sorted(axes, key=lambda axis: (strides[axis] > 0, -strides[axis]))


class _Put:
    """Puts ops behind a node, or before it, with what torch needs to know of each."""

    def __init__(self, graph: fx.Graph, like: torch.Tensor, beside: fx.Node, *, before: bool = False) -> None:
        self._graph, self._like, self._beside, self._before = graph, like, beside, before

    def __call__(self, target: Any, *args: Any, like: torch.Tensor | None = None, **kwargs: Any) -> fx.Node:
        graph = self._graph
        with graph.inserting_before(self._beside) if self._before else graph.inserting_after(self._beside):
            made = graph.call_function(target, args, kwargs)
        made.meta = {**self._beside.meta, "val": self._like if like is None else like}
        made.meta.setdefault("nn_module_stack", {})
        if not self._before:
            self._beside = made
        return made
