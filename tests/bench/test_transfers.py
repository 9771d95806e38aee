from __future__ import annotations

import pytest

from benchmarks.transfers import Cluster, run, straggler_share, with_transfers, worker_machine
from hocket.ir import Buffer, Costs, Edge, Graph, Lane, Link, Machine, NetworkCard, Op, Plan
from hocket.planning.transfers.receives import receives_of
from hocket.simulation import simulate


def test_parameters_are_received_and_gradients_sent():
    ops = (
        Op("f", role="forward", reads=("w", "x"), writes=("y",)),
        Op("g", role="weight_grad", reads=("y",), writes=("dw",)),
        Op("u", role="update", reads=("w", "dw"), writes=("w",)),
    )
    buffers = (Buffer("w", 40.0, "lasting"), Buffer("x", 8.0, "input"), Buffer("y", 8.0), Buffer("dw", 40.0))
    graph = Graph(ops, (Edge("f", "g", 8.0), Edge("g", "u", 40.0), Edge("f", "u")), (), buffers)
    found = with_transfers(graph)
    assert [(op.name, op.role, op.size_bytes) for op in found.ops if op.role in ("recv", "send")] == [
        ("recv:w", "recv", 40.0),
        ("send:g>u", "send", 40.0),
    ]
    assert set(found.edges) == {Edge("f", "g", 8.0), Edge("recv:w", "f", 40.0), Edge("g", "send:g>u", 40.0)}


def test_workers_by_symmetry_are_those_of_the_whole_cluster():
    """All workers of a small cluster side by side, their links on one server's card, against one that has its part."""
    cluster = Cluster(workers=3, servers=1, card_bytes_per_s=1e6, latency_us=5.0)
    sizes = {"a": 30.0, "b": 50.0}
    ops = [Op(name, role="recv", size_bytes=size) for name, size in sizes.items()]
    alone = Plan((Lane("w", tuple(sizes), "channel", "server0->cpu0"),))
    one_us = simulate(Graph(tuple(ops)), alone, Costs({}), worker_machine(cluster)).makespan_us
    everybody = Graph(
        tuple(Op(f"{name}{n}", role="recv", size_bytes=size) for n in range(3) for name, size in sizes.items())
    )
    lanes = [Lane(f"w{n}", (f"a{n}", f"b{n}"), "channel", f"server0->w{n}") for n in range(3)]
    links = tuple(Link("server0", f"w{n}", 1e6, 5.0, cards=("out",)) for n in range(3))
    whole = Machine(Machine.of(cores=1).devices, links, cards=(NetworkCard("out", 1e6),))
    all_us = simulate(everybody, Plan(tuple(lanes)), Costs({}), whole).makespan_us
    assert one_us == pytest.approx(all_us)


def test_who_waits_for_the_last_worker():
    ops = (Op("r1", role="recv", size_bytes=8.0), Op("r2", role="recv", size_bytes=2.0), Op("a"), Op("b"))
    graph = Graph(ops, (Edge("r1", "a"), Edge("r2", "b")))
    machine = Machine(Machine.of(cores=1).devices, (Link("s", "cpu0", 1e6),))
    receives = receives_of(graph, Costs({"a": {"1": 1.0}, "b": {"1": 8.0}}), machine)
    assert straggler_share(receives, 2, lambda _: (1, 0)) == {"step_us": 11.0, "straggler_share": 0.0}
    found = straggler_share(receives, 2, lambda number: ((1, 0), (0, 1))[number])
    assert found == {"step_us": 18.0, "straggler_share": pytest.approx(7 / 18)}


def test_a_small_run():
    result = run(("alexnet",), workers=8, image_size=64)
    rows = result["models"]
    assert [row["batch_factor"] for row in rows] == [0.5, 1.0, 2.0]
    half, whole, twice = (row["communication_to_computation"] for row in rows)
    assert whole == pytest.approx(1.0)
    assert 1.0 < half < 2.0  # some of the computation is by weights, not by images
    assert 0.5 < twice < 1.0
    for row in rows:
        assert row["recvs"] == 16
        assert row["orders"]["auto"]["step_us"] <= min(row["orders"][order]["step_us"] for order in ("layer", "tac"))
        assert row["cluster"]["tac"]["straggler_share"] == 0.0
