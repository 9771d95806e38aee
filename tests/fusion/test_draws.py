"""Random numbers: with seeds each model draws what it draws alone, without them no two models share a draw."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import assert_close, assert_each
from tests.fusion.prefer import prefer, ways
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hocket
from quick import covering

BACKENDS = ["rule", "vmap", "loop", "auto"]
FORWARDS = ["1 at a time", "1 at a time, channels last"]
WAYS = [*BACKENDS, *FORWARDS, *ways(images=True)]  # the last ones of losses
pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")


DRAWS = {
    "randint": lambda x: torch.randint(0, 1000, (4,)) * 1.0,
    "randint with a size": lambda x: torch.randint(0, 1000, (x.shape[0], 4)) * 1.0,
    "randint_like": lambda x: torch.randint_like(x, 0, 1000),
    "randperm": lambda x: torch.randperm(x.shape[0] + 6)[:4] * 1.0,
    "normal": lambda x: torch.normal(0.0, 1.0, (x.shape[0], 4)),
    "normal of tensors": lambda x: torch.normal(x, x.abs()),
    "empty": lambda x: torch.empty(x.shape[0], 4).normal_(),
    "new_empty": lambda x: x.new_empty(4).uniform_(),
    "randn of sizes": lambda x: torch.randn(x.shape[0], 1),
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": lambda x: torch.rand_like(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()) + torch.rand_like(x),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3)[:, :1] + torch.rand(x.shape[0], 1),
    "poisson": lambda x: torch.poisson(100 * x.abs()),
    "gumbel softmax": lambda x: F.gumbel_softmax(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "dropout": lambda x: F.dropout(x + 10, 0.5),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5),
    "exponential": lambda x: torch.zeros_like(x).exponential_(),
}


class Applied(nn.Module):
    """A layer, and a function of what it gives and of the input."""

    def __init__(self, layer, function) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x):
        return self.function(self.layer(x), x)


class Weighted(nn.MultiheadAttention):
    """Gives its weights, too."""

    def forward(self, x):
        return super().forward(x, x, x)


class Turned(nn.Sequential):
    """Turns what lies between its blocks."""

    def forward(self, x):
        return self[1](self[0](x).transpose(0, 1))


def dropping(kind):
    """A rate for each model."""
    return lambda index: nn.Sequential(kind((0.1, 0.5, 0.8)[index]), nn.PReLU(), kind((0.1, 0.5, 0.8)[index]))


def after(make, function):
    return lambda index: Applied(make(), lambda h, x: function(h))


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def conv() -> nn.Module:
    return nn.Conv2d(2, 3, 3)


def unlike(index: int) -> nn.Module:
    """Blocks of another shape in each model, which stay separate."""
    return Turned(linear(), nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 4 + index), nn.Linear(4 + index, 4)))


def partly(index: int) -> nn.Module:
    act = (nn.Tanh, nn.Sigmoid, nn.ReLU)[index]()
    return nn.Sequential(linear(), nn.Sequential(act, nn.Dropout(0.4)), nn.Dropout(0.3))


# Numbers are drawn in the order of memory, so values that do not lie as usual there are among what drops.
ROWS, IMAGES, SOME = (3, 5, 4), (3, 2, 6, 6), torch.tensor([0, 2])
# name -> (a model for each index, one model's input)
CASES = {
    "dropout": (dropping(nn.Dropout), (5, 6)),
    "dropout1d": (dropping(nn.Dropout1d), (3, 4, 5)),
    "dropout2d": (dropping(nn.Dropout2d), (3, 4, 5, 2)),
    "dropout3d": (dropping(nn.Dropout3d), (3, 4, 2, 2, 2)),
    "alpha_dropout": (dropping(nn.AlphaDropout), (5, 6)),
    "feature_alpha_dropout": (dropping(nn.FeatureAlphaDropout), (3, 4, 5)),
    "transposed": (after(linear, lambda h: F.dropout(h.transpose(0, 1), 0.3)), ROWS),
    "permuted": (after(linear, lambda h: F.alpha_dropout(h.permute(2, 0, 1), 0.3, True)), ROWS),
    "recurrent": (after(lambda: nn.LSTM(4, 3, 2, dropout=0.4), lambda h: F.dropout(h[0], 0.3)), ROWS),
    "batch first": (after(lambda: nn.GRU(4, 6, batch_first=True), lambda h: F.dropout(h[0], 0.3)), ROWS),
    "encoder": (lambda index: nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True), ROWS),
    "attention weights": (lambda index: Weighted(4, 2, dropout=0.5), ROWS),
    "images": (after(conv, lambda h: F.dropout(h.permute(0, 2, 3, 1), 0.3)), IMAGES),
    "nets": (lambda index: nn.Sequential(conv(), nn.Dropout(0.5), nn.Conv2d(3, 2, 2), nn.Dropout2d(0.5)), IMAGES),
    "indices": (after(conv, lambda h: torch.rand_like(h[:, SOME, :, SOME]) * h.sum()), IMAGES),
    "in place": (after(conv, lambda h: h[:, SOME, :, SOME].detach().normal_() * h.sum()), IMAGES),
    "separate": (partly, (5, 4)),
    "separate, transposed": (unlike, ROWS),
}
CASES |= {
    name: (lambda index, draw=draw: Applied(linear(), lambda h, x: (h, draw(x))), (5, 4))
    for name, draw in DRAWS.items()
    if name not in CASES
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_with_seeds_each_model_draws_what_it_draws_alone(name, way, monkeypatch):
    prefer(monkeypatch, way, way)
    make, shape = CASES[name]
    models, seeds, shared = [make(index).double() for index in range(3)], (11, 12, 13), len(name + way) % 2 == 0
    array = hocket.fuse(models, backend=way if way in BACKENDS else "auto", seeds=seeds, shared=shared)
    x = torch.randn(shape if shared else (3, *shape)).double()
    usual = torch.get_rng_state()

    def squared(out):
        return sum(leaf.double().square().sum() for leaf in pytree.tree_leaves(out))

    by_losses = way not in (*BACKENDS, *FORWARDS)
    outs = [[array.losses(squared, x)] if by_losses else pytree.tree_leaves(array(x)) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), usual), "models with seeds leave torch's generator alone"
    for index, (model, seed) in enumerate(zip(models, seeds, strict=True)):
        torch.manual_seed(seed)
        for number, out in enumerate(outs):
            own = model(x if shared else x[index])
            for fused, plain in zip(out, [squared(own)] if by_losses else pytree.tree_leaves(own), strict=True):
                assert_close(fused[index], plain, f"model {index}, pass {number}")


def test_recurrent_layers_in_evaluation_drop_nothing():
    models = [nn.LSTM(4, 3, num_layers=2, dropout=0.4).double().eval() for _ in range(2)]
    x = torch.randn(5, 2, 4).double()
    out, _ = hocket.fuse(models, backend="rule", strict=True, shared=True)(x)
    assert_each(out, [model(x)[0] for model in models])


@pytest.mark.parametrize(("name", "backend"), covering(DRAWS, BACKENDS))
def test_without_seeds_no_two_models_share_a_draw(name, backend):
    models = [Applied(linear().double(), lambda h, x: (h, DRAWS[name](x))) for _ in range(3)]
    array = hocket.fuse(models, backend=backend, shared=True)
    x = torch.randn(5, 4).double()
    _, first = array(x)
    for _ in range(2):
        _, second = array(x)
    for a, b in ((first[0], first[1]), (first[1], first[2]), (first[0], second[0])):
        assert not torch.equal(a, b)


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
