"""`hocket.split_policy`: where `torch.distributed.pipelining` cuts a model, by measured time, and what it hands on.

    pipe = pipeline(model, (batch,), split_policy=hocket.split_policy(4, microbatches=8))

Torch runs the stages, with any of its schedules. Two things are done to the traced graph first:

- **Cuts** by dynamic programming: the slowest stage, communication included, is as fast as cuts between ops allow.
- **Relays**: what one stage makes and a later one reads is handed on by each stage between, through an identity op, so
  that every edge between stages is one between neighbours. A parameter that several stages read (tied embeddings) lives
  in the first of them, and goes the same way; its gradient comes back and is summed there. Torch by itself would give
  each stage a copy, and each copy a part of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from hocket.distributed.traced import (
    ChainArrays,
    chain_arrays,
    inline_grad_modes,
    join_aliases,
    measured_us,
    tensor_of,
)
from hocket.errors import InputError
from hocket.ir import Link
from hocket.planning.partition.chain import cut_chain
from hocket.planning.partition.graph_problem import LINK_BYTES_PER_S, LINK_LATENCY_US

__all__ = ["SCHEDULES", "split_policy"]

# Torch's, by lower-case name: whether every stage begins all micro-batches before it finishes one.
SCHEDULES = {"gpipe": True, "1f1b": False}


def split_policy(
    k: int,
    *,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    costs: Mapping[str, float] | None = None,
    links: Link | None = None,
    memory_bytes: float | None = None,
) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A ``split_policy`` for ``torch.distributed.pipelining.pipeline`` that cuts a model into `k` stages.

    Args:
        k: how many stages.
        microbatches: how many there will be in a step; `k` when not given.
        schedule: ``gpipe`` or ``1f1b``; it decides how many micro-batches a stage holds at once.
        costs: microseconds of forward and backward for the nodes of the traced graph, by name; when not given, forwards
            are measured (in a job on rank 0, for all), and a backward is taken to be twice as long.
        links: between neighbouring stages; PCIe by the order of magnitude when not given.
        memory_bytes: of a stage's device; any amount when not given.

    Returns:
        A function that changes a traced graph in place and returns it.

    Raises:
        InputError: a number below 1, fewer micro-batches than stages, or an unknown schedule; by the policy: a missing
            cost, or no cuts that are allowed or fit.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        >>> traced = torch.export.export(model, (torch.randn(2, 4),)).module()
        >>> cut = split_policy(2, microbatches=4)(traced)
        >>> sum("pipe_split" in node.name for node in cut.graph.nodes)
        1
    """
    microbatches = k if microbatches is None else microbatches
    if k < 1 or microbatches < 1:
        raise InputError(f"split_policy: expected at least one stage and micro-batch, got {k} and {microbatches}")
    if microbatches < k:
        raise InputError(
            f"split_policy: {microbatches} micro-batches for {k} stages: fewer than one for each leave stages idle"
        )
    if schedule.lower() not in SCHEDULES:
        raise InputError(f"split_policy: unknown schedule {schedule!r}; one of {', '.join(SCHEDULES)}")
    all_at_once = SCHEDULES[schedule.lower()]
    in_flight = [microbatches if all_at_once else min(microbatches, k - stage) for stage in range(k)]

    def policy(traced: fx.GraphModule) -> fx.GraphModule:
        inline_grad_modes(traced)
        join_aliases(traced)
        chain = chain_arrays(traced, _agreed(traced) if costs is None else costs)
        latency_us = LINK_LATENCY_US if links is None else links.latency_us
        bytes_per_s = LINK_BYTES_PER_S if links is None else links.bytes_per_s
        # There and back: an activation one way, its gradient the other.
        crossing_us = [2 * (latency_us + size / bytes_per_s * 1e6) for size in chain.crossing_bytes]
        begins = cut_chain(
            chain.takes_us,
            crossing_us,
            k,
            kept_bytes=chain.kept_bytes,
            saved_bytes=chain.saved_bytes,
            in_flight=in_flight,
            memory_bytes=memory_bytes,
        )
        _cut(traced, chain, begins)
        return traced

    return policy


def _agreed(traced: fx.GraphModule) -> Mapping[str, float]:
    """Measured costs; in a job of several ranks those of rank 0, so that all cut at the same places."""
    if not (dist.is_available() and dist.is_initialized()):
        return measured_us(traced)
    told = [measured_us(traced) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _cut(traced: fx.GraphModule, chain: ChainArrays, begins: tuple[int, ...]) -> None:
    """Put a split before each of `begins`, and hand on what crosses more than one, or belongs to an earlier stage."""
    graph = traced.graph
    stage_of: dict[fx.Node, int] = {}
    for position, node in enumerate(chain.ops):
        stage_of[node] = sum(position >= begin for begin in begins)
    last = len(begins)
    ends = [chain.ops[begin - 1] for begin in begins] + [chain.ops[-1]]
    output = next(node for node in graph.nodes if node.op == "output")
    for value in [node for node in graph.nodes if node is not output]:
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
            if stage > home or value.op != "call_function" or not _contiguous(value):
                handed = _relay(graph, handed, value, ends[stage])
                ends[stage] = handed
            for user, where in users.items():
                if where == stage + 1 and user is not output:
                    user.replace_input_with(value, handed)
        if output in users:  # which has to be an op of the last stage
            output.replace_input_with(value, _relay(graph, handed, value, ends[last]))
    for begin in begins:
        first = chain.ops[begin]
        with graph.inserting_before(first):
            graph.call_function(torch.ops.pippy._pipe_split.default)
    graph.lint()
    traced.recompile()


def _contiguous(value: fx.Node) -> bool:
    return tensor_of(value).is_contiguous()


def _relay(graph: fx.Graph, handed: fx.Node, value: fx.Node, after: fx.Node) -> fx.Node:
    """An identity op behind `after`, with what torch needs to know of a node."""
    with graph.inserting_after(after):
        if _contiguous(value):
            made = graph.call_function(torch.ops.aten.alias.default, (handed,))
        else:
            layout: dict[str, Any] = {"memory_format": torch.contiguous_format}
            made = graph.call_function(torch.ops.aten.clone.default, (handed,), layout)
    made.meta = {**after.meta, "val": tensor_of(value).contiguous()}
    made.meta.setdefault("nn_module_stack", {})
    return made
