"""When ranks look whether ops should move, what they measure, and what the rules of rank 0 have to be."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import torch

from hocket.adaptation import AssistantRules
from hocket.adaptation.assistant_rules import RuledFlow, RuledOp
from hocket.distributed.stages import rebalancing
from hocket.distributed.stages.rebalancing import Rebalancer, made_rules, rules_from
from hocket.errors import PeerError
from hocket.ir import Costs, Edge, Graph, Link, Machine, Op, Span, Timeline
from hocket.ir.machine import Device
from support.refusals import fails

OPS = tuple(RuledOp(name, "compute", (5.0, 5.0), unit=unit) for name, unit in zip("abcdef", "uuvwxy", strict=True))
RULES = AssistantRules(("rank0", "rank1"), OPS, (RuledFlow(0, 1, 1.0),))
RANK_OF = dict(zip("abcdef", (0, 0, 0, 1, 1, 1), strict=True))
GRAPH = Graph(tuple(Op(name) for name in "abcdef"), (Edge("a", "b", 8.0),))


def step(slowdown: float, rank: int = 0) -> Timeline:
    """A step in which the ops of a rank take a multiple of the planned time, and all else waits for them."""
    ops = [op for op, at in RANK_OF.items() if at == rank]
    spans = [Span(op, f"rank{rank}", 5.0 * slowdown * n, 5.0 * slowdown * (n + 1)) for n, op in enumerate(ops)]
    return Timeline(tuple(spans), ("rank0", "rank1"), "measured")


class Looking:
    """A rank 0 that gets what the other one measures, and what its own system says."""

    def __init__(self, monkeypatch, every_steps=5):
        self.used, self.asked = 1.0, 0
        monkeypatch.setattr(rebalancing, "CpuUse", lambda: SimpleNamespace(since_last=lambda: self.used))
        decide = rebalancing.decide
        monkeypatch.setattr(rebalancing, "decide", lambda *numbers: self._counted(decide, numbers))
        self.rebalancer = Rebalancer(RULES, 0, every_steps)
        self.steps = every_steps

    def _counted(self, decide, numbers):
        self.asked += 1
        return decide(*numbers)

    def look(self, slowdown, other=(0.5, 0.0, 0.0, 1.0, 0.0), rank_of=RANK_OF):
        self.steps += 5
        for number in range(5):
            self.rebalancer.note(self.steps - 4 + number, lambda: step(slowdown))
        assert self.rebalancer.is_due(self.steps)

        def exchanged(name, mine):
            assert name == rebalancing.SHARES
            return {0: mine, 1: torch.tensor(other, dtype=torch.float64)}

        job = SimpleNamespace(exchanged=exchanged, rank_of=rank_of)
        return self.rebalancer.moves(job, self.steps)


def test_a_rank_that_is_slow_and_used_up_gives_a_unit(monkeypatch):
    looking = Looking(monkeypatch)
    moves = looking.look(4.0)
    assert moves
    assert all((move.source, move.target) == (0, 1) for move in moves)
    rebalancer = looking.rebalancer
    assert [(share.compute, share.slowdown) for share in rebalancer.shares] == [(1.0, 4.0), (0.5, 1.0)]
    rank_of, order = rebalancer.placed(moves, RANK_OF)
    assert {op for op in RANK_OF if rank_of[op] != RANK_OF[op]} == {OPS[move.op].name for move in moves}
    assert sorted(order) == sorted(RANK_OF)
    assert sum(len(ops) for ops, _, _ in rebalancer.as_units(moves)) == len(moves)
    words = rebalancer.why(RANK_OF, rank_of)
    assert "rank0 1.00 used and 4.00 of the planned time" in words
    assert "predicted step 0.1 ms before" in words


def test_nothing_moves_where_the_core_has_time_or_nobody_could_take(monkeypatch):
    looking = Looking(monkeypatch)
    assert looking.look(4.0, other=(0.99, 0.0, 0.0, 1.0, 0.0)) == ()
    looking.used = 0.9
    monkeypatch.setattr(rebalancing, "shares_of", shares_without_own(rebalancing.shares_of))
    assert looking.look(4.0) == ()


def shares_without_own(shares_of):
    """The ops of this rank fill its whole timeline; here only what the system says counts."""

    def found(timeline, rules, *, activity, steps):
        idle = Timeline((*timeline.spans, Span("f", "rank1", 0.0, 1e6)), timeline.lanes, "measured")
        return shares_of(idle, rules, activity=activity, steps=steps)

    return found


def test_a_decision_to_leave_all_ops_is_taken_again_only_when_numbers_change_by_more_each_time(monkeypatch):
    looking = Looking(monkeypatch)
    busy = (0.99, 0.0, 0.0, 1.0, 0.0)
    for slowdown, asked in (
        (2.0, 1),
        (2.1, 1),  # a tenth is the same
        (2.5, 2),
        (2.9, 2),  # and now a fifth
        (3.2, 3),
        (4.3, 3),
        (4.6, 4),
        (2.0, 4),  # by now, eight tenths
    ):
        assert looking.look(slowdown, busy) == ()
        assert looking.asked == asked, slowdown
    assert looking.look(2.0)  # another rank has time: asked at once
    looking.rebalancer.begin(looking.steps)
    looking.look(2.0)
    assert looking.asked == 6  # what has moved is measured anew


def test_the_first_look_is_left_out_and_only_the_last_steps_count():
    rebalancer = Rebalancer(RULES, 0, 10)
    taken = []
    for steps in range(1, 21):
        rebalancer.note(steps, lambda at=steps: taken.append(at) or step(1.0))
        assert rebalancer.is_due(steps) == (steps == 20)
    assert taken == [*range(16, 21)]


def test_a_rank_without_ops_is_as_slow_as_it_was(monkeypatch):
    looking = Looking(monkeypatch)
    looking.look(3.0)
    monkeypatch.setitem(globals(), "step", lambda slowdown: Timeline((), ("rank0", "rank1"), "measured"))
    looking.look(1.0, rank_of=dict.fromkeys(RANK_OF, 1))
    assert looking.rebalancer.shares[0].slowdown == 3.0


def test_rank_0_writes_rules_and_others_take_none_of_another_step():
    machine = Machine((Device("rank0"), Device("rank1")), (Link("rank0", "rank1", 1e9, 5.0),))
    costs = Costs({op.name: {"1": 7.0} for op in GRAPH.ops})
    rules = made_rules(GRAPH, costs, machine, [("a", "b")], 30.0)
    assert (rules.ops[0].unit, rules.ops[1].unit, rules.ops[2].unit) == ("a", "a", "")
    assert rules.migration_us == 30.0
    document = json.loads(json.dumps(asdict(rules)))
    assert rules_from(document, GRAPH, 2) == rules
    for wrong, words in (
        ({key: value for key, value in document.items() if key != "flows"}, "malformed rules"),
        (document | {"theta": 2.0}, "malformed rules: .*theta"),
        (document | {"ops": document["ops"][:-1]}, "rules of another step"),
    ):
        fails(PeerError, words, rules_from, wrong, GRAPH, 2)
    fails(PeerError, "rules of another step", rules_from, document, GRAPH, 3)
