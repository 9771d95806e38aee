"""The bench of partitions, in small."""

from __future__ import annotations

import pytest

from benchmarks.partition import _summary, run
from benchmarks.partition.workloads import DYNAMIC_PROGRAMME


def test_the_heaviest_part_of_a_workload():
    saved = []
    result = run(("Layer-bert24_training",), parts=(), budget_s=0.5, save=saved.append)
    (row,) = result["load"].values()
    assert row["published"] == DYNAMIC_PROGRAMME["Layer-bert24_training"]
    assert 0 < row["hocket"] <= row["intervals"]
    assert saved == [result]


def test_only_who_keeps_the_balance_is_compared_with():
    def row(ours, metis, balanced, mtkahypar):
        found = {label: {"bytes": ours} for label in ("hocket", "alone", "acyclic")}
        return {**found, "metis": {"bytes": metis, "balanced": balanced}, "mtkahypar": mtkahypar}

    rows = [
        row(8.0, 4.0, False, {"bytes": 16.0, "balanced": True}),
        row(8.0, 4.0, True, {"bytes": 16.0, "balanced": True}),
        row(None, 4.0, True, {"bytes": 16.0, "balanced": True}),
        row(8.0, 4.0, False, {"bytes": 4.0, "balanced": False}),
    ]
    summary = _summary(rows)["hocket"]
    assert (summary["graphs"], summary["at_most"]) == (2, 0.5)
    assert summary["to_best"] == pytest.approx(1.0)
    assert summary["to_metis"] == 2.0
