"""hocket run: the comparison as a table and as JSON, the report, and targets of all kinds."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hocket.cli import main
from hocket.ir import Machine

from .conftest import TINY, line_of


def test_prints_comparison_plan_and_how_to_get_a_report(hocket):
    found = hocket("run", *TINY, "--runs", 2).fine()
    lines = found.out.splitlines()
    cores = Machine.here().cores
    assert re.match(rf"mlp on {cores} CPU cores?, \d+ ops", lines[0])
    assert max(map(len, lines)) <= 80
    for words in ("eager", "planned", "lower bound", "verdict: ", "plan by ", "update"):
        assert words in found.out
    assert "note: OMP_WAIT_POLICY=PASSIVE, as the environment had it" in found.out
    assert lines[-1] == "report: add --report DIR for the page, the trace and the files behind them"
    assert found.err == ""


def test_json_is_one_object_with_the_promised_fields(hocket):
    found = hocket("run", *TINY, "--runs", 3, "--format", "json").fine()
    result = found.json
    assert result["format"] == "hocket-comparison/2"
    assert result["target"] == "mlp"
    for name, kind in {
        "device": str,
        "cores": int,
        "ops": int,
        "lower_bound_ms": float,
        "efficiency": float,
        "speedup": float,
        "why": str,
        "max_abs_diff": float,
        "bitwise": bool,
    }.items():
        assert isinstance(result[name], kind), name
    for name in ("eager_ms", "planned_ms"):
        assert result[name].keys() == {"lower_quartile", "median", "min", "p90", "runs"}
        assert result[name]["runs"] == 3
    assert result["verdict"] in ("planned", "eager")
    assert result["ops"] > 20
    assert "report" not in result


def test_report_is_written_and_named_last(hocket, tmp_path):
    found = hocket("run", *TINY, "--runs", 1, "--planner", "list", "--report", "new/report").fine()
    assert found.out.splitlines()[-1] == "report: new/report/index.html"
    assert {"index.html", "trace.json", "graph.json", "costs.json", "plan.txt", "comparison.json"} <= {
        path.name for path in (tmp_path / "new/report").iterdir()
    }
    written = json.loads((tmp_path / "new/report/comparison.json").read_text())
    assert any("OMP_WAIT_POLICY" in note for note in written["notes"])


def test_json_names_the_report(hocket, tmp_path):
    found = hocket("run", *TINY, "--runs", 1, "--report", tmp_path / "report", "--format", "json")
    assert found.json["report"] == str(tmp_path / "report" / "index.html")


def test_options_of_the_zoo_reach_the_entry(hocket):
    words = ("--optimizer", "adam", "--seed", 3, "--set", "lr=0.5", "--set", "num_batches=1", "--threads", 1)
    found = hocket("run", *TINY, *words, "--runs", 1, "--planner", "serial", "--format", "json").fine()
    assert found.json["planner"] == "serial"
    assert torch.get_num_threads() == 1
    assert any("1 thread" in note for note in found.json["notes"])


def test_a_function_in_a_file_is_a_target_and_what_it_prints_goes_to_stderr(hocket, steps):
    found = hocket("run", "train.py:printing", "--runs", 1, "--format", "json").fine()
    assert found.json["target"] == "train.py:printing"
    assert found.err.startswith("importing\nstepping\n")
    line = line_of('print("stepping")')
    assert found.json["verdict"] in ("regions", "eager")
    assert found.json["why"].startswith(f"it asks print at train.py:{line}: do that outside the step; regions: ")


def test_what_children_print_leaves_the_result_alone(capfd, tmp_path):
    text = "import os\nfrom hocket import zoo\ndef job():\n    os.system('echo child')\n    return zoo.load('mlp')\n"
    (tmp_path / "job.py").write_text(text)
    assert main(["explain", "job.py:job", "--format", "json"]) == 0
    found = capfd.readouterr()
    assert json.loads(found.out)["verdict"] == "one graph"
    assert "child" in found.err


def test_a_function_in_a_file_is_planned(hocket, steps):
    found = hocket("run", "train.py:linear", "--runs", 1, "--format", "json").fine()
    assert found.json["target"] == "train.py:linear"
    assert "x of eager's time" in found.json["why"]
    assert found.err == "importing\n"


def test_a_file_in_another_folder_finds_its_neighbours(hocket, steps, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert hocket("run", "../train.py:linear", "--runs", 1).status == 0


def test_a_shorter_last_batch_is_passed_over(hocket, steps):
    found = hocket("run", "train.py:uneven", "--runs", 4, "--format", "json").fine()
    assert found.json["eager_ms"]["runs"] == 4
    assert found.json["max_abs_diff"] < 1e-4


def test_a_step_that_branches_on_its_count_is_run(hocket, steps):
    found = hocket("run", "train.py:counting", "--runs", 4, "--format", "json").fine()
    assert found.json["eager_ms"]["runs"] == found.json["planned_ms"]["runs"] == 4
    assert found.json["bitwise"]
    assert "x of eager's time" in found.json["why"]


def test_a_step_that_draws_before_its_ops_is_compared_by_its_ops(hocket, steps):
    found = hocket("run", "train.py:drawing", "--runs", 2, "--format", "json").fine()
    assert found.json["bitwise"]
    assert found.json["ops"] > 5


def test_a_step_that_stays_eager_is_an_answer(hocket, steps):
    found = hocket("run", "train.py:branching", "--runs", 1, "--format", "json").fine()
    assert (found.json["verdict"], found.json["speedup"]) == ("eager", 1.0)
    assert f"train.py:{line_of('loss.item()')}" in found.json["why"]


def test_a_step_that_stays_eager_is_an_error_under_strict(hocket, steps):
    found = hocket("run", "train.py:branching", "--strict")
    assert (found.status, found.out) == (1, "")
    line = line_of("loss.item()")
    assert found.error.startswith(
        f"hocket: error: it could not be captured: the step at train.py:{line} reads the value of a tensor"
    )


def test_no_plan_no_report(hocket, steps, tmp_path):
    found = hocket("run", "train.py:branching", "--runs", 1, "--report", "report")
    assert found.status == 1
    assert "verdict: eager" in found.out
    assert found.error.startswith("hocket: error: there is nothing to report, the step was not planned")
    assert not (tmp_path / "report").exists()


def test_idle_threads_are_told_to_sleep_before_torch_is_loaded(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    command = [sys.executable, "-m", "hocket", "run", *TINY, "--runs", "1", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["notes"][-1].startswith("GOMP_SPINCOUNT=10000 was set for this process")


def test_says_so_when_torch_was_there_first(hocket, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    found = hocket("run", *TINY, "--runs", 1, "--format", "json")
    assert found.json["notes"][-1].startswith("GOMP_SPINCOUNT is not set: torch was loaded before")
    assert "GOMP_SPINCOUNT" not in os.environ


def test_a_plan_that_was_edited_by_hand_is_run(hocket, tmp_path):
    hocket("profile", *TINY, "--widths", "1", "--runs", 1, "-o", "costs.json", "--graph", "graph.json").fine()
    assert hocket("plan", "graph.json", "costs.json", "--planner", "serial", "-o", "plan.txt").status == 0
    text = (tmp_path / "plan.txt").read_text()
    (tmp_path / "plan.txt").write_text("# mine\n" + text.replace("planner=serial", "planner=mine"))
    found = hocket("run", *TINY, "--runs", 1, "--plan", "plan.txt", "--format", "json").fine()
    assert found.json["planner"] == "mine"
    assert "plan 'mine' on" in found.json["why"]
    lines = text.splitlines()
    (tmp_path / "plan.txt").write_text("\n".join(lines[:-1]))
    found = hocket("run", *TINY, "--plan", "plan.txt")
    found.refused(1, f"op {lines[-1].split()[1]!r} of the graph is run by no lane")
    assert hocket("run", *TINY, "--plan", "plan.txt", "--planner", "list").status == 2


def test_a_second_run_remembers_unless_told_not_to(hocket, cache_folder, monkeypatch):
    for module in ("recall", "comparison"):  # other programs may slow the few steps
        monkeypatch.setattr(f"hocket.autotune.{module}.MOMENTS_DIFFER", 1e3)
    words = ("run", *TINY, "--runs", 1, "--format", "json")
    assert hocket(*words, "--no-cache").status == 0
    assert not cache_folder.exists()
    first, again = hocket(*words), hocket(*words)
    assert len(list((cache_folder / "hocket" / "decisions").glob("*.json"))) == 1
    assert "earlier search" not in first.json["why"]
    assert "earlier search" in again.json["why"] or "no difference" in first.json["why"]


def test_a_run_on_a_simulated_gpu_says_so_and_never_names_the_cpu(hocket, tmp_path):
    found = hocket("run", *TINY, "--runs", 2, "--simulate", "a100", "--report", "report")
    assert (found.status, found.err) == (0, "")
    lines = found.out.splitlines()
    assert re.match(r"mlp on simulated NVIDIA A100 SXM4 40 GB, \d+ ops", lines[0])
    assert "same result: bitwise" in found.out
    assert "note: simulated, not measured" in found.out
    assert "gpu0, stream, priority" in found.out
    assert "thread" not in found.out
    written = json.loads((tmp_path / "report/comparison.json").read_text())
    assert (written["device"], written["cores"]) == ("simulated NVIDIA A100 SXM4 40 GB", 108)
    assert written["eager_ms"]["median"] > written["planned_ms"]["median"] > written["lower_bound_ms"]
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"timeline-serial.json", "timeline-planned.json", "index.html"} <= names
    again = hocket("run", *TINY, "--runs", 2, "--simulate", "a100", "--format", "json").json
    assert (again["speedup"], again["why"]) == (written["speedup"], written["why"]), "simulated times repeat"


def test_a_machine_file_is_simulated_too(hocket, tmp_path):
    a100 = Machine.preset("a100")
    slow = replace(a100, devices=(replace(a100.devices[0], graph_launch_us=30.0),), note="my GPU. Made up.")
    slow.save(tmp_path / "gpu.json")
    found = hocket("run", *TINY, "--runs", 1, "--simulate", "gpu.json", "--format", "json").json
    assert (found["device"], found["verdict"]) == ("simulated my GPU", "eager")


def test_what_cannot_be_simulated_is_an_error(hocket, steps):
    found = hocket("run", *TINY, "--simulate", "nosuch")
    found.refused(2, "expected one of a100, h100, h200, p100, v100, got 'nosuch'; or a machine file")
    found = hocket("run", *TINY, "--simulate", "a100", "--planner", "list")
    found.refused(1, "planner 'list' makes plans for CPU cores")
    found = hocket("run", "train.py:printing", "--simulate", "a100")
    found.refused(1, "there is nothing to simulate, the step was not planned: it asks print")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_device_cuda_says_so(hocket):
    found = hocket("run", *TINY, "--device", "cuda")
    assert found.status == 2
    assert found.error == "hocket: error: --device: torch sees no GPU here; --simulate a100 simulates one"
