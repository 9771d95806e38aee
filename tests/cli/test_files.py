"""From a step to its report through files, one verb after the other; each verb's two formats."""

import json

import pytest
from safetensors.torch import save_model

from hocket import zoo
from hocket.ir import Costs, Edge, Graph, Link, Machine, Op, Plan, Timeline

from .conftest import TINY


def test_capture_writes_the_graph_and_counts_it(hocket, tmp_path):
    found = hocket("capture", *TINY, "-o", "graph.json").fine()
    graph = Graph.load(tmp_path / "graph.json")
    first, *_, last = found.out.splitlines()
    assert first.startswith(f"mlp: {len(graph)} ops, {len(graph.edges)} edges, ")
    assert last == "written: graph.json"
    assert "weight grad" in found.out
    told = hocket("capture", *TINY, "-o", "graph.json", "--format", "json").json
    assert told["ops"] == len(graph) == sum(told["roles"].values())
    assert told["edges"] == len(graph.edges)
    assert told["bytes"] == sum(op.size_bytes for op in graph.ops)
    assert told["flops"] == sum(op.flops for op in graph.ops) > 0
    assert told["seconds"] > 0


def test_results_are_where_the_command_was_given(hocket, tmp_path):
    """Also where the user's code goes to another folder, as Hydra does."""
    (tmp_path / "elsewhere").mkdir()
    body = "    os.chdir('elsewhere')\n    return zoo.load('mlp', width=8)\n"
    (tmp_path / "moving.py").write_text(f"import os\nfrom hocket import zoo\ndef job():\n{body}")
    save_model(zoo.load("mlp", width=8).model, str(tmp_path / "weights.safetensors"))
    assert hocket("capture", "moving.py:job", "-o", "graph.json").status == 0
    assert hocket("load", "moving.py:job", "weights.safetensors", "--reorder", "ordered.safetensors").status == 0
    assert not list((tmp_path / "elsewhere").iterdir())
    assert {"graph.json", "ordered.safetensors"} <= {path.name for path in tmp_path.iterdir()}


def test_capture_leaves_a_backward_in_one_piece_if_told(hocket):
    words = ("capture", "digits-cnn", "--set", "width=2", "--batch-size", 2, "-o", "graph.json", "--format", "json")
    split, joint = hocket(*words).json, hocket(*words, "--joint").json
    assert joint["ops"] < split["ops"]


def test_profile_writes_costs_at_the_widths_asked_for(hocket, tmp_path):
    found = hocket("profile", *TINY, "-o", "costs.json", "--graph", "graph.json", "--runs", 1, "--widths", "1").fine()
    assert found.out.splitlines()[-1] == "written: costs.json, graph.json"
    assert max(map(len, found.out.splitlines())) <= 80
    costs, graph = Costs.load(tmp_path / "costs.json"), Graph.load(tmp_path / "graph.json")
    assert costs.durations_us.keys() == {op.name for op in graph.ops}
    assert all(row.keys() == {"1"} for row in costs.durations_us.values())


def test_profile_in_json(hocket, tmp_path):
    told = hocket("profile", *TINY, "-o", "costs.json", "--runs", 2, "--format", "json").json
    assert (told["target"], told["costs"], told["runs"]) == ("mlp", "costs.json", 2)
    assert "graph" not in told
    assert told["total_us"].keys() == set(next(iter(Costs.load("costs.json").durations_us.values())))


def test_profile_of_many_cores_climbs(hocket, tmp_path, monkeypatch):
    for place in ("hill_climb", "tracer"):
        monkeypatch.setattr(f"hocket.profiling.{place}.FEW_CORES", 0)
    told = hocket("profile", *TINY, "-o", "costs.json", "--runs", 1, "--format", "json").json
    costs = Costs.load(tmp_path / "costs.json")
    assert costs.note.startswith("hill climbing")
    assert all(row.keys() == told["total_us"].keys() for row in costs.durations_us.values())


def test_plan_goes_to_stdout_and_its_prediction_to_stderr(hocket, made):
    found = hocket("plan", made["graph"], made["costs"], "--machine", made["machine"]).fine()
    assert Plan.parse(found.out) == Plan.parse(made["plan"].read_text())
    for words in ("makespan", "lower bound", "upper bound", "efficiency"):
        assert words in found.err


def test_plan_in_json_holds_the_text(hocket, made, tmp_path):
    found = hocket("plan", made["graph"], made["costs"], "--planner", "serial", "-o", "p.txt", "--format", "json")
    told = found.json
    assert found.err == ""
    assert told["plan"] == (tmp_path / "p.txt").read_text()
    assert told["path"] == "p.txt"
    assert told["planner"] == "serial"
    assert told["lower_us"] <= told["predicted_us"] <= told["upper_us"]
    assert told["efficiency"] == pytest.approx(0.0)


def test_plan_for_another_machine_with_as_many_lanes_as_asked_for(hocket, made, tmp_path):
    Machine.of(cores=4).save("four.json")
    words = (made["graph"], made["costs"], "--machine", "four.json", "--lanes", 4, "--format", "json")
    told = hocket("plan", *words).json
    assert told["lanes"] == 4
    assert len(Plan.parse(told["plan"]).lanes) == 4


def test_check_says_legal(hocket, made):
    assert hocket("check", made["graph"], made["plan"]).out == "legal\n"
    assert hocket("check", made["graph"], made["plan"], "--machine", made["machine"], "--format", "json").json == {
        "legal": True
    }


def test_check_names_the_op_at_fault(hocket, made, tmp_path):
    *lines, last = made["plan"].read_text().splitlines()
    (tmp_path / "bad.txt").write_text("\n".join(lines))
    op = last.split()[1]
    found = hocket("check", made["graph"], "bad.txt")
    assert (found.status, found.out) == (1, "")
    assert found.err == f"hocket: error: op {op!r} of the graph is run by no lane\n"
    found = hocket("check", made["graph"], "bad.txt", "--format", "json")
    assert found.status == 1
    assert found.json == {"legal": False, "error": f"op {op!r} of the graph is run by no lane", "op": op, "lane": None}


def test_check_asks_the_machine_only_if_there_is_one(hocket, made, tmp_path):
    graph = Graph.load(made["graph"])
    lane = "lane wide kind=cores device=cpu0 width=64"
    (tmp_path / "wide.txt").write_text("\n".join(["hocket-plan/1", lane, *(f"run {op}" for op in graph.order)]))
    assert hocket("check", made["graph"], "wide.txt").status == 0
    found = hocket("check", made["graph"], "wide.txt", "--machine", made["machine"])
    found.refused(1, "width 64, but")


def test_simulate_writes_timeline_and_trace(hocket, made, tmp_path):
    words = ("simulate", made["graph"], made["plan"], made["costs"], "--machine", made["machine"])
    found = hocket(*words, "-o", "timeline.json", "--trace", "trace.json").fine()
    assert found.out.startswith("simulated step, ")
    assert found.out.splitlines()[-1] == "written: timeline.json, trace.json"
    assert max(map(len, found.out.splitlines())) <= 80
    timeline = Timeline.load(tmp_path / "timeline.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    told = hocket(*words, "--format", "json").json
    assert told["makespan_us"] == timeline.makespan_us
    assert [lane["lane"] for lane in told["lanes"]] == list(timeline.lanes)
    assert all(0 <= lane["utilisation"] <= 1 for lane in told["lanes"])
    assert told["lower_us"] <= told["makespan_us"]
    assert told["notes"] == []
    assert "timeline" not in told


def test_simulate_notes_that_a_plan_is_for_another_machine(hocket, made):
    Machine.of(cores=2).save("two.json")
    Machine.of(cores=1).save("one.json")
    words = (made["graph"], made["costs"], "--machine", "two.json", "--lanes", 2, "-o", "two.txt")
    assert hocket("plan", *words).status == 0
    words = ("simulate", made["graph"], "two.txt", made["costs"], "--machine", "one.json")
    found = hocket(*words).fine()
    assert found.err.startswith("note: this plan may not run on this machine: lane 'cpu0.1'")
    assert len(hocket(*words, "--format", "json").json["notes"]) == 1


def test_bounds(hocket, made):
    words = ("bounds", made["graph"], made["costs"], "--machine", made["machine"])
    assert "lower bound" in hocket(*words).out
    told = hocket(*words, "--format", "json").json
    assert told.keys() == {"lower_us", "upper_us", "critical_path_us", "work_us"}
    assert told["critical_path_us"] <= told["lower_us"] <= told["upper_us"]


def test_report_simulates_where_no_timeline_is_given(hocket, made, tmp_path):
    words = ("report", made["graph"], made["plan"], made["costs"], "-o", "a/report")
    found = hocket(*words)
    assert (found.status, found.out) == (0, "report: a/report/index.html\n")
    assert (tmp_path / "a/report/timeline-simulated.json").exists()
    files = hocket(*words, "--format", "json").json["files"]
    assert files["index.html"] == "a/report/index.html"


def test_report_names_timelines_after_their_files(hocket, made, tmp_path):
    words = (made["graph"], made["plan"], made["costs"])
    assert hocket("simulate", *words, "-o", "timeline-first.json").status == 0
    (tmp_path / "first.json").write_bytes((tmp_path / "timeline-first.json").read_bytes())
    hocket("report", *words, "timeline-first.json", "first.json", "-o", "report", "--title", "A <title>").fine()
    assert {path.name for path in (tmp_path / "report").glob("timeline-*.json")} == {
        "timeline-first.json",
        "timeline-first-2.json",
    }
    assert "A &lt;title&gt;" in (tmp_path / "report/index.html").read_text()


def test_machine_in_json_is_a_machine_file(hocket, tmp_path):
    found = hocket("machine", "--format", "json")
    (tmp_path / "m.json").write_text(found.out)
    assert Machine.load("m.json") == Machine.here()
    found = hocket("machine")
    assert found.out.startswith("machine")
    assert "not measured" in found.out


def test_machine_measures_its_rates(hocket):
    found = hocket("machine", "--measure", "-o", "m.json").fine()
    assert found.out.splitlines()[-1] == "written: m.json"
    assert Machine.load("m.json").devices[0].flops_per_s > 0


def test_zoo_lists_names_settings_and_sources(hocket):
    found = hocket("zoo").fine()
    assert max(map(len, found.out.splitlines())) <= 80
    for words in ("mlp", "depth=8 width=256", "pip install 'hocket[demo]' or 'hocket[zoo]'", "LeCun et al."):
        assert words in found.out
    entries = {entry["name"]: entry for entry in hocket("zoo", "--format", "json").json["entries"]}
    assert entries["resnet20"]["extra"] == "zoo"
    assert entries["mlp"]["batch_size"] == 32
    assert [setting["name"] for setting in entries["mlp"]["settings"]] == ["depth", "width"]


def test_plan_orders_received_parameters(hocket, tmp_path):
    ops = (Op("b", role="recv", size_bytes=9.0), Op("a", role="recv", size_bytes=2.0), Op("f"), Op("g"))
    Graph(ops, (Edge("a", "f"), Edge("b", "g"), Edge("f", "g"))).save(tmp_path / "worker.json")
    Costs({"f": {"1": 5.0}, "g": {"1": 3.0}}).save(tmp_path / "times.json")
    Machine(Machine.of(cores=1).devices, (Link("s", "cpu0", 1e6),)).save(tmp_path / "machine.json")
    files = (tmp_path / "worker.json", tmp_path / "times.json", "--machine", tmp_path / "machine.json")
    for order, first in (("auto", "run a"), ("fifo", "run b")):
        found = hocket("plan", *files, "--planner", "transfers", "--order", order).fine()
        assert found.out.split("kind=channel device=s->cpu0\n")[1].startswith(first)
    found = hocket("plan", *files, "--order", "tac")
    assert found.status == 2
    assert "--order is no option of the planner list" in found.err


def test_plan_by_strategies(hocket, tmp_path):
    ops = ("a", "b", "c", "d")
    Graph(tuple(map(Op, ops)), ()).save(tmp_path / "graph.json")
    Costs({op: {"1": 40.0, "2": 50.0} for op in ops}).save(tmp_path / "costs.json")
    Machine.of(cores=2).save(tmp_path / "two.json")
    files = (tmp_path / "graph.json", tmp_path / "costs.json", "--machine", tmp_path / "two.json")
    for strategies, widths in (("1", [1]), ("1,3", [1, 1])):
        found = hocket("plan", *files, "--planner", "concurrency", "--strategies", strategies).fine()
        assert [lane.width for lane in Plan.parse(found.out).lanes] == widths
    found = hocket("plan", *files, "--planner", "concurrency", "--strategies", "1,5")
    found.refused(2, "--strategies: expected some of 1, 2, 3 and 4, got '1,5'")


def test_the_cache_is_listed_and_cleared(hocket, cache_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    sizes = {"decisions/a.json": 10, "compiled/b/kernels.so": 20, "partition/partition-1.so": 30}
    for name, size in sizes.items():
        path = cache_folder / "hocket" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size))
    for name in ("hocket_lanes_1/core.so", "another/core.so"):
        path = tmp_path / "extensions" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(40))
    found = hocket("cache", "info", "--format", "json").json["cache"]
    assert {kind: one["bytes"] for kind, one in found.items()} == {
        "decisions": 10,
        "compiled": 20,
        "native": 40,
        "partition": 30,
    }
    assert all(one["entries"] == 1 for one in found.values())
    assert "decisions" in hocket("cache", "info").out
    assert hocket("cache", "clear", "--format", "json").json["cleared"] == found
    assert not any(one["bytes"] for one in hocket("cache", "info", "--format", "json").json["cache"].values())
    assert (tmp_path / "extensions" / "another" / "core.so").exists()
    assert hocket("cache", "destroy").status == 2
