"""Decisions by profiling alone, without further steps: that nothing can be gained, and which plans cannot win.

A simulation leaves out the time between ops (waking threads, dispatching, the Python around a step), so a real step
takes longer. The profile itself runs plans of one lane, and the ratio of such a step to its simulation measures by how
much: 1.02 where ops are large, 1.3 where they are small, more while others use the machine. Say a plan's
step takes ``e`` times its simulation, with ``1 <= e <= E`` and `E` the largest ratio seen. Then a plan that is
simulated to take more than ``E`` times what the best serial plan is simulated to take is slower than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hocket.backends import Backend
from hocket.ir import Costs, Graph, Plan, Timeline
from hocket.planning.ranks import graph_ranks
from hocket.reporting import lower_quartile
from hocket.tracing.captured import Captured

# Proposals that come to the comparison by their prediction.
MAX_FINALISTS = 3
# An op's duration is the shortest of a few, and differs by this from one profile to the next.
NOISE = 1.05


@dataclass(frozen=True)
class Profile:
    """Result of profiling steps."""

    form: str  # name of the step's form
    captured: Captured  # the step in that form
    costs: Costs  # durations of its ops
    fastest_ms: float  # its fastest step
    error: float  # the largest ratio of a step to its simulation


@dataclass(frozen=True, eq=False)
class Proposal:
    """A plan of a profiled step, and its simulation."""

    profile: Profile
    plan: Plan
    predicted: Timeline

    @property
    def predicted_ms(self) -> float:
        return self.predicted.makespan_us / 1e3


def profile_of(
    form: str, captured: Captured, costs: Costs, backend: Backend, steps: Iterable[tuple[Plan, Sequence[float]]]
) -> Profile:
    """The profile of a step. `steps` has the plans that ran, and the milliseconds of their steps, the first too."""
    ratios, fastest_ms = [1.0], float("inf")
    for plan, times_ms in steps:
        step_ms = lower_quartile(times_ms[1:] or times_ms)
        fastest_ms = min(fastest_ms, step_ms)
        simulated_us = backend.predict(captured, plan, costs).makespan_us
        if simulated_us:
            ratios.append(step_ms * 1e3 / simulated_us)
    return Profile(form, captured, costs, fastest_ms, max(ratios))


def finalists(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The plans that are worth real steps: the best few by their prediction, and serial ones that may win."""
    ranked = sorted(proposals, key=lambda proposal: proposal.predicted_ms)
    error = max((proposal.profile.error for proposal in proposals), default=1.0)
    serial_ms = [proposal.predicted_ms for proposal in ranked if proposal.plan.planner == "serial"]
    limit_ms = min(serial_ms, default=float("inf")) * error * NOISE
    return [
        proposal
        for place, proposal in enumerate(ranked)
        if proposal.predicted_ms <= limit_ms and (place < MAX_FINALISTS or proposal.plan.planner == "serial")
    ]


@dataclass(frozen=True)
class LongestChain:
    """The ops that no plan of any width can run side by side."""

    duration_ms: float  # what they take, each as fast as it was ever measured: no plan is faster
    op: str  # the one that takes longest
    op_ms: float  # what that takes


def longest_chain(graph: Graph, costs: Costs) -> LongestChain:
    """The longest chain of ops that wait for each other."""
    least_us = [min(costs.durations_us[op.name].values()) for op in graph.ops]
    longest = max(range(len(graph)), key=least_us.__getitem__)
    return LongestChain(max(graph_ranks(graph, least_us)) / 1e3, graph.ops[longest].name, least_us[longest] / 1e3)
