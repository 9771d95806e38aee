"""Dropout: with seeds, every model draws what the plain model draws; without, rates are per model all the same."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import assert_close
from tests.fusion.prefer import prefer
from torch import nn
from torch.nn import functional as F

import hocket

KINDS = {
    "dropout": (nn.Dropout, (5, 6)),
    "dropout1d": (nn.Dropout1d, (3, 4, 5)),
    "dropout2d": (nn.Dropout2d, (3, 4, 5, 2)),
    "dropout3d": (nn.Dropout3d, (3, 4, 2, 2, 2)),
    "alpha_dropout": (nn.AlphaDropout, (5, 6)),
    "feature_alpha_dropout": (nn.FeatureAlphaDropout, (3, 4, 5)),
}


@pytest.mark.parametrize("backend", ["rule", "loop", "auto"])
@pytest.mark.parametrize("name", KINDS)
def test_with_seeds_each_model_draws_what_the_plain_one_draws(name, backend):
    kind, shape = KINDS[name]
    rates, seeds = (0.1, 0.5, 0.8), (11, 12, 13)
    models = [nn.Sequential(kind(rate), nn.Tanh(), kind(rate)).double() for rate in rates]
    array = hocket.fuse(models, backend=backend, seeds=seeds, shared=False)
    x = torch.randn(3, *shape).double()
    usual = torch.get_rng_state()
    outs = [array(x), array(x), array(x)]
    assert torch.equal(torch.get_rng_state(), usual), "models with seeds leave torch's generator alone"
    for index, (model, seed) in enumerate(zip(models, seeds, strict=True)):
        torch.manual_seed(seed)
        for number, out in enumerate(outs):
            assert_close(out[index], model(x[index]), f"model {index}, pass {number}")


def test_dropout_of_a_function_and_of_recurrent_layers_with_seeds():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.4)

        def forward(self, x):
            return nn.functional.dropout(self.lstm(x)[0], 0.3, self.training)

    models = [Net().double() for _ in range(2)]
    array = hocket.fuse(models, backend="rule", seeds=[1, 2], strict=True)
    x = torch.randn(5, 2, 4).double()
    out = array(x)
    for index, model in enumerate(models):
        torch.manual_seed(index + 1)
        assert_close(out[index], model(x), f"model {index}")
    array.eval()
    for index, model in enumerate(models):
        assert_close(array(x)[index], model.eval()(x), f"model {index}, eval")


class Transposed(nn.Module):
    """Draws of values that do not lie as usual in memory: numbers are drawn in the order of memory."""

    def __init__(self, kind, function):
        super().__init__()
        self.layer, self.function = kind(), function

    def forward(self, x):
        return self.function(self.layer(x))


class Unlike(nn.Sequential):
    """Blocks of other shapes in each model, which stay separate."""

    def forward(self, x):
        return self[1](self[0](x).transpose(0, 1))


ROWS, IMAGES, SOME = (3, 5, 4), (3, 2, 6, 6), torch.tensor([0, 2])
TRANSPOSED = {
    "dropout": (lambda: nn.Linear(4, 4), ROWS, lambda h: F.dropout(h.transpose(0, 1), 0.3)),
    "alpha_dropout": (lambda: nn.Linear(4, 4), ROWS, lambda h: F.alpha_dropout(h.permute(2, 0, 1), 0.3, True)),
    "batch first": (lambda: nn.GRU(4, 6, batch_first=True), ROWS, lambda out: F.dropout(out[0], 0.3)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True), ROWS, lambda h: h),
    "images": (lambda: nn.Conv2d(2, 3, 3), IMAGES, lambda h: F.dropout(h.permute(0, 2, 3, 1), 0.3)),
    "indices": (lambda: nn.Conv2d(2, 3, 3), IMAGES, lambda h: torch.rand_like(h[:, SOME, :, SOME]) * h.sum()),
    "in place": (lambda: nn.Conv2d(2, 3, 3), IMAGES, lambda h: h[:, SOME, :, SOME].detach().normal_() * h.sum()),
    "bernoulli": (lambda: nn.Linear(4, 4), ROWS, lambda h: torch.bernoulli(h.sigmoid().transpose(1, 2))),
}


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("way", ["rule", "loop", "auto", "1 at a time, channels last"])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_values_that_lie_transposed_drop_with_seeds_as_alone(name, way, monkeypatch):
    prefer(monkeypatch, forward=way)
    kind, shape, function = TRANSPOSED[name]
    models = [Transposed(kind, function).double() for _ in range(2)]
    array = hocket.fuse(models, backend=way if way in ("rule", "loop") else "auto", seeds=[3, 4], shared=True)
    x = torch.randn(shape).double()
    outs = [array(x) for _ in range(3)]
    for index, model in enumerate(models):
        torch.manual_seed(index + 3)
        for number, out in enumerate(outs):
            assert_close(out[index], model(x), f"model {index}, pass {number}")


def test_separate_blocks_drop_what_lies_transposed_as_alone():
    def block(width):
        return nn.Sequential(nn.Dropout(0.3), nn.Linear(4, width), nn.Linear(width, 4))

    models = [Unlike(nn.Linear(4, 4), block(width)).double() for width in (4, 5)]
    array = hocket.fuse(models, seeds=[3, 4], shared=True)
    x = torch.randn(ROWS).double()
    outs = [array(x) for _ in range(3)]
    for index, model in enumerate(models):
        torch.manual_seed(index + 3)
        for number, out in enumerate(outs):
            assert_close(out[index], model(x), f"model {index}, pass {number}")


def test_attention_weights_drop_with_seeds():
    models = [nn.MultiheadAttention(8, 2, dropout=0.5).double() for _ in range(2)]
    array = hocket.fuse(models, backend="rule", seeds=[3, 4], strict=True)
    x = torch.randn(5, 2, 8).double()
    out, weights = array(x, x, x)
    for index, model in enumerate(models):
        torch.manual_seed(index + 3)
        expected, expected_weights = model(x, x, x)
        assert_close(out[index], expected, f"model {index}")
        assert_close(weights[index], expected_weights, f"weights of model {index}")


def test_without_seeds_every_model_has_its_own_rate_and_its_own_draw():
    array = hocket.fuse([nn.Dropout(rate) for rate in (0.0, 0.25, 0.75, 1.0)], backend="rule")
    torch.manual_seed(0)
    out = array(torch.ones(100, 100))
    shares = (out == 0).double().mean((1, 2)).tolist()
    assert shares[0] == 0.0
    assert shares[3] == 1.0
    assert abs(shares[1] - 0.25) < 0.03
    assert abs(shares[2] - 0.75) < 0.03
    assert torch.allclose(out[1].max(), torch.tensor(4 / 3))
    same = hocket.fuse([nn.Dropout(0.5), nn.Dropout(0.5)], backend="rule")(torch.ones(100, 100))
    assert not torch.equal(same[0], same[1])


def test_noise_in_a_forward_is_each_models_own():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) + torch.rand(x.shape)

    out = hocket.fuse([Noisy(), Noisy()], backend="rule")(torch.zeros(4, 3))
    assert not torch.equal(out[0], out[1])
