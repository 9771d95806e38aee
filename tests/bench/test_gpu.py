"""`python -m benchmarks gpu` without a GPU: the same parts in small, and parts that crash, hang and say nothing.

A bench with a time budget begins what fits, and names what it leaves out.

Rows of the papers that need a GPU, as far as they can be made without one.
"""

import json
import math
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.bench import Budget
from benchmarks.cli import main, make_parser
from benchmarks.critical_path import measured
from benchmarks.gpu import PARTS, Part
from benchmarks.gpu_papers import NOT_MEASURED, occupancy_of
from hocket.backends import StreamBackend
from hocket.ir import Device, Machine
from support.strict_cuda import CaptureRefusedError, StrictCuda

CONTENDERS = {"eager", "eager graph", "graph", "layers", "asynchronous", "full", "compile", "autotuned"}
MLP = ("fuse", "mlp-32", "--device", "cpu", "--models", "1", "--steps", "1", "--no-memory")


@pytest.fixture
def faked(tmp_path):
    """A command in place of ``python -m benchmarks``, whose parts are called by what they do."""
    script = tmp_path / "bench.py"
    script.write_text(
        textwrap.dedent("""
        import json, os, signal, sys, time
        name, *words = sys.argv[1:]
        path = words[words.index("-o") + 1]
        if name != "mute":
            with open(path, "w") as file:
                json.dump({"budget_s": int(words[words.index("--budget-s") + 1]), "words": words}, file)
        if name == "hanging":
            time.sleep(600)
        if name == "crashing":
            print("first\\nCUDA error: an illegal memory access", file=sys.stderr)
            sys.exit(1)
        if name == "killed":
            os.kill(os.getpid(), signal.SIGSEGV)
        """)
    )
    return sys.executable, str(script)


def test_one_that_crashes_or_hangs_costs_itself_alone(faked, monkeypatch):
    names = ("crashing", "hanging", "killed", "mute", "good")
    saved = []
    begin = time.perf_counter()
    monkeypatch.setitem(gpu.PARTS, "cpu", tuple(Part((name,), 1.0) for name in names))
    monkeypatch.setattr(gpu, "COMMAND", faked)
    found = gpu.run(device="cpu", budget_s=20.0, save=lambda so_far: saved.append(len(so_far["parts"])))
    assert time.perf_counter() - begin < 20.0
    assert list(found["parts"]) == list(names)
    assert saved == [1, 2, 3, 4, 5]
    assert found["failed"] == {
        "crashing": "crashing: exit status 1: CUDA error: an illegal memory access",
        "killed": "killed: exit status -11: without a word",
    }
    assert list(found["stopped"]) == ["hanging"]
    assert set(found["parts"]["mute"]) == {"took_s"}
    for name in ("crashing", "hanging", "killed", "good"):
        assert found["parts"][name]["words"], "what was saved is kept"


@pytest.mark.parametrize("device", PARTS)
def test_the_words_of_every_part_are_understood(device):
    for part in PARTS[device]:
        args = make_parser().parse_args([*part.words, "--budget-s", "9", "--format", "json", "-o", "x.json"])
        assert args.bench == part.name


@pytest.mark.slow
def test_a_real_part_leaves_one_whole_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gpu.PARTS, "cpu", (Part(MLP, 1.0),))
    path = tmp_path / "gpu.json"
    assert main(["gpu", "--device", "cpu", "--budget-s", "60", "-o", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["complete"]
    row = document["parts"]["fuse"]["targets"]["mlp-32"]["1"]
    assert row["fused"]["to_serial"] == row["serial"]["step_ms"] / row["fused"]["step_ms"]
    assert document["parts"]["fuse"]["complete"]
    assert list(tmp_path.iterdir()) == [path], "no half-written file beside it"
    assert str(path) in capsys.readouterr().out


class Forgetful(Budget):
    """Ten seconds pass at every look at the clock."""

    def __init__(self, total_s):
        now = iter(range(0, 100_000, 10))
        super().__init__(total_s, clock=lambda: next(now))


def nowhere(device: StrictCuda | None = None) -> StreamBackend:
    """The streams of a device that is none, and as strict as CUDA."""
    gpu = Device("gpu0", "cuda", 56, memory_bytes=16e9, priorities=2)
    return StreamBackend(device or StrictCuda(), Machine((gpu,), note="nowhere"), "nowhere")


def uncompiled(name: str, size: int, device: str, mode: str) -> Callable[[Any], Any]:
    return measured.zoo.load(name, batch_size=size).step


def test_streams_are_measured_in_small_batches_first_and_what_is_left_out_is_named(monkeypatch):
    """All of `on_gpu` but the device."""
    backend = nowhere()
    monkeypatch.setattr(measured, "_compiled", uncompiled)
    saved = []
    networks = {"lenet": (2, 4), "mlp": (2, 4)}
    found = measured.on_streams(
        backend, "cpu", networks, 1, 1, Budget(), lambda so_far: saved.append(list(so_far["networks"]))
    )
    assert saved == [["lenet/2"], ["lenet/2", "mlp/2"], ["lenet/2", "mlp/2", "lenet/4"], [*found["networks"]]]
    assert set(found["geomean"]["small"]) == CONTENDERS
    row = found["networks"]["lenet/2"]
    assert row["speedup"]["graph"] == 1.0
    assert row["lanes"]["graph"] == 1 < row["lanes"]["full"]
    assert found["gpu"] == "nowhere"
    both = [found["networks"][f"{name}/2"]["speedup"]["full"] for name in networks]
    assert found["geomean"]["small"]["full"] == pytest.approx(math.sqrt(both[0] * both[1]))
    short = measured.on_streams(backend, "cpu", networks, 1, 1, Forgetful(250), lambda _: None)
    assert list(short["networks"]) == ["lenet/2"]
    assert set(short["left_out"]) >= {"mlp/2", "lenet/4", "mlp/4"}
    assert short["geomean"]["large"] == {}, "of nothing there is no mean, and JSON has no word for NaN"


def test_a_contender_that_fails_costs_itself_alone(monkeypatch):
    """A graph that cannot be captured is not timed as one, and a step that cannot be compiled is named."""
    device = StrictCuda(lambda capture, op: (_ for _ in ()).throw(CaptureRefusedError("out of memory")))

    def refused(name: str, size: int, device: str, mode: str) -> Callable[[Any], Any]:
        raise RuntimeError(f"no compiler for {mode}")

    monkeypatch.setattr(measured, "_compiled", refused)
    found = measured.on_streams(nowhere(device), "cpu", {"lenet": (2, 2)}, 1, 1, Budget(), lambda _: None)
    assert list(found["networks"]["lenet/2"]["median_ms"]) == ["eager"]
    assert set(found["left_out"]) == {f"lenet/2: {label}" for label in CONTENDERS - {"eager"}}
    assert found["left_out"]["lenet/2: graph"].endswith("no CUDA graph: CaptureRefusedError: out of memory")
    assert found["left_out"]["lenet/2: autotuned"].endswith("no compiler for max-autotune")


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


def test_occupancy_of_a_network_on_the_strict_device():
    backend = StreamBackend(StrictCuda(), Machine.preset("a100"), "strict")
    found = occupancy_of("lenet", 4, backend, "cpu")
    for label in ("one stream", "planned"):
        assert found[f"{label}, us"][0] == found[f"{label}, us"][1] > 0
        first, second = found[label]
        assert first == second
        assert 0 < max(first) <= 1
