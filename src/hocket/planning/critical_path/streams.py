r"""Streams: one for each parallel layer path and each task of a layer, and at most eight.

Algorithm 1 of TurboDL gives each layer path one path of execution for each task of its layers, and each of these a
stream. Blocks run one after the other, so they use the same streams: a chain such as VGG-16 needs three at any depth,
where Caffe with cuDNN makes 38 (section 4.3)::

    activation 0   [ conv1 ][ conv2 ]  ... [ dA2 ][ dRelu1 ]                       priority 1
    weight 0                                      [ dW2 ][ u2 ][ dW1 ][ u1 ]                0
    bias 0                                        [ dB2 ][ v2 ] [ dB1 ][ v1 ]              -1

Priorities have two levels: the rank of a layer path in its block, and the task. An activation gradient has the priority
of its path, a weight gradient one that is lower by the number of paths (alpha), a bias gradient one lower still (beta).
Every gradient of a parameter therefore yields to every activation gradient. With two layer paths::

    priority   2    activation gradients of the critical path, and all that lies outside of blocks
               1    activation gradients of the other path
               0    weight gradients of the critical path
              -1    weight gradients of the other path, bias gradients of the critical path
              -2    bias gradients of the other path

If eight are not enough, each task keeps at least one stream, and activation gradients get the most. Paths of higher
rank share the last stream of their task. So do paths that take less than a thousandth of the backbone, such as the
draw of a dropout mask, since a separate stream would gain less than that.

All lanes keep one order of the whole step, so they never wait for each other in a circle. In it the backbone has its
program order, and each other op comes right after the last op of the backbone that it depends on: a weight gradient
after the activation gradient that it reads, and an update after its gradient, not after the whole backward. So a stream
of weight gradients runs them in the order in which they become ready, and frees activations in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hocket.ir import Graph
from hocket.planning.critical_path.backbone import Backbone, backbone_of
from hocket.planning.critical_path.blocks import Block, blocks_of
from hocket.planning.critical_path.paths import Path, in_ns, ranked_paths

MAX_STREAMS = 8

# Purpose of a stream of a layer path: activation gradients (and forwards), weight gradients, bias gradients.
TASKS = ("activation", "weight", "bias")

# Share of the backbone's time below which a layer path gets no separate stream.
LEAST_PATH = 1e-3

Stream = tuple[str, int]


@dataclass(frozen=True)
class Streams:
    """The stream of each op.

    Attributes:
        order: all ops but transfers, in the order that every lane keeps.
        stream_of: op -> its task (one of `TASKS`) and the rank of the layer path whose stream it takes.
        backbone: the ops that other ops of the step wait for.
        blocks: the backbone's blocks, each with its layer paths, the critical one first.
        updates_last: the argument of `step_order` that made the order.
    """

    order: tuple[str, ...]
    stream_of: Mapping[str, Stream]
    backbone: Backbone
    blocks: tuple[tuple[Block, tuple[Path, ...]], ...]
    updates_last: bool = False

    @property
    def num_paths(self) -> int:
        """The most layer paths of a block."""
        return max([len(paths) for _, paths in self.blocks], default=1)

    def priority(self, stream: Stream) -> int:
        """The priority of a stream. Higher runs first."""
        task, rank = stream
        path = self.num_paths - min(rank, self.num_paths - 1)
        return path - {"activation": 0, "weight": self.num_paths, "bias": self.num_paths + 1}[task]

    def lanes(self) -> dict[Stream, list[str]]:
        """The ops of each stream in order: activation gradients first, the critical path first."""
        found: dict[Stream, list[str]] = {}
        for op in self.order:
            found.setdefault(self.stream_of[op], []).append(op)
        return {stream: found[stream] for stream in sorted(found, key=lambda s: (TASKS.index(s[0]), s[1]))}


def streams_of(
    graph: Graph, durations_us: Mapping[str, float], max_streams: int = MAX_STREAMS, *, updates_last: bool = False
) -> Streams:
    """Rank the layer paths, and give every op a stream.

    Args:
        graph: one step.
        durations_us: of each op of the backbone.
        max_streams: 1 to 8.
        updates_last: put updates after all other ops, in program order, and not after their gradients.

    Example:
        >>> from hocket.ir import Edge, Op
        >>> ops = (Op("f", role="forward"), Op("dA", role="activation_grad"), Op("dW", role="weight_grad"))
        >>> graph = Graph((*ops, Op("u", role="update")), (Edge("f", "dA"), Edge("dA", "dW"), Edge("dW", "u")))
        >>> streams_of(graph, {"f": 1.0, "dA": 1.0}).lanes()
        {('activation', 0): ['f', 'dA'], ('weight', 0): ['dW', 'u']}
    """
    backbone = backbone_of(graph)
    weights = in_ns([durations_us[op] for op in backbone.ops])
    blocks = tuple((block, tuple(ranked_paths(backbone, block, weights))) for block in blocks_of(backbone))
    rank = dict.fromkeys(backbone.ops, 0)
    least = LEAST_PATH * sum(weights)
    for _, paths in blocks:
        wide = sum(sum(weights[op] for op in path.ops) >= least for path in paths)
        for number, path in enumerate(paths):
            for op in path.ops:
                rank[backbone.ops[op]] = min(number, max(wide - 1, 0))
    tasks = _tasks(graph, rank)
    if max_streams < len(TASKS):  # one for all ops, or one for the backbone and one for the others
        side = "weight" if max_streams == 2 else "activation"
        tasks = {op: (task if task == "activation" else side, number) for op, (task, number) in tasks.items()}
    width = _widths({task: {r for t, r in tasks.values() if t == task} for task in TASKS}, max_streams)
    stream_of = {name: (task, min(number, width[task] - 1)) for name, (task, number) in tasks.items()}
    return Streams(
        order=step_order(graph, backbone.ops, updates_last=updates_last),
        stream_of=stream_of,
        backbone=backbone,
        blocks=blocks,
        updates_last=updates_last,
    )


def step_order(graph: Graph, backbone: Sequence[str], *, updates_last: bool = False) -> tuple[str, ...]:
    """All ops but transfers: the backbone in the given order, and each other op after those of it that it depends on.

    Args:
        graph: one step.
        backbone: the names of its backbone, in any order that respects the edges.
        updates_last: put updates after all other ops, in program order.
    """
    inside = set(backbone)
    rest = [op for op in graph.order if op not in inside and graph[op].role not in ("send", "recv")]
    place = {op: at for at, op in enumerate((*backbone, *rest))}
    behind: dict[str, int] = {}
    for op in place:
        if op in inside or (updates_last and graph[op].role == "update"):
            behind[op] = place[op]
        else:
            behind[op] = max([behind[other] for other in graph.predecessors[op] if other in behind], default=-1)
    return tuple(sorted(place, key=lambda op: (behind[op], place[op])))


def _tasks(graph: Graph, rank: Mapping[str, int]) -> dict[str, Stream]:
    """For each op its task and the rank of its layer's path."""
    of_layer: dict[str, int] = {}
    for name, number in rank.items():
        if graph[name].role == "activation_grad" and graph[name].layer:
            of_layer.setdefault(graph[name].layer, number)
    found: dict[str, Stream] = {}
    for name in graph.order:
        if graph[name].role in ("send", "recv"):
            continue
        if name in rank:
            found[name] = ("activation", rank[name])
            continue
        role, layer = graph[name].role, graph[name].layer
        before = [other for other in graph.predecessors[name] if other in found]
        if role in ("weight_grad", "bias_grad"):
            number = of_layer[layer] if layer in of_layer else max([found[other][1] for other in before], default=0)
            found[name] = ("bias" if role == "bias_grad" else "weight", number)
        else:  # the stream of the gradient that it waits for
            gradients = [found[other] for other in before if other not in rank and graph.predecessors[other]]
            found[name] = gradients[-1] if gradients else ("weight", 0)
    for name in reversed(graph.order):
        # An update op without predecessors (a momentum that decays) goes to the stream of its successors.
        if name in found and name not in rank and not any(other in found for other in graph.predecessors[name]):
            after = [found[other] for other in graph.successors[name] if other in found and other not in rank]
            found[name] = after[0] if after else found[name]
    return found


def _widths(ranks: Mapping[str, set[int]], max_streams: int) -> dict[str, int]:
    """The number of streams of each task."""
    width = {task: max(ranks[task], default=-1) + 1 for task in TASKS}
    while sum(width.values()) > max_streams:
        # The side task with more streams loses one first, and the activation gradients last.
        wide = [task for task in ("bias", "weight") if width[task] > 1] or ["activation"]
        task = max(wide, key=width.__getitem__)
        if width[task] <= 1:
            break
        width[task] -= 1
    return width
