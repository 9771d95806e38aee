"""A net of every kind of entry that a file of weights has, and what is left of loading it."""

import threading

import torch
import torch.nn.functional as F

from hocket.loading import finish
from loading.files import PATIENCE_S


class Net(torch.nn.Module):
    """Conv, batch norm, an embedding that is tied to the head, and a layer whose weight another one uses."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.head = torch.nn.Linear(8, 11, bias=False)
        self.words = torch.nn.Embedding(11, 8)
        self.head.weight = self.words.weight
        self.conv = torch.nn.Conv1d(8, 8, 1)
        self.norm = torch.nn.BatchNorm1d(8)
        self.other = torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.register_buffer("shift", torch.rand(8))
        self.register_buffer("mask", torch.ones(8), persistent=False)
        self.register_buffer("none", None)
        self.empty = torch.nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens):
        x = self.norm(self.conv(self.words(tokens).transpose(1, 2))).transpose(1, 2)
        x = F.linear(x, self.other.weight) * self.scale + self.shift * self.mask
        return self.head(x) + self.empty.sum()


TOKENS = torch.arange(6).reshape(2, 3)


def output(model, training=False):
    torch.manual_seed(1)
    return model.train(training)(TOKENS)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hocket weights"]


def nothing_remains(model):
    finish(model)
    for thread in threads():
        thread.join(PATIENCE_S)  # the last tensor is there a moment before the thread has ended
    assert threads() == []
    assert {type(tensor) for tensor in (*model.parameters(), *model.buffers())} <= {torch.nn.Parameter, torch.Tensor}
    assert not any("_hocket_hold" in vars(tensor) for tensor in (*model.parameters(), *model.buffers()))
    assert not any(module._forward_pre_hooks for module in model.modules())
