"""Versions that servers keep, and what an agent believes of what a job says."""

from __future__ import annotations

import threading

import pytest
import torch

from hocket.distributed.versions import NEWEST, Value, Version, Versions, announced_values, ordered_values
from hocket.errors import PeerError

WEIGHT = Value("weight", "float32 (2, 3)", 24, 0, True, False)


def test_a_version_that_is_to_come_is_waited_for():
    versions, found = Versions(), []
    waiting = [threading.Thread(target=lambda n=n: found.append(versions.take(n))) for n in (NEWEST, 4)]
    for thread in waiting:
        thread.start()
    versions.publish(Version(4, {}, {}))
    for thread in waiting:
        thread.join(20)
    assert [version.number for version in found] == [4, 4]
    assert versions.take(3) is None


def test_nobody_waits_for_a_server_that_takes_leave():
    versions, found = Versions(), []
    waiting = threading.Thread(target=lambda: found.append(versions.take(NEWEST)))
    waiting.start()
    versions.close()
    waiting.join(20)
    assert found == [None]


def test_what_a_job_says_is_compared_with_what_is_here():
    mine = {"weight": torch.zeros(2, 3)}
    assert announced_values([WEIGHT.as_list], 1, mine) == [WEIGHT]
    with pytest.raises(PeerError, match=r"'weight' is float32 \(2, 3\) here, and missing in the job"):
        announced_values([], 1, mine)
    with pytest.raises(PeerError, match="'weight' is float32"):
        announced_values([["weight", "float32 (2, 3)", 2400, 0, True]], 1, mine)


@pytest.mark.parametrize(
    "told",
    [
        ["weight", "float32 (2, 3)", 24, 0],
        ["weight", "float32 (2, 3)", "24", 0, True],
        ["weight", "float32 (2, 3)", -1, 0, True],
        ["weight", "float32 (2, 3)", 24, 1, True],
        "weight",
    ],
)
def test_what_means_nothing_is_not_believed(told):
    with pytest.raises(PeerError, match="the job says something unknown"):
        announced_values([told], 1, {})


@pytest.mark.parametrize("places", [[0, 0], [1], [-2]])
def test_an_order_of_values_that_do_not_exist_is_refused(places):
    with pytest.raises(PeerError, match="it orders values that do not exist"):
        ordered_values([WEIGHT], places)
    assert ordered_values([WEIGHT], [0, -1]) == [WEIGHT]
