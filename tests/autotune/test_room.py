"""A step in float64 has to have its place in memory, or is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.autotune import room
from hocket.autotune.closeness import sample
from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from support.steps import update


@pytest.fixture(scope="module")
def captured() -> Captured:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        return update(optimizer, model(batch).square().mean())

    return capture_step(step, model, optimizer, torch.randn(64, 64), split=False)


def test_a_float64_step_takes_twice_what_float32_takes(captured: Captured) -> None:
    """Weight and batch, and at least the activation and a gradient, of 64 x 64 elements of 8 bytes each."""
    assert 4 * 64 * 64 * 8 <= room.float64_peak_bytes(captured) <= 8 * 64 * 64 * 8


def test_without_room_forms_are_refused_and_nothing_is_run(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> Any:
        raise AssertionError("a step was made")

    needed = room.float64_peak_bytes(captured)
    monkeypatch.setattr(room, "available_bytes", lambda: int(needed * 1.9))
    with pytest.raises(CaptureError, match=r"a step in float64 to compare with would take 0 MiB, and 0 MiB are free"):
        sample(captured, run, {"form": run}, torch.randn(64, 64), 0)
    monkeypatch.setattr(room, "available_bytes", lambda: int(needed * 2.1))
    room.expect_room(captured)


def test_free_memory_is_what_the_system_says(tmp_path: Path) -> None:
    said = tmp_path / "meminfo"
    said.write_text("MemTotal:       100 kB\nMemAvailable:     7 kB\n")
    assert room.available_bytes(said) == 7 * 1024
    said.write_text("MemTotal:       100 kB\n")
    assert room.available_bytes(said) is None
    assert room.available_bytes(tmp_path / "nowhere") is None
