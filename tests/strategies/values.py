"""Random graphs, plans, costs, machines and timelines."""

from dataclasses import replace

from hypothesis import strategies as st

from hocket.ir import (
    BUFFER_LIVES,
    ROLES,
    Buffer,
    Carried,
    Costs,
    Device,
    Edge,
    Graph,
    Lane,
    Link,
    Machine,
    NetworkCard,
    Op,
    Plan,
    Share,
    Span,
    Timeline,
)

# Every character that a name may hold: all but white space (and no lone surrogates, which no file can hold).
NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6).filter(
    lambda text: not any(character.isspace() for character in text)
)
PLAIN_NAMES = NAMES.filter(lambda text: "," not in text)
DEVICE_NAMES = NAMES.filter(lambda text: not set(text) & set(":=") and not text.isdecimal())
DURATIONS_US = st.floats(0, 1e4)
SIZES = st.one_of(st.just(0.0), st.floats(0, 1e9))
SHARES = st.builds(Share, st.floats(0, 1, exclude_min=True), st.floats(0, 1))
RATES = st.none() | st.floats(1e-3, 1e15)


@st.composite
def graphs(draw, min_ops: int = 1, max_ops: int = 10, names=None, roles=ROLES) -> Graph:
    """A random DAG whose program order need not be topological, with edges of zero bytes and carried edges."""
    if names is None:
        op_names = [f"op{i}" for i in range(draw(st.integers(min_ops, max_ops)))]
    else:
        op_names = draw(st.lists(names, min_size=min_ops, max_size=max_ops, unique=True))
    ops = [
        Op(
            name,
            draw(st.sampled_from(["", "aten.mm", "aten.convolution"])),
            draw(st.sampled_from(roles)),
            draw(st.sampled_from(["", "features.0"])),
            draw(SIZES),
            draw(SIZES),
            draw(st.booleans()),
        )
        for name in op_names
    ]
    topological = draw(st.one_of(st.just(op_names), st.permutations(op_names)))
    pairs = [(src, dst) for at, dst in enumerate(topological) for src in topological[:at]]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=2 * len(ops))) if pairs else []
    anywhere = st.tuples(st.sampled_from(op_names), st.sampled_from(op_names))
    return Graph(
        tuple(ops),
        tuple(Edge(src, dst, draw(SIZES)) for src, dst in chosen),
        tuple(Carried(*pair) for pair in draw(st.lists(anywhere, max_size=2))),
    )


@st.composite
def any_graphs(draw) -> Graph:
    """Every field of a graph, buffers included; the buffers need not fit the edges."""
    graph = draw(graphs(names=NAMES))
    names = draw(st.lists(st.text(min_size=1, max_size=4), max_size=3, unique=True))
    some = st.lists(st.sampled_from(names), max_size=2).map(tuple) if names else st.just(())
    return replace(
        graph,
        ops=tuple(replace(op, reads=draw(some), writes=draw(some)) for op in graph.ops),
        buffers=tuple(Buffer(name, draw(SIZES), draw(st.sampled_from(BUFFER_LIVES))) for name in names),
    )


@st.composite
def touching_graphs(draw, max_ops: int = 10, max_buffers: int = 4) -> Graph:
    """Ops that read and write buffers of all lives, with exactly the edges that follow from program order."""
    buffers = [
        Buffer(f"b{n}", draw(SIZES), draw(st.sampled_from(BUFFER_LIVES)))
        for n in range(draw(st.integers(1, max_buffers)))
    ]
    some = st.lists(st.sampled_from([buffer.name for buffer in buffers]), max_size=2, unique=True).map(tuple)
    ops = [
        Op(f"op{n}", role=draw(st.sampled_from(ROLES)), reads=draw(some), writes=draw(some))
        for n in range(draw(st.integers(1, max_ops)))
    ]
    touches = [(set(op.reads), set(op.writes)) for op in ops]
    edges, carried = [], []
    for first, (reads, writes) in enumerate(touches):
        for second, (later_reads, later_writes) in enumerate(touches):
            clash = writes & (later_reads | later_writes) | reads & later_writes
            if first < second and clash:
                edges.append(Edge(ops[first].name, ops[second].name, draw(SIZES)))
            if any(buffer.name in clash and buffer.life == "lasting" for buffer in buffers):
                carried.append(Carried(ops[first].name, ops[second].name))
    return Graph(tuple(ops), tuple(edges), tuple(carried), tuple(buffers))


@st.composite
def plans_of(draw, graph: Graph, max_lanes: int = 4, kind: str = "cores") -> Plan:
    """A plan that can run: the ops in some topological order on a few lanes, sometimes with further waits."""
    order = draw(topological_orders(graph))
    lanes: list[list[str]] = [[] for _ in range(draw(st.integers(1, max_lanes)))]
    after: dict[str, tuple[str, ...]] = {}
    for at, op in enumerate(order):
        lanes[draw(st.integers(0, len(lanes) - 1))].append(op)
        if at and draw(st.integers(0, 4)) == 0:
            after[op] = (draw(st.sampled_from(order[:at])),)
    device = "gpu0" if kind == "stream" else "cpu0"
    return Plan(tuple(Lane(f"lane{n}", tuple(ops), kind, device) for n, ops in enumerate(lanes)), after)


@st.composite
def costs_of(draw, graph: Graph, widths: int = 8, devices: tuple[str, ...] = ()) -> Costs:
    """Costs with which each op may run at any width: some measured, the others to be interpolated."""
    keys = st.one_of(
        st.integers(1, widths).map(str),
        *(st.sampled_from([device, f"{device}:1", f"{device}:2"]) for device in devices),
    )
    table = {}
    for op in graph.ops:
        own = draw(st.dictionaries(keys, DURATIONS_US, max_size=4))
        table[op.name] = {str(draw(st.integers(1, widths))): draw(DURATIONS_US), **own}
    return Costs(table)


@st.composite
def any_costs(draw) -> Costs:
    keys = st.one_of(
        st.integers(1, 300).map(str), DEVICE_NAMES, st.builds("{}:{}".format, DEVICE_NAMES, st.integers(1, 99))
    ).filter(lambda key: not key.rpartition(":")[2].startswith("-"))
    rows = st.dictionaries(keys, st.floats(0, 1e24), min_size=1, max_size=4)
    durations = draw(st.dictionaries(st.text(max_size=5), rows, max_size=4))
    known = st.sampled_from(sorted(durations)) if durations else st.nothing()
    return Costs(
        durations,
        draw(st.dictionaries(known, rows)),
        draw(st.dictionaries(known, st.sampled_from(["measured", "analytic", "published"]))),
        draw(st.text(max_size=10)),
        draw(st.dictionaries(st.text(max_size=5), st.dictionaries(DEVICE_NAMES, SHARES, max_size=2), max_size=3)),
        draw(st.sampled_from(["compact", "scatter"])),
    )


@st.composite
def any_machines(draw) -> Machine:
    names = draw(st.lists(DEVICE_NAMES, min_size=1, max_size=3, unique=True))
    devices = []
    for name in names:
        cores = draw(st.integers(1, 4))
        cpus = st.lists(st.lists(st.integers(0, 64), max_size=2), min_size=cores, max_size=cores)
        devices.append(
            Device(
                name,
                draw(st.sampled_from(["cpu", "cuda"])),
                cores,
                draw(st.integers(1, 4)),
                draw(RATES),
                draw(RATES),
                draw(RATES),
                draw(st.just(()) | cpus),
                draw(st.integers(1, 3)),
                *(
                    draw(DURATIONS_US.filter(bool) if field == "smt" else DURATIONS_US)
                    for field in ("smt", "launch", "graph", "event")
                ),
                cores_per_cache=draw(st.integers(1, 3)),
            )
        )
    ends = draw(st.lists(st.tuples(NAMES, NAMES), max_size=3, unique=True))
    channels = st.none() | st.integers(1, 4)
    cards = draw(st.lists(NAMES, max_size=2, unique=True))
    passed = [(), tuple(cards), tuple(cards[:1])]
    return Machine(
        tuple(devices),
        tuple(
            Link(*pair, draw(st.floats(1e-3, 1e12)), draw(DURATIONS_US), draw(channels), draw(st.sampled_from(passed)))
            for pair in ends
        ),
        draw(st.text(max_size=5)),
        tuple(NetworkCard(name, draw(st.floats(1e-3, 1e12))) for name in cards),
    )


@st.composite
def any_lanes(draw, name: str, ops: tuple[str, ...]) -> Lane:
    kind = draw(st.sampled_from(["cores", "stream", "channel"]))
    device = draw(NAMES)
    if kind == "channel":
        device = f"{draw(DEVICE_NAMES.filter(lambda text: '->' not in text))}->{device}"
    cores = draw(st.lists(st.integers(0, 99), unique=True, max_size=3)) if kind == "cores" else ()
    width = draw(st.integers(1, 99)) if kind == "cores" else 1
    return Lane(name, ops, kind, device, width, tuple(cores), draw(st.integers(-2, 3)))


@st.composite
def any_plans(draw) -> Plan:
    """A well-formed plan that fits no graph in particular."""
    ops = draw(st.lists(NAMES, unique=True, max_size=8))
    lane_names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=4))
    lane_of = [draw(st.sampled_from(lane_names)) for _ in ops]
    lanes = tuple(
        draw(any_lanes(name, tuple(op for op, at in zip(ops, lane_of, strict=True) if at == name)))
        for name in lane_names
    )
    plain = st.sampled_from([op for op in ops if "," not in op] or [""]).filter(bool)
    has_plain = any("," not in op for op in ops)
    after = draw(st.dictionaries(plain, st.lists(plain, max_size=3), max_size=3)) if has_plain else {}
    peaks = st.none() | st.integers(0, 10**15)
    waits = {op: tuple(others) for op, others in after.items()}
    return Plan(lanes, waits, draw(st.just("") | NAMES), draw(peaks), draw(peaks))


@st.composite
def any_timelines(draw) -> Timeline:
    lanes = draw(st.lists(st.text(max_size=4), unique=True, min_size=1, max_size=3))
    spans = []
    for lane in lanes:
        times = sorted(draw(st.lists(st.floats(0, 1e9), max_size=6)))
        pairs = zip(times[::2], times[1::2], strict=False)
        spans += [Span(draw(st.text(max_size=4)), lane, start, end) for start, end in pairs]
    return Timeline(tuple(draw(st.permutations(spans))), tuple(lanes), draw(st.sampled_from(["measured", "simulated"])))


@st.composite
def topological_orders(draw, graph: Graph) -> list[str]:
    order: list[str] = []
    left = list(graph.by_name)
    while left:
        ready = [op for op in left if all(before in order for before in graph.predecessors[op])]
        order.append(draw(st.sampled_from(ready)))
        left.remove(order[-1])
    return order
