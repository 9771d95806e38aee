"""Tables and bags of rows, for any model's tokens."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import SIZES, check, made
from torch import nn

import hocket


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"max_norm": 0.5}], ids=str
)
def test_embedding(num_models, shared, options):
    models = made(lambda: nn.Embedding(6, 3, **options), num_models)
    tokens = torch.randint(0, 6, (4, 5) if shared else (num_models, 4, 5))
    check(models, tokens, shared=shared, strict=True)


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("shared", [False, True])
def test_embedding_bag(mode, shared, num_models):
    models = made(lambda: nn.EmbeddingBag(6, 3, mode=mode), num_models)
    tokens = torch.randint(0, 6, (4, 5) if shared else (num_models, 4, 5))
    check(models, tokens, shared=shared, strict=True)


class Bags(nn.Module):
    """Bags of other lengths, given by where they begin, or with weights."""

    def __init__(self, weighted: bool, **options) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(6, 3, **options)
        self.weighted = weighted

    def forward(self, tokens):
        if self.weighted:
            return self.bag(tokens, per_sample_weights=self.bag.weight[tokens, 0])
        return self.bag(tokens.flatten(), torch.tensor([0, 2, 7]))


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("weighted", "options"),
    [
        (True, {"mode": "sum"}),
        (True, {"mode": "sum", "scale_grad_by_freq": True}),
        (False, {}),
        (False, {"mode": "max"}),
        (False, {"padding_idx": 1}),
    ],
    ids=str,
)
def test_bags_that_are_uneven_or_weighted(weighted, options, shared):
    tokens = torch.randint(0, 6, (4, 5) if shared else (3, 4, 5))
    check(made(lambda: Bags(weighted, **options), 3), tokens, shared=shared)


@pytest.mark.parametrize("backend", ["rule", "auto"])
def test_an_index_beyond_the_table_reads_no_neighbours_row(backend):
    array = hocket.fuse([nn.Embedding(4, 2), nn.Embedding(4, 2)], backend=backend)
    with pytest.raises(hocket.errors.InputError, match=r"embedding.*index out of range"):
        array(torch.tensor([[0, 4]]))
    array(torch.tensor([[0, 3]]))
    for _ in range(2):
        with pytest.raises(hocket.errors.InputError, match="indices from 0 to 3"):
            array(torch.tensor([[0, 4]]))
