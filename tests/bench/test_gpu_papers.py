"""Rows of the papers that need a GPU, as far as they can be made without one."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.cli import main
from benchmarks.gpu_papers import NOT_MEASURED, busy_by_tenths, occupancy_of
from hocket.backends import StreamBackend
from hocket.ir import Costs, Machine, Share, Span, Timeline
from support.strict_cuda import StrictCuda


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_row_says_so(tmp_path, capsys):
    path = tmp_path / "rows.json"
    assert main(["gpu-papers", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["gpu"] is None
    assert set(document["rows"].values()) == {NOT_MEASURED}
    said = capsys.readouterr().out
    for label in ("co-run: two small products", "blocks and threads", "occupancy: lenet/64"):
        assert f"{label}: {NOT_MEASURED}" in said


def test_occupancy_over_a_step_is_that_of_the_ops_that_run():
    spans = (Span("a", "s", 10.0, 15.0), Span("b", "t", 10.0, 20.0), Span("c", "t", 20.0, 20.0))
    shares = {"a": {"gpu0": Share(0.75)}, "b": {"gpu0": Share(0.5)}}
    costs = Costs({op: {"gpu0": 1.0} for op in "abc"}, shares=shares)
    line = Timeline(spans, ("s", "t"), "measured")
    assert busy_by_tenths(line, costs, "gpu0") == [1.0] * 5 + [0.5] * 5
    assert busy_by_tenths(Timeline((), (), "measured"), costs, "gpu0") == [0.0] * 10


def test_occupancy_of_a_network_on_the_strict_device():
    backend = StreamBackend(StrictCuda(), Machine.preset("a100"), "strict")
    found = occupancy_of("lenet", 4, backend, "cpu")
    for label in ("one stream", "planned"):
        assert found[f"{label}, us"][0] == found[f"{label}, us"][1] > 0
        first, second = found[label]
        assert first == second
        assert 0 < max(first) <= 1
