"""The generated data: shapes, ranges, and that there is something in them to learn."""

import math

import pytest
import torch

from hocket.zoo import data
from hocket.zoo.base import Request


def request_for(batch_size: int = 4, num_batches: int = 3, seed: int = 0) -> Request:
    return Request("test", batch_size, num_batches, seed, torch.device("cpu"), lambda parameters: None, {})


def test_images_have_a_pattern_for_each_label():
    batches = data.images(request_for(batch_size=64), channels=3, side=12)
    assert [tuple(inputs.shape) for inputs, _ in batches] == [(64, 3, 12, 12)] * 3
    assert {inputs.dtype for inputs, _ in batches} == {torch.float32}
    (first, labels), (second, other_labels), _ = batches
    means = torch.stack([first[labels == label].mean(0) for label in range(data.NUM_LABELS)])
    nearest = torch.cdist(second.flatten(1), means.flatten(1)).argmin(1)
    assert torch.equal(nearest, other_labels)


def test_vectors_have_a_centre_for_each_label():
    inputs, labels = data.vectors(request_for(batch_size=200), width=32)[0]
    assert inputs.shape == (200, 32)
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) == set(range(data.NUM_LABELS))
    within = inputs[labels == 0].std(0).mean().item()
    assert within == pytest.approx(data.NOISE, rel=0.2)


def test_tokens_predict_the_next_token_and_windows_follow_each_other():
    batches = data.tokens(request_for(), vocab=50, steps=7)
    assert len(batches) == 3
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (4, 7)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.min() >= 0
        assert tokens.max() < 50
    assert torch.equal(batches[0][1][:, -1], batches[1][0][:, 0])


def test_a_token_has_few_successors():
    successors: dict[int, set[int]] = {}
    for tokens, targets in data.tokens(request_for(batch_size=16, num_batches=20), vocab=30, steps=10):
        for token, target in zip(tokens.flatten().tolist(), targets.flatten().tolist(), strict=True):
            successors.setdefault(token, set()).add(target)
    assert max(map(len, successors.values())) <= data.SUCCESSORS
    assert math.log(data.SUCCESSORS) < math.log(30)


def test_data_depend_on_the_seed_alone():
    torch.manual_seed(1)
    first = data.images(request_for(seed=3), channels=1, side=8)
    torch.manual_seed(2)
    second = data.images(request_for(seed=3), channels=1, side=8)
    other = data.images(request_for(seed=4), channels=1, side=8)
    assert torch.equal(first[2][0], second[2][0])
    assert not torch.equal(first[2][0], other[2][0])
