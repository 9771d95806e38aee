from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hocket.planning.critical_path.priority_levels import hardware_levels, stream_plan
from hocket.planning.critical_path.streams import streams_of
from planning.critical_path.examples import branching

WANTED = st.integers(1, 5).flatmap(
    lambda paths: st.builds(
        lambda alpha: {
            (task, rank): paths - rank if task == "activation" else min(paths - rank - alpha - (task == "bias"), 0)
            for task in ("activation", "weight", "bias")
            for rank in range(paths)
        },
        st.integers(0, 5),
    )
)


@given(wanted=WANTED, levels=st.integers(1, 20))
def test_levels_exist_and_never_turn_two_priorities_round(wanted, levels):
    found = hardware_levels(wanted, levels)
    assert set(found.values()) <= set(range(levels))
    for one, more in wanted.items():
        for other, less in wanted.items():
            if more >= less:
                assert found[one] >= found[other]
    if len(set(wanted.values())) <= levels:
        assert len(set(found.values())) == len(set(wanted.values()))
    elif levels > 1:
        assert min(v for (task, _), v in found.items() if task == "activation") > 0


def lanes_by(method: str, levels: int = 2):
    graph, durations = branching()
    streams = streams_of(graph, durations)
    made, _ = stream_plan(graph, streams, "gpu0", levels, method)
    return {lane.name.partition(".")[2]: lane for lane in made.lanes}, made


def test_plain_shares_a_level_and_flat_knows_one():
    lanes, made = lanes_by("plain")
    assert {name: lane.priority for name, lane in lanes.items()} == {
        **{f"activation{rank}": 1 for rank in range(3)},
        **{f"weight{rank}": 0 for rank in range(3)},
    }
    assert not made.after
    assert {lane.priority for lane in lanes_by("flat")[0].values()} == {0}


def test_order_puts_paths_of_one_level_into_one_queue_the_critical_one_first():
    lanes, made = lanes_by("order")
    assert list(lanes) == ["activation0", "weight0", "weight1", "weight2"]
    assert lanes["activation0"].ops == ("fork", "p0.0", "p0.1", "p1.0", "p1.1", "p2.0", "merge")
    assert not made.after
    assert list(lanes_by("order", 3)[0]) == ["activation0", "activation1", "weight0", "weight1", "weight2"]


def test_waits_keep_a_path_back_until_the_better_one_has_begun():
    lanes, made = lanes_by("waits")
    assert len(lanes) == 6
    assert made.after == {"p1.0": ("p0.0",), "p2.0": ("p1.0",)}
    assert lanes_by("waits", 3)[1].after == {"p2.0": ("p1.0",)}
