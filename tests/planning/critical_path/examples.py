"""Networks written out by hand, and random ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hypothesis import strategies as st

from hocket.ir import Buffer, Carried, Costs, Edge, Graph, Op
from hocket.planning.critical_path.backbone import Backbone, Block, Path

MB = 1e6


def network(layers: int = 3, *, buffers: bool = True) -> Graph:
    """A chain of convolutions with loss, activation, weight and bias gradients and updates, memory included."""
    ops: list[Op] = []
    sizes = [Buffer("batch", MB, "input")]

    def add(name: str, role: str, reads: list[str], writes: list[str], layer: str = "") -> None:
        made = {buffer.name for buffer in sizes}
        for buffer in writes:
            if buffer not in made:
                life = "kept" if role in ("weight_grad", "bias_grad") else "step"
                sizes.append(Buffer(buffer, 0.01 * MB if life == "kept" else MB, life))
        ops.append(Op(name, "aten.convolution", role, layer, 1e6, MB, reads=tuple(reads), writes=tuple(writes)))

    for n in range(1, layers + 1):
        sizes += [Buffer(f"w{n}", 0.01 * MB, "lasting"), Buffer(f"b{n}", 0.01 * MB, "lasting")]
    for n in range(1, layers + 1):
        add(f"f{n}", "forward", [f"a{n - 1}" if n > 1 else "batch", f"w{n}", f"b{n}"], [f"a{n}"], f"layer{n}")
    add("loss", "activation_grad", [f"a{layers}"], [f"g{layers}"])
    for n in range(layers, 0, -1):
        if n > 1:
            add(f"dA{n}", "activation_grad", [f"g{n}", f"w{n}"], [f"g{n - 1}"], f"layer{n}")
        add(f"dW{n}", "weight_grad", [f"g{n}", f"a{n - 1}" if n > 1 else "batch"], [f"dw{n}"], f"layer{n}")
        add(f"dB{n}", "bias_grad", [f"g{n}"], [f"db{n}"], f"layer{n}")
    for n in range(1, layers + 1):
        add(f"uW{n}", "update", [f"dw{n}", f"w{n}"], [f"w{n}"], f"layer{n}")
        add(f"uB{n}", "update", [f"db{n}", f"b{n}"], [f"b{n}"], f"layer{n}")
    edges: dict[tuple[str, str], float] = {}
    for at, op in enumerate(ops):
        for buffer in {*op.reads, *op.writes}:
            before = [
                other for other in ops[:at] if buffer in other.writes or (buffer in op.writes and buffer in other.reads)
            ]
            for other in before:
                flows = MB if buffer in other.writes and buffer in op.reads else 0.0
                edges[other.name, op.name] = edges.get((other.name, op.name), 0.0) + flows
    carried = [(f"u{t}{n}", f"f{n}") for n in range(1, layers + 1) for t in "WB"]
    carried += [(f"u{t}{n}", f"u{t}{n}") for n in range(1, layers + 1) for t in "WB"]
    carried += [(f"uW{n}", f"dA{n}") for n in range(2, layers + 1)]
    graph_edges = tuple(Edge(*pair, size) for pair, size in edges.items())
    return Graph(tuple(ops), graph_edges, tuple(Carried(*pair) for pair in carried), tuple(sizes) if buffers else ())


def branching(
    lengths: tuple[tuple[float, ...], ...] = ((5.0, 4.0), (3.0, 4.0), (6.0,)),
) -> tuple[Graph, dict[str, float]]:
    """A fork, ways of activation gradients of these durations, and a merge; a weight gradient for each op of a way."""
    ops = [Op("fork", role="activation_grad")]
    durations = {"fork": 1.0, "merge": 1.0, "dWmerge": 1.0, "u": 1.0}
    edges = []
    for number, way in enumerate(lengths):
        names = [f"p{number}.{at}" for at in range(len(way))]
        ops += [Op(name, role="activation_grad", layer=name) for name in names]
        durations.update(zip(names, way, strict=True))
        edges += list(pairwise(["fork", *names, "merge"]))
        for before, name in pairwise(["fork", *names]):
            ops.append(Op(f"dW{name}", role="weight_grad", layer=name))
            durations[f"dW{name}"] = 1.0
            edges.append((before, f"dW{name}"))
    ops += [Op("merge", role="activation_grad"), Op("dWmerge", role="weight_grad"), Op("u", role="update")]
    edges += [("merge", "dWmerge"), ("dWmerge", "u")]
    order = {name: at for at, name in enumerate(op.name for op in ops)}
    edges.sort(key=lambda edge: (order[edge[0]], order[edge[1]]))
    return Graph(tuple(ops), tuple(Edge(*edge, 1.0) for edge in edges)), durations


def gpu_costs(graph: Graph, durations: dict[str, float] | None = None, shares=None) -> Costs:
    row = {op.name: {"gpu0": (durations or {}).get(op.name, 10.0)} for op in graph.ops}
    return Costs(row, shares={op: {"gpu0": share} for op, share in (shares or {}).items()})


@st.composite
def series_parallel(draw, depth: int = 3) -> Backbone:
    """A random series-parallel graph: ops in a row, and ways side by side between two ops, nested."""
    above: list[list[int]] = []

    def op(before: list[int]) -> list[int]:
        above.append(before)
        return [len(above) - 1]

    def part(before: list[int], left: int) -> list[int]:
        kind = draw(st.sampled_from(["op", "row", "side by side"])) if left else "op"
        if kind == "op":
            return op(before)
        if kind == "row":
            for _ in range(draw(st.integers(1, 3))):
                before = part(before, left - 1)
            return before
        fork = op(before)
        ends = [part(fork, left - 1) for _ in range(draw(st.integers(2, 3)))]
        return op([end for way in ends for end in way])

    part([], depth)
    return as_backbone(above)


@st.composite
def dags(draw, max_ops: int = 9) -> Backbone:
    """Any order of a few ops, reduced."""
    from hocket.planning.critical_path.backbone import reduced

    count = draw(st.integers(1, max_ops))
    above = [draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True)) if at else [] for at in range(count)]
    return as_backbone(reduced(above))


def as_backbone(above: list[list[int]]) -> Backbone:
    below: list[list[int]] = [[] for _ in above]
    for op, before in enumerate(above):
        for other in before:
            below[other].append(op)
    return Backbone(tuple(f"op{n}" for n in range(len(above))), tuple(map(tuple, above)), tuple(map(tuple, below)))


def ancestors(above: Sequence[Sequence[int]]) -> list[int]:
    """For each op of a topological order all that comes before it, as a set of bits."""
    found: list[int] = []
    for before in above:
        mine = 0
        for other in before:
            mine |= found[other] | 1 << other
        found.append(mine)
    return found


def listed_paths(backbone: Backbone, block: Block, durations_ns: Sequence[int]) -> list[Path]:
    """The same by the letter of Algorithm 1: list all ways, sort them, and give each op to the first that has it.

    For small blocks only: their number can be exponential.
    """
    inside = set(block.ops)

    def ways(op: int) -> Iterator[tuple[int, ...]]:
        following = [other for other in backbone.below[op] if other in inside]
        for other in following:
            for rest in ways(other):
                yield (op, *rest)
        if not following:
            yield (op,)

    starts = [op for op in block.ops if not inside.intersection(backbone.above[op])]
    found = [(sum(durations_ns[op] for op in way), way) for start in starts for way in ways(start)]
    left = set(block.ops)
    paths = []
    for length_ns, way in sorted(found, key=lambda entry: (-entry[0], entry[1])):
        mine = tuple(op for op in way if op in left)
        if mine:
            left.difference_update(mine)
            paths.append(Path(length_ns, mine))
    return paths
