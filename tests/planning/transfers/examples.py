"""Steps of a worker that receives its parameters, random and from the paper."""

import random
from dataclasses import dataclass

from hocket.ir import Costs, Edge, Graph, Link, Machine, Op

ONE_CORE = Machine(Machine.of(cores=1).devices, (Link("server", "cpu0", 1e6),))


@dataclass(frozen=True)
class Step:
    graph: Graph
    costs: Costs
    machine: Machine = ONE_CORE


def step(recvs: dict[str, float], ops: dict[str, tuple[float, str]]) -> Step:
    """Recvs with what each takes, and ops with what each takes and the names of what it waits for."""
    described = [Op(name, role="recv", size_bytes=us) for name, us in recvs.items()] + [Op(name) for name in ops]
    edges = [Edge(before, name) for name, (_, waits) in ops.items() for before in waits.split()]
    return Step(Graph(tuple(described), tuple(edges)), Costs({name: {"1": us} for name, (us, _) in ops.items()}))


# TicTac, Figure 1(a): op2 needs both, op1 the first alone.
FIGURE_1 = step({"recv2": 4.0, "recv1": 4.0}, {"op1": (6.0, "recv1"), "op2": (5.0, "op1 recv2")})
# Figure 4(a): each unblocks work of its own; and 4(b): A and B together unblock some, then C, then D.
FIGURE_4A = step({"B": 7.0, "A": 2.0}, {"a": (5.0, "A"), "b": (3.0, "B")})
FIGURE_4B = step(
    {"D": 1.0, "C": 2.0, "B": 4.0, "A": 3.0}, {"op1": (5.0, "A B"), "op2": (5.0, "op1 C"), "op3": (5.0, "op2 D")}
)


def random_step(seed: int, most_recvs: int = 8) -> Step:
    """3 to `most_recvs` recvs, up to twice as many ops, communication over computation between 1/4 and 4."""
    rng = random.Random(seed)
    recvs = [f"recv{n}" for n in range(rng.randint(3, most_recvs))]
    ops = [f"op{n}" for n in range(rng.randint(len(recvs), 2 * len(recvs)))]
    wire_us = [rng.uniform(1, 20) for _ in recvs]
    compute_us = [rng.uniform(1, 20) for _ in ops]
    ratio = 4.0 ** rng.uniform(-1, 1)
    scale = ratio * sum(compute_us) / sum(wire_us)
    edges = set()
    for at, op in enumerate(ops):
        before = recvs + ops[:at]
        edges |= {Edge(other, op) for other in rng.sample(before, rng.randint(1, min(3, len(before))))}
    for recv in recvs:  # none is there for nothing
        edges.add(Edge(recv, rng.choice(ops)))
    described = [Op(name, role="recv", size_bytes=us * scale) for name, us in zip(recvs, wire_us, strict=True)]
    rng.shuffle(described)
    graph = Graph((*described, *map(Op, ops)), tuple(sorted(edges)))
    return Step(graph, Costs({op: {"1": us} for op, us in zip(ops, compute_us, strict=True)}))


def resnet_step(depths: tuple[int, ...]) -> Step:
    """Forward and backward of a ResNet of bottleneck blocks: (3, 8, 36, 3) is ResNet-152 with its 467 parameters."""
    recvs: dict[str, float] = {}
    ops: dict[str, tuple[float, str]] = {}
    backward: list[tuple[str, str]] = []

    def layer(name: str, source: str, channels_in: int, channels_out: int, kernel: int) -> str:
        recvs[f"{name}.weight"] = float(channels_in * channels_out * kernel**2)
        recvs[f"{name}.bn.weight"] = recvs[f"{name}.bn.bias"] = float(channels_out)
        ops[name] = (recvs[f"{name}.weight"] // 64 + 8, f"{source} {name}.weight".strip())
        ops[f"{name}.bn"] = (16.0, f"{name} {name}.bn.weight {name}.bn.bias")
        backward.append((name, source))
        return f"{name}.bn"

    last = layer("stem", "", 3, 64, 7)
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for block in range(depth):
            name = f"stage{stage}.block{block:02}"
            inside = layer(f"{name}.conv1", last, channels, width, 1)
            inside = layer(f"{name}.conv2", inside, width, width, 3)
            inside = layer(f"{name}.conv3", inside, width, 4 * width, 1)
            past = layer(f"{name}.down", last, channels, 4 * width, 1) if block == 0 else last
            ops[f"{name}.add"] = (4.0, f"{inside} {past}")
            last, channels = f"{name}.add", 4 * width
    recvs |= {"fc.weight": channels * 1000.0, "fc.bias": 1000.0}
    ops["fc"] = (64.0, f"{last} fc.weight fc.bias")
    after = "fc"
    for name, source in reversed(backward):
        ops[f"{name}.dA"] = (2 * ops[name][0], f"{after} {name}.weight")
        ops[f"{name}.dW"] = (ops[name][0], f"{after} {source}".strip())
        after = f"{name}.dA"
    return step(recvs, ops)
