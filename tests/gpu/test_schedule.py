"""On a real device: what `tests/test_simulated_device.py` has of a schedule, its report and the command line."""

import json

import pytest
import torch

import hocket
from hocket.cli import main
from hocket.zoo import load

pytestmark = pytest.mark.gpu

STEPS = 400


@pytest.mark.parametrize("guard", [True, False])
def test_a_schedule_decides_shows_and_reports_on_the_gpu(guard, tmp_path):
    job = load("lenet", device="cuda")
    fast = hocket.schedule(job.step, job.model, job.optimizer, guard=guard, cache=False)
    for number in range(STEPS):
        fast(job.batch(number))
        if fast.decided:
            break
    assert fast.decided
    assert fast.candidate is not None, fast.why
    assert {lane.kind for lane in fast.plan.lanes} == {"stream"}
    if not guard:
        fast(job.batch(0))
    torch.cuda.synchronize()
    before = [parameter.detach().clone() for parameter in job.models[0].parameters()]
    timeline = fast.timeline()
    assert timeline.source == "measured"
    assert timeline.by_op.keys() == set(fast.graph.order)
    assert 0 < fast.bounds.lower_us <= fast.bounds.upper_us
    paths = fast.report(tmp_path)
    for old, parameter in zip(before, job.models[0].parameters(), strict=True):
        assert torch.equal(old, parameter), "a report changes nothing"
    page = paths["index.html"].read_text()
    assert "CPU core" not in page
    assert "gpu0, stream" in page
    if guard:
        comparison = fast.comparison()
        assert comparison.device == torch.cuda.get_device_name()
        assert comparison.cores == torch.cuda.get_device_properties(0).multi_processor_count
        assert comparison.device in page
    fast.close()


def test_the_command_line_runs_on_the_gpu(capsys, tmp_path):
    words = ["run", "lenet", "--device", "cuda", "--runs", "3", "--report", str(tmp_path), "--format", "json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == torch.cuda.get_device_name()
    assert found["max_abs_diff"] < 1e-3
    assert {"index.html", "timeline-serial.json", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
