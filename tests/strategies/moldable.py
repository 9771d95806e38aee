"""Random graphs whose ops may run at any width of one device."""

from dataclasses import dataclass

from hypothesis import strategies as st

from hocket.ir import ROLES, Costs, Device, Graph, Machine
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
