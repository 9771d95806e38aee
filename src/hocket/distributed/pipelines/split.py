"""`hocket.split_policy`: where `torch.distributed.pipelining` cuts a model, by measured time, and what it hands on.

    pipe = pipeline(model, (batch,), split_policy=hocket.split_policy(4, microbatches=8))

Torch runs the stages, with any of its schedules. Two things are done to the traced graph first:

- **Cuts** with which a step by the schedule ends the earliest: by dynamic programming for the slowest stage, with what
  crosses its borders, and then by simulating the schedule as torch lists it.
- **Relays**: what one stage makes and a later one reads is handed on by each stage between, through an identity op, so
  that every edge between stages is one between neighbours. A parameter that several stages read (tied embeddings) lives
  in the first of them, and goes the same way. Its gradient comes back and is summed there. Torch by itself would give
  each stage a copy, and each copy a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from hocket.distributed.pipelines.first_rank import made_by_first_rank
from hocket.distributed.pipelines.node_times import BACKWARD, node_times
from hocket.distributed.pipelines.schedules import has_one_stage_a_rank, torch_order
from hocket.distributed.pipelines.traced import chain_of, inline_grad_modes, join_aliases, tensor_of
from hocket.errors import InputError
from hocket.ir import Link
from hocket.planning.partition.graph_problem import LINK_BYTES_PER_S, LINK_LATENCY_US
from hocket.planning.partition.pipeline_cut import PipelineCut, cut_for_schedule
from hocket.planning.partition.pipeline_order import PipelineOrder


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

    Where backwards run in halves (`in_halves`), torch detaches a stage's results in place between them, so they may be
    neither views nor saved by an op: each is a copy. And it sends gradients as autograd made them, so what is received
    is flattened and shaped again: the gradient of that is contiguous.
    """
    graph = traced.graph
    stage_of: dict[fx.Node, int] = {}
    for position, node in enumerate(ops):
        stage_of[node] = sum(position >= begin for begin in begins)
    last = len(begins)
    firsts = [ops[begin] for begin in begins]
    ends = [ops[begin - 1] for begin in begins] + [ops[-1]]
    output = next(node for node in graph.nodes if node.op == "output")
    values = [node for node in graph.nodes if node is not output]
    for first in firsts:
        with graph.inserting_before(first):
            graph.call_function(torch.ops.pippy._pipe_split.default)
    for value in values:
        users = {user: last if user is output else stage_of[user] for user in value.users}
        if not users or (value.op == "get_attr" and len(set(users.values())) < 2):
            continue
        home = min(users.values()) if value.op == "get_attr" else stage_of.get(value, 0)
        furthest = max(users.values())
        if furthest == home:
            continue
        handed = value
        for stage in range(home, furthest):
            # Torch has no edge between a parameter or an input and another stage: those need an op even at home.
            # So does what is not contiguous: a wire carries it as it lies in memory.
            at_home = stage == home and value.op == "call_function" and _contiguous(value)
            if in_halves or not at_home:
                handed = _relay(graph, handed, value, ends[stage], copied=in_halves)
                ends[stage] = handed
            if in_halves and tensor_of(value).is_floating_point():
                handed = _reshaped(graph, handed, value, firsts[stage])
            for user, where in users.items():
                if where == stage + 1 and user is not output:
                    user.replace_input_with(value, handed)
        if output in users:  # which has to be an op of the last stage
            output.replace_input_with(value, _relay(graph, handed, value, ends[last], copied=in_halves))
    graph.lint()
    traced.recompile()


def _contiguous(value: fx.Node) -> bool:
    return tensor_of(value).is_contiguous()


def _relay(graph: fx.Graph, handed: fx.Node, value: fx.Node, after: fx.Node, *, copied: bool) -> fx.Node:
    """An identity op behind `after`, with what torch needs to know of a node."""
    with graph.inserting_after(after):
        if _contiguous(value) and not copied:
            made = graph.call_function(torch.ops.aten.alias.default, (handed,))
        else:
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            made = graph.call_function(torch.ops.aten.clone.default, (handed,), layout)
    return _described(made, value, after)


def _reshaped(graph: fx.Graph, handed: fx.Node, value: fx.Node, before: fx.Node) -> fx.Node:
    """`handed` as a flat tensor and in its own shape again, at the begin of the stage that receives it."""
    with graph.inserting_before(before):
        flat = graph.call_function(torch.ops.aten.view.default, (handed, [-1]))
        made = graph.call_function(torch.ops.aten.view.default, (flat, list(tensor_of(value).shape)))
    _described(flat, value, before).meta["val"] = tensor_of(value).contiguous().view(-1)
    return _described(made, value, before)


def _described(made: fx.Node, value: fx.Node, beside: fx.Node) -> fx.Node:
    """`made` with the place of the node beside it, and a tensor like that of `value`."""
    made.meta = {**beside.meta, "val": tensor_of(value).contiguous()}
    made.meta.setdefault("nn_module_stack", {})
    return made
