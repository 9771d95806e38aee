"""The order of data follows the seed and the epoch; data of all trials is kept apart from data of one."""

import functools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.search.pieces import BATCHES, LR, X, Y, train
from tests.search.searches import assert_alone, searched
from torch import nn
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from hocket.errors import InputError
from hocket.search.data import RandomState, are_same_batches, epoch_batches, size_of
from hocket.search.split import is_same_loss
from support.refusals import refused


class Noisy(Dataset):
    """Augments by all three global generators."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(2) + random.random() + float(np.random.rand()), index  # noqa: NPY002


OWN = torch.Generator()


def read(batches, seed, epoch):
    return [inputs.clone() for inputs, _ in epoch_batches(batches, seed, epoch)]


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True, generator=torch.Generator()),
        DataLoader(Noisy(), batch_size=2),
        DataLoader(Noisy(), batch_size=2, num_workers=1, persistent_workers=True),
        DataLoader(TensorDataset(X, Y), batch_size=8, sampler=RandomSampler(X, generator=torch.Generator())),
        DataLoader(TensorDataset(X, Y), batch_sampler=BatchSampler(RandomSampler(X, generator=OWN), 8, False)),
    ],
)
def test_an_epoch_has_the_same_batches_whatever_is_drawn_meanwhile(loader):
    first = read(loader, 0, 3)
    torch.rand(7)
    random.random()
    again = []
    for inputs, _ in epoch_batches(loader, 0, 3):
        torch.rand(5)  # as dropout would
        again.append(inputs)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, read(loader, 0, 4)))
    assert not all(map(torch.equal, first, read(loader, 1, 3)))


def test_reading_data_moves_no_generator_outside():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    read(DataLoader(Noisy(), batch_size=2), 0, 0)
    assert torch.equal(torch.rand(3), expected)


def test_generators_go_on_where_they_stopped(tmp_path):
    def draw():
        return [*torch.rand(2).tolist(), random.random(), np.random.rand()]  # noqa: NPY002

    state = RandomState(5)
    with state.active():
        first = draw()
    draw()
    torch.save(state.tensors(), tmp_path / "state.pt")
    state = RandomState(6)
    state.load(torch.load(tmp_path / "state.pt", weights_only=True))
    with state.active():
        second = draw()
    with RandomState(5).active():
        assert [first, second] == [draw(), draw()]


@pytest.mark.parametrize("batches", [[X], [(X, Y, X)], [{"x": X}]])
def test_batches_of_another_form_are_named(batches):
    with pytest.raises(InputError, match=r"Training.validation: expected batches \(inputs, target\), got"):
        list(epoch_batches(batches, 0, 0, "validation"))


def test_a_loader_without_a_length_is_read():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(zip(X, Y, strict=True))

    def stream(params):
        return replace(train(params), batches=loader)

    loader = DataLoader(Stream(), 16)
    study, record = searched(stream, {"lr": LR}, trials=2, epochs=2, executor="fused")
    assert {each.kind for each in record.epochs} == {"fused"}
    assert_alone(study, train, 2)


def test_batches_that_end_for_good_are_named():
    class Once:
        def __init__(self):
            self.left = iter(BATCHES)

        def __iter__(self):
            return self.left

    once = Once()
    assert len(list(epoch_batches(once, 0, 0))) == 3
    refused("no batch to read in epoch 1; can they be iterated again", list, epoch_batches(once, 0, 1))


def loader(dataset=None, **options):
    return DataLoader(TensorDataset(X, Y) if dataset is None else dataset, **{"batch_size": 8, **options})


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (BATCHES, [(inputs.clone(), target.clone()) for inputs, target in BATCHES], True),
        (BATCHES, [(inputs + 1e-12, target) for inputs, target in BATCHES], False),
        (BATCHES, BATCHES[:2], False),
        (BATCHES, tuple(BATCHES), False),
        (loader(), loader(), True),
        (loader(shuffle=True), loader(shuffle=True), True),
        (loader(shuffle=True), loader(), False),
        (loader(), loader(batch_size=16), False),
        (loader(), loader(TensorDataset(X + 1, Y)), False),
        (loader(Noisy()), loader(Noisy()), False),  # nothing is known of such a data set
        (loader(), loader(collate_fn=lambda items: items), False),
        (loader(sampler=[0, 1]), loader(sampler=[0, 1]), False),
    ],
)
def test_only_what_is_provably_the_same_data_counts_as_such(first, second, same):
    assert are_same_batches(first, first)
    assert are_same_batches(first, second) is same


def test_sizes_are_those_of_targets():
    assert size_of(torch.zeros(5), torch.zeros(7, 2)) == 5
    assert size_of(torch.tensor(1.0), torch.zeros(7, 2)) == 7
    assert size_of(3, {"x": 2}) == 1


def made(number, weight=None, *, scale=1.0):
    return lambda outputs, target: functional.cross_entropy(outputs, target, weight) * number * scale


class Own(nn.Module):
    def forward(self, outputs, target):
        return functional.cross_entropy(outputs, target)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (made(1.0), made(1.0), True),
        (made(1.0), made(2.0), False),
        (made(1), made(1.0), False),
        (made(1.0, torch.ones(3)), made(1.0, torch.ones(3)), True),
        (made(1.0, torch.ones(3)), made(1.0, torch.zeros(3)), False),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.1), False),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), nn.CrossEntropyLoss(weight=torch.ones(3)), True),
        (nn.CrossEntropyLoss(), nn.MSELoss(), False),
        (Own(), Own(), False),  # nothing is known of such a module
        (functools.partial(functional.cross_entropy, reduction="sum"), functional.cross_entropy, False),
        (*(functools.partial(functional.cross_entropy, reduction="sum") for _ in range(2)), True),
        (made({"a": [1, (2,)]}), made({"a": [1, (2,)]}), True),
        (made({"a": [1, (2,)]}), made({"a": [1, (3,)]}), False),
        (made(object()), made(object()), False),
    ],
)
def test_only_what_is_provably_the_same_loss_counts_as_such(first, second, same):
    assert is_same_loss(first, first)
    assert is_same_loss(first, second) is same
