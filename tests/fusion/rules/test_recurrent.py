"""Recurrent layers and cells, with a first state and without one."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import SIZES, assert_each, check, made
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

import hocket
from fusion.rules.layers import BY_RULE

RECURRENT = {
    "lstm": lambda: nn.LSTM(4, 3),
    "lstm, deep": lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True),
    "lstm, both ways": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, bias=False),
    "lstm, projected": lambda: nn.LSTM(4, 5, proj_size=2, num_layers=2),
    "lstm, projected both ways": lambda: nn.LSTM(4, 5, proj_size=2, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(4, 3, batch_first=True),
    "gru, without bias": lambda: nn.GRU(4, 3, num_layers=3, bias=False),
    "gru, both ways": lambda: nn.GRU(4, 3, num_layers=2, bidirectional=True),
    "rnn": lambda: nn.RNN(4, 3),
    "rnn, relu": lambda: nn.RNN(4, 3, nonlinearity="relu", num_layers=2),
}


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name, num_models, shared):
    x = torch.randn((6, 5, 4) if shared else (num_models, 6, 5, 4)).double()
    check(made(RECURRENT[name], num_models), x, shared=shared, strict=True, expect=BY_RULE)


class Started(nn.Module):
    """A recurrent layer that is given its first state."""

    def __init__(self, layer, pair: bool) -> None:
        super().__init__()
        self.layer, self.pair = layer, pair

    def forward(self, x, h, c):
        return self.layer(x, (h, c) if self.pair else h)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_with_a_first_state(kind):
    models = made(lambda: Started(kind(4, 3), kind is nn.LSTM), 2)
    x, h, c = (torch.randn(2, *shape).double() for shape in ((6, 5, 4), (1, 5, 3), (1, 5, 3)))
    check(models, x, h, c, shared=False, strict=True)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell):
    check(made(lambda: cell(4, 3), 3), torch.randn(3, 5, 4).double(), shared=False, strict=True, expect=BY_RULE)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_batches_and_sequences_of_any_length_have_one_program(kind):
    array = hocket.fuse(made(lambda: kind(4, 3, batch_first=True), 2), shared=True)
    for batch, length in ((5, 6), (2, 6), (5, 9)):
        array(torch.randn(batch, length, 4).double())
    assert len(array._calls.programs.made()) == 1


class Packed(nn.Module):
    """A recurrent layer over sequences of several lengths."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        out, last = self.layer(pack_padded_sequence(x, lengths, enforce_sorted=False))
        return pad_packed_sequence(out)[0], last


@pytest.mark.filterwarnings("ignore:hocket.fuse. (the model itself|layer)")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences_of_any_lengths(kind):
    models = made(lambda: Packed(kind(4, 3, num_layers=2, bidirectional=True)), 2)
    array = hocket.fuse(models, shared=True)
    for lengths in ([3, 6, 1], [6, 6, 2], [1, 4, 6]):
        x = torch.randn(6, 3, 4).double()
        outs = [pytree.tree_leaves(model(x, torch.tensor(lengths))) for model in models]
        for found, *own in zip(pytree.tree_leaves(array(x, torch.tensor(lengths))), *outs, strict=True):
            assert_each(found, own)
    assert len(array._calls.programs.made()) == 1
