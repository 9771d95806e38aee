"""Units: what assistants move as one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.adaptation.units import units_of
from hocket.ir import Edge, Graph, Op


def layered(*ops: tuple[str, str], edges=()) -> Graph:
    return Graph(tuple(Op(name, layer=layer) for name, layer in ops), tuple(Edge(*edge) for edge in edges))


def test_a_layer_is_a_unit_with_its_backward_and_update():
    graph = layered(("f1", "a"), ("f2", "b"), ("loss", ""), ("g2", "b"), ("g1", "a"), ("u1", "a"))
    takes_us = dict.fromkeys(graph.by_name, 10.0)
    assert units_of(graph, takes_us) == (("f1", "g1", "u1"), ("f2", "g2"), ("loss",))


def test_the_outermost_module_that_is_not_large_is_a_unit():
    names = ["heads.0.q", "heads.0.k", "heads.1.q", "heads.1.k", "wide.0", "wide.1"]
    graph = layered(*((name.replace(".", "_"), name) for name in names))
    takes_us = dict(zip(graph.by_name, (20.0, 20.0, 20.0, 20.0, 460.0, 460.0), strict=True))
    assert units_of(graph, takes_us) == (
        ("heads_0_q", "heads_0_k"),  # a twenty-fifth of the whole; all heads would be a twelfth
        ("heads_1_q", "heads_1_k"),
        ("wide_0",),
        ("wide_1",),
    )


def test_what_has_to_stay_together_across_layers_takes_no_layer_along():
    graph = layered(("drop1", "a"), ("f1", "a"), ("drop2", "b"), ("f2", "b"))
    takes_us = dict.fromkeys(graph.by_name, 10.0)
    assert units_of(graph, takes_us, [("drop1", "drop2")]) == (("drop1", "drop2"), ("f1",), ("f2",))
    assert units_of(graph, takes_us, [("drop1", "f1")]) == (("drop1", "f1"), ("drop2", "f2"))


def test_next_to_no_time_goes_with_whom_it_exchanges_most_with():
    edges = [("f1", "relu", 100.0), ("relu", "f2", 50.0), ("f1", "add", 1.0), ("f2", "add", 2.0)]
    graph = layered(("f1", "a"), ("relu", "act"), ("f2", "b"), ("add", "c"), edges=edges)
    takes_us = {"f1": 50.0, "relu": 0.4, "f2": 49.0, "add": 0.4}
    assert units_of(graph, takes_us) == (("f1", "relu"), ("f2", "add"))
    assert len(units_of(graph, takes_us | {"relu": 5.0})) == 3


def test_a_unit_takes_only_so_many_others_along():
    names = [f"small{number}" for number in range(20)]
    graph = layered(("large", "a"), *((name, name) for name in names), edges=[("large", name, 8.0) for name in names])
    takes_us = {"large": 1000.0} | dict.fromkeys(names, 9.0)
    units = units_of(graph, takes_us)
    assert sorted(map(len, units))[-1] == 1 + int(0.05 * sum(takes_us.values()) / 9.0)
    assert sum(map(len, units)) == 21


@settings(max_examples=40)
@given(st.data())
def test_every_op_is_in_one_unit_and_what_has_to_stay_together_is(data):
    count = data.draw(st.integers(1, 16))
    names = [f"op{number}" for number in range(count)]
    layers = [data.draw(st.sampled_from(["", "a", "b"])) for _ in names]
    pairs = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=20))
    edges = [(names[a], names[b], 4.0 * b) for a, b in sorted({pair for pair in pairs if pair[0] < pair[1]})]
    together = data.draw(st.lists(st.lists(st.sampled_from(names), min_size=2, max_size=3), max_size=3))
    takes_us = {name: data.draw(st.sampled_from([0.0, 0.1, 20.0])) for name in names}
    units = units_of(layered(*zip(names, layers, strict=True), edges=edges), takes_us, together)
    assert sorted(name for unit in units for name in unit) == sorted(names)
    assert all(any(set(ops) <= set(unit) for unit in units) for ops in together)
