"""Values that lie in a file: what is needed last goes out, views stay views, and no bit is lost."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.tracing import spill
from hocket.tracing.spill import ValueMemory

MIB = 2**20


def tensors(*sizes_mib: int) -> list[torch.Tensor]:
    return [torch.randn(size * MIB // 8, dtype=torch.float64) for size in sizes_mib]


def resident(*values: torch.Tensor) -> list[bool]:
    return [value.untyped_storage().nbytes() > 0 for value in values]


def test_what_is_needed_last_goes_out_first_and_comes_back_bit_by_bit() -> None:
    values = tensors(1, 1, 1, 2)
    copies = [value.clone() for value in values]
    memory = ValueMemory(2 * MIB, {0: [0, 9], 1: [1, 4], 2: [2, 7], 3: [3]})
    for slot, value in enumerate(values):
        memory.add(slot, value)
    memory.spill(3)
    assert resident(*values) == [False, True, True, False], "slot 3 has no reader left but the end"
    assert memory.held_bytes == 2 * MIB
    memory.load([0, 1])
    assert resident(*values) == [True, True, True, False]
    memory.load(range(4))
    memory.close()
    assert all(torch.equal(value, copy) for value, copy in zip(values, copies, strict=True))


def test_places_in_the_file_are_used_again() -> None:
    first, second = tensors(1, 1)
    memory = ValueMemory(0, {0: [0, 5], 1: [1, 5]})
    memory.add(0, first)
    memory.spill(0)
    memory.drop(0)
    memory.add(1, second)
    memory.spill(1)
    assert memory._end == MIB
    memory.close()


def test_without_room_in_the_file_values_stay_where_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def seek(self, _: int) -> None: ...

        def write(self, _: Any) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None: ...

    monkeypatch.setattr(spill.tempfile, "TemporaryFile", lambda **_: Full())
    (value,) = tensors(1)
    copy = value.clone()
    memory = ValueMemory(0, {0: [0, 5]})
    memory.add(0, value)
    with caplog.at_level(logging.INFO, "hocket"):
        memory.spill(0)
        memory.spill(1)
    memory.close()
    assert torch.equal(value, copy)
    assert caplog.text.count("No space left on device") == 1


def test_a_file_that_lost_its_end_is_an_error_and_no_garbage(tmp_path: Path) -> None:
    (value,) = tensors(1)
    memory = ValueMemory(0, {0: [0, 5]})
    memory.add(0, value)
    memory.spill(0)
    memory._file.truncate(0)
    with pytest.raises(OSError, match="has not what was written"):
        memory.load([0])
    memory.close()


def test_small_values_and_what_is_no_tensor_stay() -> None:
    memory = ValueMemory(0, {0: [0, 5], 1: [0, 5]})
    memory.add(0, torch.ones(8))
    memory.add(1, None)
    memory.spill(0)
    assert memory.held_bytes == 0
    memory.close()
