"""Views of what a step is given are made in its first run; later runs put another memory into them."""

import weakref

import pytest
import torch

from equivalence.compare import serial
from hocket.execution.native import NativeLanes
from hocket.native import available
from hocket.tracing import capture

pytestmark = pytest.mark.skipif(not available(), reason="the native core cannot be built here")
DATA = torch.arange(60.0).view(20, 3)


def step(batch: torch.Tensor) -> list[torch.Tensor]:
    columns = batch.t()
    return [
        columns @ batch,
        columns[1:].sum(1),
        batch.view(torch.int32)[1] + 1,
        torch.as_strided(batch, (2, 3), (3, 1), 6) * 2,
        batch.unsqueeze(0).expand(2, 4, 3).diagonal().sum(1),
    ]


def lanes() -> NativeLanes:
    captured = capture(step, [], [], DATA[:4])
    return NativeLanes(captured, serial(captured))


def test_views_follow_the_batch_through_its_memory() -> None:
    run = lanes()
    own = torch.randn(4, 3)
    for batch in [*(DATA[at : at + 4] for at in (0, 5, 16, 1)), own, own, torch.randn(4, 3), DATA[2:6]]:
        for found, expected in zip(run(batch), step(batch), strict=True):
            assert torch.equal(found, expected)
        own.mul_(1.5)


def test_views_follow_a_parameter_that_gets_other_memory() -> None:
    model = torch.nn.Linear(3, 2)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(batch)

    captured = capture(forward, [model], [], DATA[:4])
    run = NativeLanes(captured, serial(captured))
    for _ in range(3):
        assert torch.equal(run(DATA[:4]), forward(DATA[:4]))
        model.weight.data = torch.randn(7, 3)[1:3]


def test_nothing_of_the_batch_is_kept_between_steps() -> None:
    run = lanes()
    for _ in range(3):
        batch = torch.randn(4, 3)
        tensor, memory = weakref.ref(batch), batch.untyped_storage()
        run(batch)
        assert torch._C._storage_Use_Count(memory._cdata) == 2  # the batch's and this one
        del batch
        assert tensor() is None


def test_writes_through_a_view_count_as_writes_of_its_base() -> None:
    table = torch.ones(3, 2)

    def count(batch: torch.Tensor) -> torch.Tensor:
        table[1].add_(batch.sum())
        return table.sum()

    captured = capture(count, [], [], DATA[:4])
    run = NativeLanes(captured, serial(captured))
    for _ in range(4):
        before = table._version
        run(DATA[:4])
        assert table._version > before


def test_a_step_that_returns_what_it_is_given_leaves_it_alone() -> None:
    def same(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.contiguous(), batch.t().contiguous() + batch.detach().sum()

    captured = capture(same, [], [], DATA[:4])
    run = NativeLanes(captured, serial(captured))
    seen = []
    for at in (0, 3, 7):
        batch = DATA[at : at + 4].clone()
        seen.append((run(batch), same(batch)))
    for found, expected in seen:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
