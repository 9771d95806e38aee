"""From a step or a graph to a plan over several devices."""

import json

import pytest

from hocket import zoo
from hocket.checking import check
from hocket.distributed.job import captured_for
from hocket.distributed.stages.crossings import check_runs
from hocket.ir import Costs, Edge, Graph, Link, Machine, Op, Plan
from hocket.ir.machine import Device

from .conftest import TINY

GRAPH = Graph(tuple(Op(name) for name in "abcdef"), tuple(Edge(x, y, 8.0) for x, y in ("ab", "bc", "de", "ef")))
COSTS = Costs({name: {"1": 30.0} for name in "abcdef"})


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    links = (Link("left", "right", 1e6, 3.0), Link("right", "left", 1e6, 3.0))
    GRAPH.save("graph.json")
    COSTS.save("costs.json")
    Machine((Device("left"), Device("right")), links).save("machine.json")
    return tmp_path


def test_a_graph_is_spread_over_the_devices_of_a_machine(hocket, files):
    words = ("partition", "graph.json", "--costs", "costs.json", "--machine", "machine.json", "--budget-s", 1)
    found = hocket(*words, "-o", "plan.txt", "--report", "report").fine()
    plan = Plan.parse((files / "plan.txt").read_text())
    check(GRAPH, plan, Machine.load("machine.json"))
    assert {frozenset(lane.ops) for lane in plan.lanes} == {frozenset("abc"), frozenset("def")}
    assert "bytes moved" in found.out
    assert found.out.splitlines()[-1].endswith("index.html")
    page = (files / "report" / "index.html").read_text()
    assert 'id="parts"' in page
    assert (files / "report" / "parts.svg").exists()
    assert max(map(len, found.out.splitlines())) <= 80


def test_the_plan_goes_to_stdout_and_json_has_all_of_it(hocket, files):
    words = ("partition", "graph.json", "--costs", "costs.json", "--machine", "machine.json", "--budget-s", 1)
    found = hocket(*words, "--objective", "time")
    assert Plan.parse(found.out).planner == "partition"
    assert "no shorter one exists" in found.err
    told = hocket(*words, "--objective", "pipeline", "--microbatches", 4, "--format", "json").json
    assert (told["objective"], told["bytes_moved"], told["cycle"]) == ("pipeline", 0.0, None)
    assert [part["ops"] for part in told["parts"]] == [3, 3]
    assert len(Plan.parse(told["plan"])) == 6


def test_a_target_is_captured_and_estimated(hocket, tmp_path):
    found = hocket("partition", *TINY, "--devices", 2, "--epsilon", 0.3, "--budget-s", 1, "--format", "json").fine()
    assert found.json["imbalance"] <= 0.3
    assert {part["device"] for part in found.json["parts"]} == {"device0", "device1"}
    short = hocket("partition", *TINY, "--epsilon", 0.3, "--budget-s", 0.001, "--expensive", 0.9, "--format", "json")
    assert 0 <= short.json["ended_after_rounds"] < 200


def test_a_search_that_its_budget_ended_says_so(hocket, files):
    words = ("partition", "graph.json", "--costs", "costs.json", "--machine", "machine.json", "-o", "plan.txt")
    assert "ended by its budget" not in hocket(*words, "--budget-s", 60).out  # it makes all its rounds
    assert "ended by its budget after" in hocket(*words, "--budget-s", 1e-9).out


def test_a_model_with_dropout_and_adam_is_planned_as_ranks_can_run_it(hocket, tmp_path):
    small = ("transformer", "--set", "depth=1", "--set", "width=16", "--set", "vocab=50", "--batch-size", 2)
    words = (*small, "--optimizer", "adam")
    assert hocket("capture", *words, "-o", tmp_path / "graph.json").status == 0
    cut = ("--devices", 2, "--objective", "load", "--budget-s", 0.5, "-o", tmp_path / "plan.txt")
    hocket("partition", tmp_path / "graph.json", *cut).fine()
    job = zoo.load("transformer", optimizer="adam", depth=1, width=16, vocab=50, batch_size=2)
    captured = captured_for(job.step, job.model, job.optimizer, job.batch(0))
    assert sum("random generator" in op.writes for op in captured.graph.ops) > 1
    plan = Plan.parse((tmp_path / "plan.txt").read_text())
    assert len(plan.lanes) == 2
    check_runs(captured, plan)


def test_what_cannot_be_is_said(hocket, files):
    words = ("partition", "graph.json", "--costs", "costs.json")
    found = hocket(*words, "--devices", 7)
    found.refused(1, "7 devices, and only 6 ops")
    assert "expected a part of the time in (0, 1], got expensive=0.0" in hocket(*words, "--expensive", 0).error
    assert "all were ruled out" in hocket(*words, "--devices", 4).error
    assert "--costs" in hocket("partition", "mlp", "--costs", "costs.json").error
    assert hocket("partition", "none.json").status == 2
    (files / "slow.json").write_text(
        json.dumps({"format": "hocket-machine/1", "devices": [{"name": "x", "flops_per_s": 0}]})
    )
    assert "flops_per_s: expected a finite number > 0" in hocket(*words, "--machine", "slow.json").error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", 3), "--batch-size, --optimizer and --set are for zoo entries"),
        (("--set", "width=3"), "--batch-size, --optimizer and --set are for zoo entries"),
        (("--microbatches", 3), "--microbatches is of the objective pipeline"),
        (("--budget-s", "inf"), "--budget-s: expected a number of seconds above 0"),
    ],
)
def test_options_that_would_do_nothing(hocket, files, words, message):
    found = hocket("partition", "graph.json", "--costs", "costs.json", *words)
    found.refused(2, message)


def test_a_pipeline_has_as_many_micro_batches_as_devices_if_nothing_is_said(hocket, files):
    found = hocket(
        "partition", "graph.json", "--costs", "costs.json", "--objective", "pipeline", "--format", "json"
    ).fine()
    assert found.json["cycle"] is None


def test_devices_keep_no_more_than_they_may(hocket, files):
    words = ("partition", *TINY, "--devices", 2, "--epsilon", 0.9, "--budget-s", 1, "--format", "json")
    hocket(*words, "--memory-bytes", 10**9).fine()
    refused = hocket(*words, "--memory-bytes", 16)
    assert refused.status == 1
    assert "bytes, and no device has more than 16" in refused.error
