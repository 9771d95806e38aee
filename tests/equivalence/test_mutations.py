"""Plans that break one order of the graph: `check` refuses every one, and run all the same they compute something else.

For each mutation one needed order (an edge that the rest does not imply) is taken away, and the ops are put in an order
that respects all the others but not this one. Whether that changes what an op reads is known from watching every op
run (see `capture.observe`), not from the graph.
"""

import random
from dataclasses import replace

import pytest
import torch

from equivalence.compare import Twins, assert_same, copied, difference, named_leaves
from equivalence.test_lanes import CASES, JOBS, captured_twins
from hocket.checking import check
from hocket.errors import PlanError
from hocket.execution.threads import ThreadLanes
from hocket.ir import Edge, Graph, Lane, Plan
from hocket.tracing.captured import Captured
from hocket.tracing.saved_state import Saved
from hocket.tracing.state import inventory
from support.random_plans import random_order
from tracing.observe import Seen, observe

pytestmark = pytest.mark.usefixtures("one_thread")


def needed_edges(graph: Graph) -> list[tuple[str, str]]:
    """The edges that no other path implies."""
    above: dict[str, set[str]] = {}
    needed: list[tuple[str, str]] = []
    for name in graph.order:
        direct = graph.predecessors[name]
        implied = {other for before in direct for other in above[before]}
        needed += [(before, name) for before in direct if before not in implied]
        above[name] = {other for before in direct for other in (before, *above[before])}
    return needed


def without(graph: Graph, pair: tuple[str, str]) -> Graph:
    return Graph(graph.ops, tuple(edge for edge in graph.edges if (edge.src, edge.dst) != pair))


def breaking(graph: Graph, pair: tuple[str, str], chance: random.Random) -> Plan:
    """A serial plan in which the second op of `pair` comes first, and which keeps all other orders."""
    fewer = without(graph, pair)
    turned = Graph(graph.ops, (*fewer.edges, Edge(pair[1], pair[0])))
    return Plan((Lane("main", tuple(random_order(turned, chance))),))


def outcome(captured: Captured, plan: Plan, graph: Graph, pair: Twins) -> str:
    """Run a step by `plan` with the orders of `graph` only, and take it back. Says how it differs; empty if not."""
    job = pair.planned
    saved = Saved(inventory(job.model, job.optimizer))
    torch.manual_seed(5)
    try:
        result = ThreadLanes(replace(captured, graph=graph), plan)(job.batch(1))
        random_state = torch.get_rng_state()
        found = [*named_leaves("returned", result), ("random", random_state), *copied(job)]
        assert_same(pair.expected, found)
    except AssertionError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (whatever an op says to a value that is not there)
        return repr(error)
    finally:
        saved.restore()
    return ""


@pytest.mark.parametrize(
    ("name", "split"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[0] in ("dcgan", "transformer"))) for each in CASES],
)
def test_broken_plans_are_refused_and_would_compute_something_else(name, split):
    pair, first, second = captured_twins(JOBS[name], split)
    graph = second.graph
    seen = observe(second)
    # The result of the legal plan, from the state in which every broken plan starts.
    torch.manual_seed(5)
    result = ThreadLanes(first, Plan((Lane("main", first.graph.order),)))(pair.eager.batch(1))
    pair.expected = [*named_leaves("returned", result), ("random", torch.get_rng_state()), *copied(pair.eager)]
    assert not outcome(second, Plan((Lane("main", graph.order),)), graph, pair)

    chance = random.Random(f"{name} {split}")
    edges = needed_edges(graph)
    changing, invisible = [], []
    for broken in chance.sample(edges, min(40, len(edges))):
        plan = breaking(graph, broken, chance)
        with pytest.raises(PlanError, match="deadlock"):
            check(graph, plan)
        with pytest.raises(PlanError, match="deadlock"):
            ThreadLanes(second, plan)
        shown = outcome(second, plan, without(graph, broken), pair)
        src, dst = (seen[name] for name in broken)
        assert shown or not src.made & dst.given, f"{broken}: an op ran without its input, and nobody noticed"
        if changes(plan, seen, graph):
            changing.append(broken)
            invisible += [] if shown else [broken]
    # Some changes leave no trace: two counts that are added to one number, a gate that is multiplied with zero, two
    # ops that write different parts of one tensor.
    assert len(changing) > 20
    assert len(invisible) <= len(changing) // 6, invisible


def changes(plan: Plan, seen: dict[str, Seen], graph: Graph) -> bool:
    """Return True if the plan leaves two ops unordered of which one changes what the other reads."""
    place = {name: at for at, name in enumerate(plan.lanes[0].ops)}
    names = [op.name for op in graph.ops]
    return any(
        place[before] > place[after] and seen[before].conflicts(seen[after])
        for at, before in enumerate(names)
        for after in names[at + 1 :]
    )


def test_the_comparison_itself_sees_a_single_bit():
    one = torch.ones(3)
    other = one.clone()
    other.view(torch.int32)[1] ^= 1
    assert not difference(one, one.clone())
    assert difference(one, other)
    assert difference(torch.tensor(0.0), torch.tensor(-0.0))
    assert difference(torch.tensor([0.0, 1.0]), torch.tensor([float("nan"), 1.0]))
    assert not difference(torch.tensor(float("nan")), torch.tensor(float("nan")))
