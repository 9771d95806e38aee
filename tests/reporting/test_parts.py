from __future__ import annotations

from xml.etree import ElementTree

from hocket.ir import Costs, Edge, Graph, Lane, Op, Plan
from hocket.reporting import bytes_between, parts_svg

GRAPH = Graph(
    (Op("a", role="forward"), Op("b", role="forward"), Op("c", role="update")),
    (Edge("a", "b", 8.0), Edge("a", "c", 8.0), Edge("b", "c", 5.0), Edge("a", "c")),
)
COSTS = Costs({"a": {"1": 10.0}, "b": {"1": 20.0}})
PLAN = Plan((Lane("x", ("a",), device="x"), Lane("y", ("b", "c"), device="y<")))


def test_bytes_between_devices_count_a_tensor_once():
    assert bytes_between(GRAPH, PLAN) == {("x", "y<"): 8.0}
    assert bytes_between(GRAPH, Plan((Lane("x", ("a", "b", "c")),))) == {}


def test_a_bar_for_each_op_as_wide_as_it_takes_long():
    root = ElementTree.fromstring(parts_svg(GRAPH, PLAN, COSTS, title="<parts>"))
    bars = {
        bar[0].text: float(bar.get("width") or 0) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if len(bar)
    }
    assert bars.keys() == {"a", "b", "c"}
    assert abs(bars["b"] / bars["a"] - 2) < 0.01
    words = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "<parts>" in words
    assert "8 B" in words
    assert {"forward", "update"} <= set(words), "a legend"
    assert {"0", "10 \N{MICRO SIGN}s", "30 \N{MICRO SIGN}s"} <= set(words), "an axis"
    assert any("2 ops, 20" in str(word) for word in words)


def test_thousands_of_ops_are_a_few_bars():
    ops = tuple(Op(str(number), role="forward") for number in range(20_000))
    svg = parts_svg(
        Graph(ops), Plan((Lane("x", tuple(op.name for op in ops)),)), Costs({op.name: {"1": 1.0} for op in ops})
    )
    assert svg.count("<rect") < 50
