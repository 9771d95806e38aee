"""The folder of compiled steps is bounded, and a failure of the compiling process is one line."""

import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hocket.errors import CaptureError
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from hocket.tracing.compiling import folder as folder_module
from hocket.tracing.compiling import inductor
from hocket.tracing.compiling.folder import MAX_SCRATCH_S, Compiling, _bound
from hocket.tracing.compiling.process import CompilingProcess
from support.steps import update


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        return update(optimizer, model(batch).square().mean())

    return capture_step(step, model, optimizer, torch.randn(3, 4), split=False)


def kept(folder: Path, name: str, age_s: float, size_bytes: int = 10) -> Path:
    made = folder / name
    made.mkdir()
    (made / "kernels.so").write_bytes(bytes(size_bytes))
    os.utime(made, (time.time() - age_s,) * 2)
    return made


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_KEPT", 3)
    made = {name: kept(tmp_path, name, age) for name, age in (("c", 30), ("a", 10), ("d", 40), ("b", 20))}
    _bound(tmp_path, made["d"])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "d"}, "the newest stays, whatever its time"


def test_bytes_are_bounded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "MAX_KEPT_BYTES", 250)
    made = [kept(tmp_path, str(age), age, size_bytes=100) for age in (10, 20, 30, 40)]
    _bound(tmp_path, made[0])
    assert {path.name for path in tmp_path.iterdir()} == {"10", "20"}


def test_what_was_never_finished_is_deleted_in_the_end(tmp_path: Path) -> None:
    new, old = kept(tmp_path, ".new", 10), kept(tmp_path, ".old", MAX_SCRATCH_S + 10)
    _bound(tmp_path, tmp_path / "other")
    assert new.exists()
    assert not old.exists()


def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Have the compiling process be a script; the folder is its last argument."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nfor folder; do :; done\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("sys.executable", str(program))


def failure_of(captured: Captured, folder: Path) -> str:
    compiling = Compiling(captured, folder, threads=2)
    assert compiling.found() is None
    process = CompilingProcess()
    compiling.start(process)
    process.begin()
    with pytest.raises(CaptureError) as caught:
        compiling.result()
    compiling.close()
    assert not [path for path in folder.iterdir() if path.is_dir()]
    return str(caught.value)


def test_another_torch_whose_wrapper_is_not_known_is_one_line(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event that no version so far writes, in the compiling process and as the training sees it."""
    wrapper = "def call(args):\n    alloc_from_pool(args[0])\n    return (args[0], )\n"
    monkeypatch.setattr(inductor, "_written", lambda *_: (wrapper, [torch.zeros(3)]))
    request = tmp_path / "request"
    request.mkdir()
    (request / "request.json").write_text(Compiling(captured, tmp_path, threads=2)._request.text)
    assert inductor._compile_one(request, wide=False) == 1
    said = (request / "failure").read_text()
    assert said == "CaptureError: the wrapper does what is not known: name 'alloc_from_pool' is not defined"
    folder = tmp_path / "kept"
    answering(tmp_path, monkeypatch, f'cp "{request / "failure"}" "$folder"; exit 1')
    assert failure_of(captured, folder) == said


def test_an_inductor_that_raises_is_one_line(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(*_: Any) -> Any:
        raise AttributeError("module 'torch._inductor' has no attribute 'x'\nand a second line")

    monkeypatch.setattr(inductor, "_written", raising)
    (tmp_path / "request.json").write_text(Compiling(captured, tmp_path, threads=2)._request.text)
    assert inductor._compile_one(tmp_path, wide=True) == 1
    assert (tmp_path / "failure").read_text() == "AttributeError: module 'torch._inductor' has no attribute 'x'"


def test_no_room_is_one_line(captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    assert inductor._status_of(full, tmp_path / "nowhere") == os.EX_IOERR
    answering(tmp_path, monkeypatch, f"exit {os.EX_IOERR}")
    folder = tmp_path / "kept"
    assert failure_of(captured, folder) == f"{folder} cannot be written any more"


def test_a_process_that_takes_too_long_is_ended(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr("hocket.tracing.compiling.process.MAX_COMPILE_S", 0.1)
    assert "ended with -9" in failure_of(captured, tmp_path / "kept")
