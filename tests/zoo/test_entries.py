"""Every entry, at a tiny size: it builds, trains, and is the same again from the same seed."""

import math
import socket

import pytest
import torch
from torch.utils import _pytree as pytree

from hocket import zoo
from tiny_sizes import TINY_SIZES

TINY = TINY_SIZES | {"resnet20": {"image_size": 16}}  # its training has to gain something in a few steps
TRAINS_QUICKLY = ["lenet", "mlp", "lstm-cells", "lstm-lm", "transformer", "bert-tiny", "resnet20"]


def load(name: str, **changes):
    return zoo.load(name, **({"batch_size": 2, "num_batches": 2} | TINY[name] | changes))


def snapshot(job) -> list[torch.Tensor]:
    tensors = [tensor for model in job.models for tensor in (*model.parameters(), *model.buffers())]
    return [tensor.detach().clone() for tensor in tensors]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


HUGE = {"resnet101", "resnet152", "resnet101-v2", "vgg11", "vgg16", "vgg19", "inception-v3"}
LARGE = HUGE | {"resnet34", "resnet50", "resnet50-v2", "inception-v2", "caffenet"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in TINY])
def test_builds_trains_and_repeats(name, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the zoo must not reach for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    torch.manual_seed(11)
    rng = torch.get_rng_state()
    job = load(name, seed=3)
    assert torch.equal(torch.get_rng_state(), rng), "the caller's random numbers must go on undisturbed"
    assert job.name == name
    assert all(model.training for model in job.models)
    assert all(len(leaf) == 2 for leaf in pytree.tree_leaves(list(job.batches)))
    initial = snapshot(job)

    losses = [job.step(job.batch(index)) for index in range(2)]
    assert all(loss.ndim == 0 and math.isfinite(loss.item()) for loss in losses)
    torch.manual_seed(12)
    again = load(name, seed=3)
    assert same(snapshot(again), initial)
    changed = [
        not torch.equal(after, before)
        for trained, fresh in zip(job.models, again.models, strict=True)
        for after, before in zip(trained.parameters(), fresh.parameters(), strict=True)
    ]
    assert sum(changed) > 0.9 * len(changed), "a step must reach nearly every parameter"
    assert same(pytree.tree_leaves(list(again.batches)), pytree.tree_leaves(list(job.batches)))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in sorted(TINY.keys() - HUGE)]
)
def test_everything_goes_to_the_device_asked_for(name):
    job = load(name, device="meta")
    leaves = [*snapshot(job), *pytree.tree_leaves(list(job.batches))]
    assert {leaf.device.type for leaf in leaves} == {"meta"}
    assert job.step(job.batch(0)).device.type == "meta"


@pytest.mark.parametrize("name", TRAINS_QUICKLY)
def test_loss_falls(name):
    torch.manual_seed(0)
    job = load(name, batch_size=8)
    losses = [job.step(job.batch(index)).item() for index in range(40)]
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])


def test_loss_falls_on_real_digits():
    job = zoo.load("digits-cnn")
    first, second = ([job.step(batch).item() for batch in job.batches] for _ in range(2))
    assert len(first) == 28
    assert sum(first) / 28 > 2 * sum(second) / 28
    assert sum(second[-5:]) / 5 < 0.4
    inputs = torch.cat([pictures for pictures, _ in job.batches])
    labels = torch.cat([digits for _, digits in job.batches])
    assert (job.model(inputs).argmax(1) == labels).float().mean() > 0.9


def test_digits_are_all_shown_before_any_is_shown_again():
    job = zoo.load("digits-cnn", batch_size=599, num_batches=6)
    assert [len(labels) for _, labels in job.batches] == [599] * 6
    pictures = [pictures.sum((1, 2, 3)).sort().values for pictures, _ in job.batches]
    assert torch.equal(torch.cat(pictures[:3]).sort().values, torch.cat(pictures[3:]).sort().values)


def test_dcgan_has_two_models_and_two_optimizers_with_the_papers_betas():
    job = load("dcgan")
    generator, discriminator = job.models
    assert len(job.optimizers) == 2
    for model, optimizer in zip(job.models, job.optimizers, strict=True):
        assert optimizer.param_groups[0]["betas"] == (0.5, 0.999)
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    images = generator(torch.randn(3, 100, 1, 1))
    assert images.shape == (3, 3, 16, 16)
    assert discriminator(images).shape == (3,)
    assert job.batch(0).abs().max() <= 1


def test_dcgan_at_its_default_size_is_the_published_one():
    generator, discriminator = zoo.load("dcgan", device="meta", batch_size=1, num_batches=1).models
    assert [m.out_channels for m in generator if hasattr(m, "out_channels")] == [512, 256, 128, 64, 3]
    assert [m.out_channels for m in discriminator if hasattr(m, "out_channels")] == [64, 128, 256, 512, 1]


def test_transformer_ties_its_embedding_and_hides_the_future():
    job = load("transformer")
    assert job.model.projection.weight is job.model.embedding.weight
    tokens = job.batch(0)[0]
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 12
    job.model.eval()
    first, second = job.model(tokens), job.model(changed)
    torch.testing.assert_close(first[:, :-1], second[:, :-1])
    assert not torch.allclose(first[:, -1], second[:, -1])


def test_bert_is_scored_on_masked_tokens_alone():
    batch = load("bert-tiny", batch_size=16).batch(0)
    is_masked = batch["input_ids"] == 11
    assert torch.equal(is_masked, batch["labels"] != -100)
    assert is_masked.any(1).all()


def test_lstm_clips_its_gradients():
    job = load("lstm-lm", width=64)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.mul_(50)
    job.step(job.batch(0))
    norm = torch.stack([parameter.grad.norm() for parameter in job.model.parameters()]).norm()
    assert norm <= 5.001


def test_steps_repeat_bit_for_bit():
    def train():
        torch.manual_seed(4)
        job = load("transformer")
        for index in range(3):
            job.step(job.batch(index))
        return snapshot(job)

    assert same(train(), train())
