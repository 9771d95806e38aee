"""Every kind of layer: planned steps are eager steps, bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from equivalence.compare import check_twins
from hocket.job import Job
from support.steps import update


def images(channels: int = 3, side: int = 6, count: int = 4) -> torch.Tensor:
    return torch.randn(count, channels, side, side)


def rows() -> torch.Tensor:
    return torch.randn(5, 6)


def tokens(vocab: int = 11) -> torch.Tensor:
    return torch.randint(0, vocab, (3, 5))


class Attention(nn.Module):
    """Self-attention by torch's own module, or by `scaled_dot_product_attention`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv = nn.Linear(8, 24)
        self.whole = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        if self.how == "module":
            return self.whole(x, x, x, need_weights=False)[0]
        if self.how == "module with weights":
            out, weights = self.whole(x, x, x)
            return out + weights.sum()
        q, k, v = (part.view(3, 5, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.randn(5, 5) if self.how == "mask" else None
        dropout = 0.2 if self.how == "dropout" else 0.0
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=self.how == "causal")
        return out.transpose(1, 2).reshape(3, 5, 8)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.inner = kind(8, 6, batch_first=True, **options)

    def forward(self, x):
        return self.inner(x)[0]


class Bag(nn.Module):
    """Three bags of words, of different sizes."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.inner = nn.EmbeddingBag(11, 6, mode=mode)

    def forward(self, x):
        return self.inner(x.flatten(), torch.tensor([0, 4, 9]))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))

    def forward(self, x):
        return self.weighted(self.new(x))


def mixed_modes() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[4].eval()
    return model


def words(*inner: nn.Module, **options) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8, **options), *inner)


LAYERS = {
    "conv": (lambda: nn.Conv2d(3, 4, 3), images),
    "conv without bias, strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), images),
    "conv in groups": (lambda: nn.Conv2d(4, 8, 3, groups=4, dilation=2), lambda: images(4)),
    "conv of three": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), images),
    "conv transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), images),
    "conv 1d": (lambda: nn.Conv1d(3, 4, 3), lambda: torch.randn(4, 3, 9)),
    "conv 3d": (lambda: nn.Conv3d(2, 3, 2), lambda: torch.randn(2, 2, 4, 4, 4)),
    "lazy conv": (lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()), images),
    "pooling": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)), images),
    "upsampling": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Upsample(scale_factor=2, mode="bilinear")), images),
    "pixel shuffle": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.PixelShuffle(2), nn.ReflectionPad2d(1)), images),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2), nn.Dropout(0.1)), rows),
    "feature dropout": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.AlphaDropout(0.2)), images),
    "random relu": (lambda: nn.Sequential(nn.Linear(6, 4), nn.RReLU()), rows),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3)), images),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), rows),
    "batch norm without statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), images),
    "batch norm in both modes": (mixed_modes, images),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), images),
    "layer norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), rows),
    "rms norm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.RMSNorm(8)), rows),
    "instance norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        images,
    ),
    "local response norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2)), images),
    "spectral and weight norm": (Spectral, rows),
    "activations": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.PReLU(), nn.SiLU(), nn.Hardswish(), nn.GLU(), nn.Mish()),
        rows,
    ),
    "in-place relu": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), rows),
    "bilinear twice": (lambda: Twice(nn.Bilinear(6, 6, 4)), rows),
    "embedding": (lambda: words(padding_idx=2), tokens),
    "embedding with a largest norm": (lambda: words(max_norm=1.0), tokens),
    "embedding scaled by frequency": (lambda: words(scale_grad_by_freq=True), tokens),
    "bag sum": (lambda: Bag("sum"), tokens),
    "bag mean": (lambda: Bag("mean"), tokens),
    "bag max": (lambda: Bag("max"), tokens),
    "lstm": (lambda: words(Recurrent(nn.LSTM)), tokens),
    "lstm, deep and both ways": (
        lambda: words(Recurrent(nn.LSTM, num_layers=2, dropout=0.2, bidirectional=True)),
        tokens,
    ),
    "lstm with projection": (lambda: words(Recurrent(nn.LSTM, proj_size=3)), tokens),
    "gru": (lambda: words(Recurrent(nn.GRU, num_layers=2)), tokens),
    "rnn": (lambda: words(Recurrent(nn.RNN)), tokens),
    "attention": (lambda: words(Attention("plain")), tokens),
    "causal attention": (lambda: words(Attention("causal")), tokens),
    "masked attention": (lambda: words(Attention("mask")), tokens),
    "attention with dropout": (lambda: words(Attention("dropout")), tokens),
    "attention module": (lambda: words(Attention("module")), tokens),
    "attention module with weights": (lambda: words(Attention("module with weights")), tokens),
    "encoder layer": (lambda: words(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), tokens),
}


class Twice(nn.Module):
    """A layer of two inputs, given the same one twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x)


def layer_job(make_model, make_batch) -> Job:
    model = make_model()
    batches = [make_batch() for _ in range(3)]
    model(batches[0])  # a lazy layer makes its parameters
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    def step(batch):
        return update(optimizer, model(batch).square().mean())

    return Job(step, model, optimizer, batches)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_steps_through_every_layer_are_those_of_eager(name):
    check_twins(lambda: layer_job(*LAYERS[name]))


@pytest.mark.parametrize(
    "name", ["conv of three", "conv in groups", "conv transposed", "conv without bias, strided", "conv 1d", "conv 3d"]
)
def test_a_split_backward_of_a_convolution_is_within_rounding(name):
    check_twins(lambda: layer_job(*LAYERS[name]), split=True, tolerance=1e-5)
