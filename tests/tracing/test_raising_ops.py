"""Ops that may raise for their values do raise, and those of a usual network are not among them."""

import pytest
import torch
from torch.nn import functional as F

from hocket.tracing.raising import may_raise

BEYOND = torch.tensor([0, 9])
ROWS = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        ("nll_loss_forward", lambda: F.nll_loss(ROWS, BEYOND)),
        ("multi_margin_loss", lambda: F.multi_margin_loss(ROWS, BEYOND)),
        ("binary_cross_entropy", lambda: F.binary_cross_entropy(2 * ROWS, ROWS)),
        ("embedding", lambda: F.embedding(BEYOND, ROWS)),
        ("one_hot", lambda: F.one_hot(BEYOND, 3)),
        ("index", lambda: ROWS[BEYOND]),
        ("index_put_", lambda: ROWS.clone().index_put_((BEYOND,), torch.ones(()))),
        ("index_select", lambda: ROWS.index_select(0, BEYOND)),
        ("index_add_", lambda: ROWS.clone().index_add_(0, BEYOND, ROWS)),
        ("gather", lambda: ROWS.gather(0, BEYOND[None])),
        ("scatter_", lambda: ROWS.clone().scatter_(0, BEYOND[None], 1.0)),
        ("take", lambda: ROWS.take(BEYOND)),
        ("bincount", lambda: torch.bincount(-BEYOND)),
        ("bernoulli", lambda: torch.bernoulli(2 * ROWS)),
        ("multinomial", lambda: torch.multinomial(-ROWS, 1)),
        ("linalg_cholesky", lambda: torch.linalg.cholesky(-torch.eye(2))),
        ("linalg_inv", lambda: torch.linalg.inv(torch.zeros(2, 2))),
    ],
)
def test_it_raises_for_what_is_in_its_tensors(kernel, call):
    with pytest.raises((RuntimeError, IndexError)):
        call()
    assert may_raise(kernel)


@pytest.mark.parametrize(
    "kernel",
    ["addmm", "convolution", "native_batch_norm", "relu_", "nll_loss_backward", "mul_", "addcdiv_", "native_dropout"],
)
def test_what_only_depends_on_shapes_is_free(kernel):
    assert not may_raise(kernel)
