"""The fuse bench itself, on targets as small as they get."""

from typing import Any

import pytest
import torch
from torch import nn

import forked
from benchmarks import fuse as bench
from benchmarks.fuse import targets, timing
from benchmarks.fuse.targets import Target, Training
from hocket.errors import InputError

PRECISIONS = ("float32", "bfloat16", "float16")
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
            assert all(row["first_steps"] > 0 for row in rows.values())
    assert found["device"] == "cpu"


def test_a_target_that_fails_costs_itself_alone(monkeypatch):
    """As one does whose package is not installed."""
    measure = bench._measure

    def refused(target, *args):
        if target is TINY["dcgan"]:
            raise InputError("dcgan needs a package that is not here")
        return measure(target, *args)

    monkeypatch.setattr(bench, "_measure", refused)
    found = bench.run(["dcgan", "mlp-32"], sizes=(1,), steps=1, memory=False, contenders=())
    assert found["targets"]["dcgan"] == {}
    assert "serial" in found["targets"]["mlp-32"]["1"]
    assert list(found["left_out"].values()) == ["dcgan, 1 models: dcgan needs a package that is not here"]


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("pointnet-seg", Training()),
        ("pointnet-seg", Training(own_rates=True)),
        # Adam makes much of a gradient that is all rounding, as that of a bias before a batch norm: not in this net.
        ("mlp-32", Training(optimizer="adam", own_rates=True)),
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
    found = target.batches("cpu")
    assert not torch.equal(found[0][0], found[1][0]), "each step takes another batch"
    batches = [(inputs.double(), labels) for inputs, labels in found]
    monkeypatch.setattr(Target, "batches", lambda self, device: batches)
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
    [pytest.param(Training(own_rates=True), marks=pytest.mark.slow), Training(optimizer="adam", own_rates=True)],
)
def test_jax_trains_as_torch_does(monkeypatch, training):
    pytest.importorskip("jax")
    forked.in_place_of_spawn(monkeypatch)
    loop, theirs = (targets.step_of(name, TINY["mlp-32"], 3, "cpu", training) for name in ("serial", "jax"))
    peer = theirs.times_s.__self__
    for _ in range(3):
        assert min(theirs.times_s(4)) > 0
        losses = [loop.run() for _ in range(4)][-1]
        assert peer.loss == pytest.approx(float(sum(losses)) / 3, rel=1e-4)
    peer.end()
