"""Planned steps equal eager steps wherever a step keeps its state and in whatever form it gets its data."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equivalence.compare import check_twins
from equivalence.test_steps import mlp, mse, pairs, simple
from hocket.errors import CaptureError
from hocket.job import Job
from support.steps import update


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x))


def test_one_parameter_under_two_names():
    def loss_of(model, batch):
        return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())

    check_twins(lambda: simple(loss_of, Tied(), [torch.randint(0, 9, (2, 4)) for _ in range(3)]))


def test_parameters_that_share_one_storage():
    def make():
        model = mlp()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        at = 0
        for p in model.parameters():
            p.data = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        return simple(mse, model)

    check_twins(make)


def test_a_parameter_of_no_module_is_trained_too():
    def make():
        model, temperature = mlp(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.Adam([*model.parameters(), temperature], lr=1e-2)

        def step(batch):
            return update(optimizer, F.mse_loss(model(batch[0]) * temperature, batch[1]))

        return Job(step, model, optimizer, pairs())

    check_twins(make)


def test_an_optimizer_without_any_module():
    def make():
        image = nn.Parameter(torch.zeros(4, 3))
        optimizer = torch.optim.Adam([image], lr=0.1)

        def step(batch):
            return update(optimizer, F.mse_loss(image, batch[1]))

        return Job(step, nn.Identity(), optimizer, pairs())

    check_twins(make)


class Counting(nn.Module):
    """Buffers: one written in place, one exchanged in every step, one that is not saved."""

    def __init__(self, exchanged: bool) -> None:
        super().__init__()
        self.inner = mlp()
        self.exchanged = exchanged
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        out = self.inner(x)
        if self.exchanged:
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
            self.count = self.count + 1
        else:
            self.mean.lerp_(out.detach().mean(0), 0.1)
            self.count += 1
        return out - self.mean


@pytest.mark.parametrize("exchanged", [False, True])
def test_buffers_written_in_place_or_exchanged_for_others(exchanged):
    check_twins(lambda: simple(mse, Counting(exchanged)))


def test_frozen_parameters_stay_as_they_are():
    def make():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
        model[0].requires_grad_(False)
        model[1].requires_grad_(False).eval()
        return simple(mse, model, [(torch.randn(4, 3, 6, 6), torch.randn(4, 3)) for _ in range(3)])

    captured = check_twins(make)
    assert not any(op.role == "weight_grad" and op.layer in ("0", "1") for op in captured.graph.ops)


def test_images_with_the_channels_last():
    def make():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
        model = model.to(memory_format=torch.channels_last)
        batches = [torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last) for _ in range(3)]
        return simple(lambda model, batch: model(batch).square().mean(), model, batches)

    check_twins(make)


def test_a_batch_that_the_step_writes_into():
    def loss_of(model, batch):
        batch[0].mul_(2).clamp_(-1, 1)
        return mse(model, batch)

    check_twins(lambda: simple(loss_of))


def test_one_tensor_twice_in_a_batch_stands_only_for_batches_like_it():
    def make():
        same = torch.randn(4, 3)
        batches = [(same, same), (same, same), (torch.randn(4, 3), torch.randn(4, 3)), (same, same)]
        return simple(mse, nn.Linear(3, 3), batches)

    check_twins(make, captures=6)


def test_tensors_that_are_reshaped_in_place_are_viewed_after_that():
    def loss_of(model, batch):
        out = model(batch[0]) * 1.0
        before = out.view(-1)
        out.unsqueeze_(1)
        after = out.expand(-1, 2, -1)
        inputs = batch[0].clone().t_()
        return (after - batch[1].unsqueeze(1)).square().mean() + before.sum() * inputs.reshape(-1).sum()

    check_twins(lambda: simple(loss_of))


def test_per_sample_gradients_by_vmap():
    def loss_of(model, batch):
        parameters = dict(model.named_parameters())

        def one(parameters, x, y):
            return F.mse_loss(torch.func.functional_call(model, parameters, x[None]), y[None])

        slopes = torch.func.vmap(torch.func.grad(one), (None, 0, 0))(parameters, *batch)
        return mse(model, batch) + sum(slope.square().sum() for slope in slopes.values())

    check_twins(lambda: simple(loss_of))


LENGTHS = [(4, 2, 3), (4, 2, 3), (3, 3, 3), (1, 4, 4), (4, 2, 3)]


def test_lengths_of_texts_are_followed():
    def loss_of(model, batch):
        inputs, targets, lengths = batch
        return F.ctc_loss(model(inputs).log_softmax(-1), targets, lengths, torch.tensor([2, 2, 1]))

    batches = [(torch.randn(4, 3, 6), torch.randint(1, 3, (3, 2)), torch.tensor(n)) for n in LENGTHS]
    check_twins(lambda: simple(loss_of, batches=batches), captures=4)


def test_packed_sequences_are_recorded_for_each_lengths():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.GRU(6, 3, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=4)[0]

    batches = [(torch.randn(3, 4, 6), torch.tensor(n)) for n in LENGTHS]
    check_twins(lambda: simple(lambda model, batch: model(*batch).square().mean(), Packed(), batches), captures=4)


def test_sparse_gradients_are_refused():
    def make():
        model = nn.Embedding(9, 4, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        batches = [torch.randint(0, 9, (5,)) for _ in range(3)]
        return simple(lambda model, batch: model(batch).square().mean(), model, batches, optimizer=optimizer)

    with pytest.raises(CaptureError, match="sparse"):
        check_twins(make)
