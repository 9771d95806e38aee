"""Real ranks in network namespaces; skipped, with the reason, where there can be none. Paced workers, in small."""

import subprocess

import pytest

from benchmarks import paced
from benchmarks.namespaces import linked, unavailable_reason
from benchmarks.paced.ranks import recorded
from benchmarks.transfers_rank import WARM_UP_STEPS
from benchmarks.transfers_real import run

REASON = unavailable_reason()
needs_namespaces = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def namespaces() -> str:
    return output(["ip", "netns", "list"])


@needs_namespaces
def test_a_link_has_its_rate_and_goes_with_its_namespaces():
    with linked(200) as (worker, server):
        for end, other in ((worker, server), (server, worker)):
            assert "rate 200Mbit" in output(end.command("tc", "qdisc"))
            assert f"dev {end.interface}" in output(end.command("ip", "route", "get", other.address))
        assert worker.name in namespaces()
    assert worker.name not in namespaces()


@pytest.mark.slow
@needs_namespaces
def test_a_short_run():
    result = run(["lenet"], mbits=[200], orders=("layer", "reverse", "all-first"), rounds=1, steps=3, batch_size=4)
    (row,) = result["rows"]
    for order in ("layer", "reverse", "all-first"):
        found = row["orders"][order]
        assert found["steps_in_order"] == found["steps"] == 3 + WARM_UP_STEPS
        assert found["step_us"] > found["potential"] > 0


@pytest.mark.slow
@needs_namespaces
def test_agents_that_pull_in_every_call():
    settings = {"orders": ("layer", "reverse"), "rounds": 1, "steps": 3, "batch_size": 4}
    (row,) = run(["lenet"], mbits=[200], agents=True, **settings)["rows"]
    for order in ("layer", "reverse"):
        assert row["orders"][order]["steps_in_order"] == row["orders"][order]["steps"] == 3


def test_a_recorded_step_computes_as_long_as_it_receives():
    work = recorded("lenet", 1, 1e6, 0.5, batch_size=2)
    assert sum(work.receives.works_us) == pytest.approx(0.5e6)
    assert sum(work.sizes) == pytest.approx(0.5e6, rel=0.01)
    assert sorted(work.planned) == list(range(len(work.sizes)))
    assert work.receives.makespan_us(work.planned) <= work.upper_us
    assert work.efficiency(work.upper_us) == 0.0
    assert work.efficiency(work.lower_us) == 1.0


@pytest.mark.slow
@needs_namespaces
def test_paced_workers_of_a_cluster():
    (row,) = paced.run(("lenet",), clusters=[(2, 2)], seconds=1.0, mbit=50, receiving_s=0.05)["rows"]
    assert (row["workers"], row["servers"]) == (2, 2)
    assert row["steps"] >= 12
