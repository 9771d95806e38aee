"""One go by itself: where gradients lie, whose memory it is, and what a failure leaves behind."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from tests.fusion.oracle import made
from tests.fusion.prefer import in_one_go, prefer
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.fusion.gradients import LARGE_BYTES, Gathered, GradientMemory

D = torch.float64
WIDE = 370  # squared, in float64, more than a MiB
X, Y = torch.linspace(-1, 1, 24, dtype=D).view(4, 6), torch.tensor([0, 1, 2, 1])


def net() -> nn.Module:
    """Large and small parameters."""
    return nn.Sequential(nn.Linear(6, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 3))


@pytest.fixture
def array(monkeypatch):
    prefer(monkeypatch, "1 at a time with backward")
    made_ = hocket.fuse(made(net, 4), shared=True)
    for _ in range(2):  # recorded, and chosen
        made_.losses(F.cross_entropy, X, Y)
    assert in_one_go(made_)
    assert any(p[0].nbytes >= LARGE_BYTES for p in made_.parameters())
    return made_


def executor_of(array):
    """The plan of the only kind of call."""
    [call] = array._calls.programs.world().calls.values()
    return call.run.__self__


def expected(array, x=X, y=Y):
    twin = hocket.fuse(array.unfuse(), backend="rule", shared=True)
    twin.loss(F.cross_entropy, twin(x), y).backward()
    return [p.grad for p in twin.parameters()]


def large(array):
    """The parameters whose gradients have memory that is kept."""
    return [p for p in array.parameters() if p.nbytes >= LARGE_BYTES]


def close(found, wanted):
    for one, two in zip(found, wanted, strict=True):
        assert (one - two).abs().max() <= 1e-12 * two.abs().max()


def test_gradients_are_handed_over_without_a_copy(array):
    losses = array.losses(F.cross_entropy, X, Y)
    kept = {storage.data_ptr() for storage in array._store.memory._storages.values()}
    losses.backward()
    assert {p.grad.data_ptr() for p in large(array)} <= kept


@pytest.mark.parametrize("how", ["grad", "detached", "row", "numpy"])
def test_a_gradient_that_somebody_keeps_is_not_written_over(how, array):
    array.losses(F.cross_entropy, X, Y).backward()
    keep = {
        "grad": lambda grad: grad,
        "detached": lambda grad: grad.detach(),
        "row": lambda grad: grad[1:2],
        "numpy": lambda grad: grad.numpy(),
    }[how]
    kept = [keep(p.grad) for p in array.parameters()]
    before = [copy.deepcopy(each) for each in kept]
    for number in range(3):
        array.zero_grad()
        array.losses(F.cross_entropy, X * -number, Y).backward()
        assert not all(
            (a == b[: len(a)]).all() for a, b in zip(before, (p.grad for p in array.parameters()), strict=True)
        )
    for one, two in zip(kept, before, strict=True):
        assert (one == two).all()


def test_losses_that_are_kept_keep_their_gradients(array):
    wanted = [expected(array, X * factor) for factor in (1, 2, 3)]
    kept = [array.losses(F.cross_entropy, X * factor, Y) for factor in (1, 2, 3)]
    for losses, grads in zip(kept, wanted, strict=True):
        array.zero_grad()
        losses.backward()
        close([p.grad for p in array.parameters()], grads)


def test_losses_let_go_of_gradients_once_handed_over(array):
    """A history of losses that were never detached holds no gradients."""
    history = []
    places = set()
    for number in range(4):
        array.zero_grad()
        history.append(array.losses(F.cross_entropy, X * (number + 1), Y))
        history[-1].backward()
        places.add(tuple(p.grad.data_ptr() for p in large(array)))
    assert len(places) == 1


def test_gradients_set_to_zero_and_not_to_none(array):
    for number in range(3):
        wanted = expected(array, X * (number + 1))
        array.losses(F.cross_entropy, X * (number + 1), Y).backward()
        close([p.grad for p in array.parameters()], wanted)
        array.zero_grad(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in array.parameters())


def test_gradients_changed_in_place_stay_with_their_step(array):
    wanted = expected(array)
    for _ in range(3):
        array.losses(F.cross_entropy, X, Y).backward()
        close([p.grad for p in array.parameters()], wanted)
        with pytest.warns(UserWarning, match="one norm over all models"):
            nn.utils.clip_grad_norm_(array.parameters(), 1e-3)
        for p in array.parameters():
            p.grad = p.grad * 2 if p.ndim > 2 else p.grad.fill_(5)
        array.zero_grad()


@pytest.mark.parametrize("layer", [0, 2, 4])
def test_a_backward_that_fails_leaves_nothing_behind(layer, array):
    """In the middle of the second group's, by the hand of a hook."""
    wanted = expected(array)
    executor = executor_of(array)

    def fails(grad):
        raise RuntimeError("by intent")

    handle = executor._parts.of(array._store.all_tensors())[1][f"{layer}.weight"].register_hook(fails)
    with pytest.raises(RuntimeError, match="by intent"):
        array.losses(F.cross_entropy, X, Y)
    handle.remove()
    assert all(p.grad is None for p in array.parameters())
    array.losses(F.cross_entropy, X, Y).backward()
    close([p.grad for p in array.parameters()], wanted)


def test_graphs_and_activations_are_gone_after_each_call(own_objects, array):
    """Memory after a step does not grow, with a backward or without."""

    def alive():
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    array.losses(F.cross_entropy, X, Y).backward()
    array.zero_grad()
    before = alive()
    for number in range(3):
        array.losses(F.cross_entropy, X * number, Y)
        array.losses(F.cross_entropy, X * number, Y).backward()
        array.zero_grad()
    assert alive() == before


def test_the_parts_are_made_once_and_follow_updates(array):
    parts = executor_of(array)._parts
    first = parts.of(array._store.all_tensors())
    optimizer = hocket.optim.SGD(array.parameters(), lr=0.1)
    array.losses(F.cross_entropy, X, Y).backward()
    optimizer.step()
    assert parts.of(array._store.all_tensors()) is first
    wanted = expected(array)
    array.zero_grad()
    array.losses(F.cross_entropy, X, Y).backward()
    close([p.grad for p in array.parameters()], wanted)
    array.get_parameter("fused.0.bias").data = torch.zeros(4, WIDE, dtype=D)
    assert parts.of(array._store.all_tensors()) is not first


@pytest.mark.parametrize("columns", [2, LARGE_BYTES // 16])  # kept as they come, and in buffers
def test_what_nobody_has_is_filled(columns, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: torch.full(*args, torch.nan, **kwargs))
    five, seven, three = (torch.full((columns,), number, dtype=D) for number in (5.0, 7.0, 3.0))
    gathered = []
    for grads in ((five, seven), (None, three), (None, None)):
        gathered.append(Gathered(nn.Parameter(torch.ones(2, columns, dtype=D)), GradientMemory()))
        for grad in grads:
            gathered[-1].take(grad)
    assert gathered[0].whole().mean(1).tolist() == [5.0, 7.0]
    assert gathered[1].whole().mean(1).tolist() == [0.0, 3.0]
    assert gathered[2].whole() is None


def test_blocks_of_memory_are_told_apart():
    memory, one, two = GradientMemory(), torch.ones(LARGE_BYTES // 4, 2), torch.ones(LARGE_BYTES // 4, 2)
    first = memory.place(one)
    assert memory.place(two).data_ptr() != first.data_ptr()
    assert memory.place(one).data_ptr() != first.data_ptr(), "somebody holds the first"
    del first
    address = memory.place(one).data_ptr()
    assert memory.place(one).data_ptr() == address, "nobody does"
    assert memory.place(one.double()).dtype == D
    one.data = torch.ones(LARGE_BYTES // 8, 2)
    assert memory.place(one).shape == one.shape
    one.data = torch.ones(2, 2)
    assert memory.place(one) is None
