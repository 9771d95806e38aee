"""Real ranks in network namespaces; skipped, with the reason, where there can be none."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.namespaces import linked, unavailable_reason
from benchmarks.transfers_agents import run as agents
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
    (row,) = agents(["lenet"], mbits=[200], orders=("layer", "reverse"), steps=3, batch_size=4)["rows"]
    for order in ("layer", "reverse"):
        assert row["orders"][order]["steps_in_order"] == row["orders"][order]["steps"] == 3
