from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Costs, Edge, Graph, Lane, Link, Machine, NetworkCard, Op, Plan
from hocket.simulation import simulate
from hocket.simulation.cards import max_min_rates


def fed(links: dict[str, list[float]], rates: dict[str, float], card: float, latency_us: float = 0.0, channels=1):
    """Spans of transfers of so many bytes from one server, whose card is shared, to workers over a link each."""
    ops, lanes = [], []
    for worker, sizes in links.items():
        names = [f"{worker}{n}" for n in range(len(sizes))]
        ops += [Op(name, role="recv", size_bytes=size) for name, size in zip(names, sizes, strict=True)]
        lanes.append(Lane(worker, tuple(names), "channel", f"server->{worker}"))
    machine = Machine(
        Machine.of(cores=1).devices,
        tuple(Link("server", worker, rates[worker], latency_us, channels, ("card",)) for worker in links),
        cards=(NetworkCard("card", card),),
    )
    found = simulate(Graph(tuple(ops)), Plan(tuple(lanes)), Costs({}), machine)
    return {span.op: (span.start_us, span.end_us) for span in found.spans}


def test_two_workers_have_half_the_card_each_and_the_last_one_all_of_it():
    spans = fed({"a": [100.0], "b": [300.0]}, {"a": 1e6, "b": 1e6}, card=1e6)
    assert spans == {"a0": (0.0, 200.0), "b0": (0.0, 400.0)}


def test_a_slow_link_leaves_its_part_to_others():
    spans = fed({"a": [90.0], "b": [90.0], "c": [10.0]}, {"a": 1e6, "b": 1e6, "c": 1e5}, card=1e6)
    assert spans["c0"] == (0.0, 100.0)
    assert spans["a0"] == spans["b0"] == (0.0, 190.0)  # 0.45 for 100, then 0.5


def test_latency_uses_no_card():
    spans = fed({"a": [100.0], "b": [100.0]}, {"a": 1e6, "b": 1e6}, card=1e6, latency_us=30.0)
    assert spans == {"a0": (0.0, 230.0), "b0": (0.0, 230.0)}


def test_a_link_queues_on_its_channels_and_its_card():
    ops = tuple(Op(name, role="recv", size_bytes=100.0) for name in "abc")
    lanes = tuple(Lane(name, (name,), "channel", "s->w") for name in "abc")
    machine = Machine(
        Machine.of(cores=1).devices,
        (Link("s", "w", 1e6, channels=2, cards=("card",)),),
        cards=(NetworkCard("card", 1e6),),
    )
    found = simulate(Graph(ops), Plan(lanes), Costs({}), machine)
    assert {span.op: (span.start_us, span.end_us) for span in found.spans} == {
        "a": (0.0, 200.0),
        "b": (0.0, 200.0),
        "c": (200.0, 300.0),
    }


def test_a_card_as_fast_as_all_its_links_changes_nothing():
    ops = (Op("r", role="recv", size_bytes=100.0), Op("q", role="recv", size_bytes=50.0), Op("f"))
    graph = Graph(ops, (Edge("r", "f"), Edge("q", "f")))
    plan = Plan((Lane("w", ("r", "q"), "channel", "s->w"), Lane("c", ("f",))))
    costs = Costs({"f": {"1": 7.0}})
    plain = Machine(Machine.of(cores=1).devices, (Link("s", "w", 3e6, 1.0),))
    carded = Machine(plain.devices, (Link("s", "w", 3e6, 1.0, cards=("n",)),), cards=(NetworkCard("n", 3e6),))
    one, other = [simulate(graph, plan, costs, machine) for machine in (plain, carded)]
    assert other.makespan_us == pytest.approx(one.makespan_us, rel=1e-12)


@given(data=st.data())
def test_max_min_rates_are_fair_and_leave_nothing(data):
    cards = {name: data.draw(st.floats(1, 100)) for name in "xyz"}
    flows = data.draw(st.lists(st.tuples(st.floats(0.5, 100), st.sets(st.sampled_from("xyz"))), max_size=6))
    limits, passed = [limit for limit, _ in flows], [sorted(names) for _, names in flows]
    rates = max_min_rates(limits, passed, cards)
    used = {card: sum(rate for rate, names in zip(rates, passed, strict=True) if card in names) for card in cards}
    full = {card for card, us in used.items() if us >= cards[card] * (1 - 1e-9)}
    assert all(us <= cards[card] * (1 + 1e-9) for card, us in used.items())
    for rate, limit, names in zip(rates, limits, passed, strict=True):
        assert rate <= limit * (1 + 1e-9)
        # Whoever has less than its link gives has a card that is full, on which nobody has more.
        if rate < limit * (1 - 1e-9):
            assert any(
                all(rate >= other * (1 - 1e-9) for other, its in zip(rates, passed, strict=True) if card in its)
                for card in full.intersection(names)
            )
