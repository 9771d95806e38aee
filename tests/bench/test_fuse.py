"""The fuse bench itself, on targets as small as they get."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch
from torch import nn

import forked
from benchmarks import fuse as bench
from benchmarks.budget import Budget
from benchmarks.fuse import beside, counters, targets, timing
from benchmarks.fuse.partial import blocks_of, partial
from benchmarks.fuse.targets import Target
from benchmarks.fuse.training import PRECISIONS, Training
from benchmarks.jax_process import IN_A_ROW
from hocket.errors import InputError

_TINY = (("width", 64), ("depth", 1), ("steps", 4), ("vocab", 20))
TINY = {
    "mlp-32": Target("mlp", 4, (("width", 8), ("depth", 2))),
    "pointnet-seg": Target("pointnet-seg", 2, (("points", 8), ("width", 4))),
    "dcgan": Target("dcgan", 2, (("image_size", 16), ("width", 4)), "gan"),
    "transformer-2x64": Target("transformer", 2, _TINY, "words"),
    "bert-2x64": Target("bert-medium", 2, _TINY, "own"),
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, target in TINY.items():
        monkeypatch.setitem(bench.TARGETS, name, target)
    monkeypatch.setattr(timing, "SHORT_S", 0.0)  # as many steps as are asked for, no more


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("bert-2x64", "pointnet-seg"))) for name in TINY]
)
def test_every_kind_of_target_has_its_fields_and_its_baseline(name):
    if name == "bert-2x64":
        pytest.importorskip("transformers")
    contenders = ("vmap", "fused", "auto") if name == "mlp-32" else ("fused",)
    found = bench.run([name], sizes=(2,), steps=2, precisions=PRECISIONS, memory=False, contenders=contenders)
    for key in ("targets", "targets_bfloat16", "targets_float16"):
        assert list(found[key]) == [name]
        for size in (1, 2):
            rows = found[key][name][str(size)]
            assert set(rows) == {"serial", *contenders}, "serial is measured in the same run, asked for or not"
            for row in rows.values():
                assert row["to_serial"] == rows["serial"]["step_ms"] / row["step_ms"]
                assert row["first_steps"] > 0
                assert row["models_per_s"] == pytest.approx(size / row["step_ms"] * 1e3)
                one = found[key][name]["1"]
                assert all(
                    row["to_own_one"] == row["models_per_s"] / one[name]["models_per_s"] for name, row in rows.items()
                )
    assert set(found["crossover"][name]) == set(contenders)
    assert found["device"] == "cpu"


def test_a_loop_with_channels_last_is_a_contender_where_there_are_images():
    found = bench.run(["mlp-32", "dcgan"], sizes=(2,), steps=3, memory=False, contenders=("channels-last",))
    assert set(found["targets"]["mlp-32"]["2"]) == {"serial"}
    row = found["targets"]["dcgan"]["2"]["channels-last"]
    assert row["steps"] == 3
    assert row["quartiles_ms"][0] <= row["step_ms"] <= row["quartiles_ms"][1]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(
            pytest.param("scheduled", TINY[target], marks=() if target == "mlp-32" else pytest.mark.slow)
            for target in TINY
        ),
        ("lanes", TINY["mlp-32"]),
        pytest.param("lanes", TINY["dcgan"], marks=pytest.mark.slow),
        pytest.param("close", TINY["mlp-32"], marks=pytest.mark.slow),
        pytest.param("scheduled", targets.TARGETS["mobilenet-v2"], marks=pytest.mark.slow),
        pytest.param("scheduled", targets.TARGETS["digits-cnn"], marks=pytest.mark.slow),
    ],
)
def test_scheduled_contenders_have_their_verdict_and_train(name, target):
    if target.entry == "bert-medium":
        pytest.importorskip("transformers")
    step = targets.step_of(name, target, 2, "cpu")
    assert step.schedule is not None
    assert step.schedule.decided
    assert "x of eager's time" in step.schedule.why, "it was captured, computes what eager computes, and was timed"
    assert step.chosen()[-1] == f"{step.schedule.verdict}: {step.schedule.why}"
    assert bool(step.arrays) == (name != "lanes")
    places = step.schedule._pool.config.places
    before = [entry.get().detach().clone() for entry in places.parameters]
    step()
    step.close()
    step()
    moved = [not torch.equal(old, entry.get()) for old, entry in zip(before, places.parameters, strict=True)]
    assert sum(moved) > len(moved) / 2, "all but those whose gradients vanish, as biases before a batch norm do"
    step.close()


def test_lanes_end_after_each_block(monkeypatch):
    closed = []
    step = targets.Step(lambda: None)
    monkeypatch.setattr(targets.Step, "close", lambda self: closed.append(self))
    timing.timed({"a": step, "b": lambda: None}, "cpu", 2 * timing.BLOCK)
    assert len(closed) == 4, "before the first choices, after the warm-up, and after each block"


def test_short_steps_are_taken_more_often(monkeypatch):
    monkeypatch.setattr(timing, "SHORT_S", 1e9)
    monkeypatch.setattr(timing, "MAX_STEPS", 5)
    assert [len(each) for each in timing.timed({"a": lambda: None, "b": lambda: None}, "cpu", 2).values()] == [5, 5]
    assert [len(each) for each in timing.timed({"a": lambda: None}, "cpu", 8).values()] == [8]


@pytest.mark.slow
def test_processes_and_memory_are_measured_in_processes_of_their_own():
    found = bench.run(["mlp-32"], sizes=(1,), steps=1, contenders=("processes", "fused", "mps", "mig"))
    rows = found["targets"]["mlp-32"]["1"]
    assert rows["processes"]["step_ms"] > 0
    assert "memory_bytes" not in rows["processes"]
    for name in ("serial", "fused"):
        assert rows[name]["memory_bytes"] >= 0
    assert found["left_out"] == {"mps": "mps: needs a GPU", "mig": "mig: needs a GPU"}


def test_memory_is_compared_with_the_sum_of_the_singles(monkeypatch):
    needs = {("serial", 1): 100.0, ("serial", 4): 380.0, ("fused", 4): 300.0}

    def memory_of(name, target, size, device, training):
        if (name, size) not in needs:
            raise Empty
        return needs[name, size]

    monkeypatch.setattr(beside, "memory_of", memory_of)
    rows = {"4": {"serial": {}, "fused": {}, "vmap": {}, "processes": {}}}
    left_out: dict[str, str] = {}
    bench._add_memory("mlp-32", TINY["mlp-32"], rows, "cpu", Training(), Budget(), left_out)
    assert left_out == {"memory of vmap, mlp-32, 4 models": "memory of vmap, mlp-32, 4 models: its process did not end"}
    assert rows["4"]["vmap"] == {}
    assert rows["4"]["fused"] == {"memory_bytes": 300.0, "memory_to_singles": 0.75}
    assert rows["4"]["serial"]["memory_to_singles"] == 0.95
    assert rows["4"]["processes"] == {}


def test_what_there_is_no_time_for_is_named_and_what_was_measured_is_kept(monkeypatch):
    now = iter(range(0, 10_000, 10))  # every look at the clock is ten seconds later
    monkeypatch.setattr(bench, "Budget", lambda total_s: Budget(total_s, clock=lambda: next(now)))
    monkeypatch.setattr(
        bench, "_measure", lambda *args: {"serial": {"step_ms": 2.0, "to_serial": 1.0, "models_per_s": 500.0}}
    )
    saved = []
    found = bench.run(["mlp-32"], sizes=(1, 4, 8), memory=False, budget_s=75, save=lambda so_far: saved.append(so_far))
    assert list(found["targets"]["mlp-32"]) == ["1"]
    assert found["left_out"]["mlp-32, 4 models"] == "mlp-32, 4 models: no time: expected 80 s, 25 s left of 75"
    assert "mlp-32, 8 models" in found["left_out"]
    assert [list(so_far["targets"]["mlp-32"]) for so_far in saved] == [["1"]]


def test_what_does_not_fit_into_memory_is_named_and_the_rest_goes_on(monkeypatch):
    def measured(target, size, *args):
        if size == 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB\nmore")
        return {"serial": {"step_ms": 2.0, "to_serial": 1.0, "models_per_s": 500.0}}

    monkeypatch.setattr(bench, "_measure", measured)
    found = bench.run(["mlp-32"], sizes=(1, 2, 3), memory=False)
    assert list(found["targets"]["mlp-32"]) == ["1", "3"]
    assert found["left_out"]["mlp-32, 2 models"] == "mlp-32, 2 models: tried to allocate 2 GiB"


def test_processes_that_fail_or_hang_hold_nobody_up():
    wrong = Target("mlp", 4, (("width", 0),))
    left_out: dict[str, str] = {}
    assert bench._beside("processes", wrong, 1, "cpu", 1, Training(), left_out, 60.0) is None
    assert list(left_out) == ["processes, mlp, 1 models"]
    with pytest.raises(threading.BrokenBarrierError):
        beside.side_by_side(TINY["mlp-32"], 1, "cpu", 1, Training(), patience_s=0.1)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("pointnet-seg", Training()),
        ("pointnet-seg", Training(own_rates=True)),
        # Adam makes much of a gradient that is all rounding, as that of a bias before a batch norm: not in this net.
        ("mlp-32", Training(optimizer="adam", own_rates=True, own_batches=True)),
    ],
)
def test_fused_steps_train_as_serial_ones_do(monkeypatch, name, training):
    """The bench must compare the same work: parameters after two steps, for each kind of target."""
    nets: list = []
    right = targets.Net

    def kept(model: nn.Module, *settings: Any):
        nets.append(model.double())
        return right(model, *settings)

    monkeypatch.setattr(targets, "Net", kept)
    target = TINY[name]
    found = [target.batches("cpu", seed) for seed in range(2)]
    assert not torch.equal(found[0][0][0], found[1][0][0]), "a seed's data are its own"
    assert not torch.equal(found[0][0][0], found[0][1][0]), "each step takes another batch"

    def batches(self, device, seed=0):
        return [(inputs.double(), labels) for inputs, labels in found[seed]]

    monkeypatch.setattr(Target, "batches", batches)
    for contender in ("serial", "fused"):
        step = targets.step_of(contender, target, 2, "cpu", training)
        step()
        step()
    *plain, array = nets
    for fused, single in zip(array.unfuse(), plain, strict=True):
        for key, tensor in single.state_dict().items():
            torch.testing.assert_close(fused.state_dict()[key], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(Training(own_rates=True), marks=pytest.mark.slow),
        Training(optimizer="adam", own_rates=True, own_batches=True),
    ],
)
def test_jax_trains_as_torch_does(monkeypatch, training):
    pytest.importorskip("jax")
    forked.in_place_of_spawn(monkeypatch)
    nets: list[nn.Module] = []
    right = targets.Net
    monkeypatch.setattr(targets, "Net", lambda model, *rest: nets.append(model) or right(model, *rest))
    target = TINY["mlp-32"]
    loop, theirs = (targets.step_of(name, target, 3, "cpu", training) for name in ("serial", "jax"))
    assert theirs.seconds() > 0
    for _ in range(IN_A_ROW):
        loop()
    peer = theirs.seconds.__self__
    for layer, (weight, bias) in enumerate(peer.weights()):
        for number, model in enumerate(nets):
            linear = model[2 * layer]
            torch.testing.assert_close(torch.tensor(weight[number]), linear.weight.detach(), rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(torch.tensor(bias[number]), linear.bias.detach(), rtol=1e-4, atol=1e-6)
    peer.close()


@pytest.mark.parametrize(
    ("speeds", "pays_from", "stops_at"),
    [
        ({1: 0.8, 2: 1.5, 8: 0.9, 16: 0.7}, 2, 8),
        ({1: 1.1, 4: 2.0}, 1, None),
        ({1: 0.8, 4: 0.9}, None, None),
        ({8: 0.5, 2: 1.5}, 2, 8),
    ],
)
def test_where_fusing_pays_and_where_it_stops(speeds, pays_from, stops_at):
    rows = {str(size): {"serial": {"to_serial": 1.0}, "fused": {"to_serial": ratio}} for size, ratio in speeds.items()}
    assert bench.crossover(rows) == {"fused": {"pays_from": pays_from, "stops_at": stops_at}}


def test_partial_fusion_goes_block_by_block():
    rows = partial("mlp-32", size=2, steps=1)
    blocks = blocks_of(TINY["mlp-32"].models(0, "cpu")[0])
    assert [row["fused"] for row in rows] == list(range(1, len(blocks) + 1))
    assert rows[0]["separate"] == list(blocks[1:])
    assert rows[-1]["separate"] == []
    assert all(math.isfinite(row["to_serial"]) and row["to_serial"] > 0 for row in rows)
    with pytest.raises(InputError, match="one model"):
        partial("dcgan")


def test_blocks_are_looked_for_where_there_are_several():
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    assert blocks_of(nn.Sequential(inner, nn.Linear(2, 1))) == ("0.0", "0.2", "0.3", "1")
    assert blocks_of(inner) == ("0", "2", "3")


def test_what_is_not_there_is_refused_or_named(monkeypatch):
    with pytest.raises(InputError, match="contenders among"):
        bench.run(["mlp-32"], contenders=("faster",))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="sees no GPU"):
            bench.run(["mlp-32"], device="cuda")
    monkeypatch.setenv("PATH", "")
    wanted = ("serial", "mps", "mig")
    assert bench._absent("cuda", wanted) == {
        "mps": "mps: nvidia-cuda-mps-control is not installed",
        "mig": "mig: nvidia-smi lists no MIG device",
        "counters": "counters: dcgmi is not installed",
    }


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_mig_devices_are_read_from_the_list(tools):
    lines = ["GPU 0: A100 (UUID: GPU-1)", "  MIG 1g.5gb Device 0: (UUID: MIG-aa-bb)", "  MIG x: (UUID: MIG-cc)"]
    script(tools, "nvidia-smi", "\n".join(f"echo '{line}'" for line in lines))
    assert beside.mig_devices() == ["MIG-aa-bb", "MIG-cc"]


def test_the_mps_daemon_is_started_and_stopped(tools):
    script(tools, beside.MPS, f'[ "$1" = -d ] && echo start >> {tools}/log || cat >> {tools}/log')
    with beside.mps() as environment:
        folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder.is_dir()
        assert (tools / "log").read_text() == "start\n"
    assert (tools / "log").read_text() == "start\nquit\n"
    assert not folder.exists()


def test_an_mps_daemon_that_does_not_start_is_one_line(tools):
    script(tools, beside.MPS, "exit 3")
    left_out: dict[str, str] = {}
    assert bench._beside("mps", TINY["mlp-32"], 1, "cpu", 1, Training(), left_out, 60.0) is None
    assert left_out["mps"].startswith("mps: its daemon does not start: ")
    assert "\n" not in left_out["mps"]


def test_counters_are_means_of_what_dcgm_printed(tools):
    lines = ["#Entity SMACT", "GPU 0   0.500  0.20  0.100  0.4", "GPU 0   0.700  0.40  0.300  0.6", "GPU 0  N/A 1 1 1"]
    script(tools, "dcgmi", "\n".join(f"echo '{line}'" for line in lines))
    found = counters.counted(lambda: None, least_s=0.3)
    assert found == pytest.approx({"sm_active": 0.6, "sm_occupancy": 0.3, "tensor_active": 0.2, "dram_active": 0.5})
    script(tools, "dcgmi", "echo nothing")
    assert counters.counted(lambda: None, least_s=0.1) == {}
