"""Random graphs whose ops may run at any width of one device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from hocket.ir import ROLES, Costs, Device, Edge, Graph, Machine, Op
from hocket.planning.moldable.instance import Instance, instance_of
from strategies.values import graphs

# Durations that meet often, with zeros, and durations that hardly ever do.
MOLDABLE_US = st.one_of(st.integers(0, 12).map(float), st.floats(0.0, 1e3))


@dataclass(frozen=True)
class Moldable:
    """A graph whose ops may run at any width of one device, as planners see it."""

    graph: Graph
    costs: Costs
    machine: Machine

    @property
    def device(self) -> Device:
        return self.machine.devices[0]

    @property
    def instance(self) -> Instance:
        return instance_of(self.graph, self.costs, self.device)


@st.composite
def moldable_cases(draw, max_ops: int = 10, max_cores: int = 8, smt: int = 1, roles=ROLES) -> Moldable:
    """Any graph, and any time at all at each width."""
    graph = draw(graphs(max_ops=max_ops, roles=roles))
    cores = draw(st.integers(1, max_cores))
    durations = draw(
        st.lists(
            st.lists(MOLDABLE_US, min_size=cores, max_size=cores), min_size=len(graph.ops), max_size=len(graph.ops)
        )
    )
    rows = [{str(width): us for width, us in enumerate(of_op, 1)} for of_op in durations]
    costs = Costs(dict(zip(graph.by_name, rows, strict=True)))
    return Moldable(graph, costs, Machine.of(cores=cores, smt=draw(st.integers(1, smt))))


@st.composite
def apart_in(draw, case: Moldable) -> dict[int, set[int]]:
    """For some ops those that they shall not run beside; it goes both ways."""
    apart: dict[int, set[int]] = {}
    number = st.integers(0, len(case.graph) - 1)
    for one, other in draw(st.lists(st.tuples(number, number), max_size=4)):
        if one != other:
            apart.setdefault(one, set()).add(other)
            apart.setdefault(other, set()).add(one)
    return apart


@st.composite
def decided_cases(draw, max_ops: int = 10) -> tuple[Moldable, Instance, list[int]]:
    """A case, its numbers with a time to wake lanes and pairs to be kept apart, and a width for each op."""
    case = draw(moldable_cases(max_ops=max_ops))
    instance = replace(case.instance, wait_us=draw(st.sampled_from([0.0, 2.5])), apart=draw(apart_in(case)))
    return case, instance, [draw(st.integers(1, instance.num_cores)) for _ in case.graph.ops]


def instance_by(rows: Mapping[str, Sequence[float]], *edges: Sequence[str]) -> Instance:
    """An instance by hand: how long each op takes at each width, and pairs of ops of which one waits for the other."""
    cores = len(next(iter(rows.values())))
    costs = Costs({op: {str(width): us for width, us in enumerate(row, 1)} for op, row in rows.items()})
    graph = Graph(tuple(map(Op, rows)), tuple(Edge(*edge) for edge in edges))
    return instance_of(graph, costs, Device("cpu0", cores=cores))
