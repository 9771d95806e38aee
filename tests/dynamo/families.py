"""Small programs by families: one line gives one program; see `dynamo.programs`."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dynamo.programs import Batch, Function, Maker, Twice, images, matrix, sequence

_UNARY = """abs acos acosh angle asinh atan ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 floor frac
lgamma log log10 log1p log2 logit neg positive rad2deg reciprocal relu round rsqrt sigmoid sign signbit sin sinc sinh
sqrt square tan tanh trunc isnan isfinite logical_not"""
_ACTIVATIONS = """celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu silu
softplus softshrink softsign tanhshrink"""
_BINARY = """add atan2 copysign div eq fmax fmin fmod ge gt hypot le logaddexp logical_and lt maximum minimum mul ne
pow remainder sub xlogy"""
_REDUCTIONS = "amax amin argmax argmin logsumexp mean nansum prod std sum var any all count_nonzero"
_SHAPED: dict[str, Callable[[Any], Any]] = {
    "softmin": lambda y: F.softmin(y, dim=1),
    "flip": lambda y: y.flip(0, 1),
    "roll": lambda y: y.roll((1, 2), (0, 1)),
    "rot90": lambda y: torch.rot90(y),
    "tril": lambda y: y.tril(-1) + y.triu(1),
    "diag": lambda y: y.diag().diag(),
    "diagonal": lambda y: y.diagonal(1).sum() * y,
    "trace": lambda y: y.trace() * y,
    "cumprod": lambda y: y.cumprod(1),
    "cummax": lambda y: y.cummax(0).values,
    "logcumsumexp": lambda y: y.logcumsumexp(1),
    "diff": lambda y: y.diff(dim=1),
    "narrow": lambda y: y.narrow(1, 1, 2) * 2,
    "select": lambda y: y.select(0, 2) * y,
    "movedim": lambda y: y.view(2, 2, 4).movedim(0, 2) * 2,
    "unfold": lambda y: y.unfold(1, 2, 1).sum(-1),
    "unsqueeze": lambda y: y.unsqueeze(1).squeeze() * y,
    "swapaxes": lambda y: y.swapaxes(0, 1) @ y,
    "kron": lambda y: torch.kron(y[:2, :2], y),
    "outer": lambda y: torch.outer(y[0], y[1]),
    "cross": lambda y: torch.linalg.cross(y[:, :3], y[:, 1:]),
    "cdist": lambda y: torch.cdist(y, y + 1),
    "det": lambda y: torch.linalg.det(y) * y,
    "solve": lambda y: torch.linalg.solve(y @ y.t() + 9 * torch.eye(4), y),
    "cholesky": lambda y: torch.linalg.cholesky(y @ y.t() + 9 * torch.eye(4)),
    "matrix_norm": lambda y: torch.linalg.matrix_norm(y) * y,
    "vector_norm": lambda y: torch.linalg.vector_norm(y, 3.0, 1),
    "normalize": lambda y: F.normalize(y, dim=1),
    "cosine": lambda y: F.cosine_similarity(y, y.flip(1)),
    "pad": lambda y: F.pad(y, (1, 2), value=3.0),
    "pad_reflect": lambda y: F.pad(y[None], (1, 2), mode="reflect"),
    "clamp": lambda y: y.clamp(-1, 1) + y.clamp(min=0.1),
    "lerp": lambda y: torch.lerp(y, y.exp(), 0.3),
    "addcmul": lambda y: torch.addcmul(y, y, y.t(), value=0.1),
    "addcdiv": lambda y: torch.addcdiv(y, y, y.exp() + 1, value=0.1),
    "addmm": lambda y: torch.addmm(y, y, y, beta=0.5, alpha=2),
    "baddbmm": lambda y: torch.baddbmm(y[None], y[None], y[None]),
    "mv": lambda y: torch.mv(y, y[0]) + torch.dot(y[0], y[1]),
    "tensordot": lambda y: torch.tensordot(y, y, ([0], [1])),
    "take": lambda y: y.take(torch.tensor([0, 5, 5])) * 2,
    "index_select": lambda y: y.index_select(1, torch.tensor([3, 0])) * 2,
    "index_add": lambda y: y.index_add(0, torch.tensor([1, 1]), y[:2]),
    "index_copy": lambda y: y.index_copy(0, torch.tensor([2, 0]), y[:2] * 3),
    "index_fill": lambda y: y.index_fill(1, torch.tensor([1]), 2.0) * y,
    "masked": lambda y: y.masked_scatter(y > 0, y.flip(0)),
    "scatter_reduce": lambda y: y.scatter_reduce(0, torch.zeros(1, 4).long(), y[:1], "amax"),
    "repeat_interleave": lambda y: y.repeat_interleave(2, 0) * 2,
    "tile": lambda y: y.tile(2, 1) * 2,
    "meshgrid": lambda y: sum(torch.meshgrid(y[0], y[1], indexing="ij")),
    "one_hot": lambda y: F.one_hot(torch.tensor([0, 2]), 4).float() @ y,
    "median": lambda y: y.median(1).values * 2,
    "kthvalue": lambda y: y.kthvalue(2, 1).values * 2,
    "quantile": lambda y: y.quantile(0.3, 1) * 2,
    "aminmax": lambda y: operator.sub(*reversed(torch.aminmax(y))) * y,
    "norm_p": lambda y: y.norm(1, dim=0) + y.norm(dim=1),
    "renorm": lambda y: y.renorm(2, 0, 1.0) * 2,
    "bucketize": lambda y: torch.bucketize(y, torch.tensor([-1.0, 0.0, 1.0])) * y,
    "threshold": lambda y: F.threshold(y, 0.1, 20.0) * y,
    "rms_norm": lambda y: F.rms_norm(y, (4,)) * 2,
    "local_response": lambda y: F.local_response_norm(y[None], 2),
    "instance_norm": lambda y: F.instance_norm(y[None]) * 2,
    "pixel_shuffle": lambda y: F.pixel_shuffle(y.view(1, 4, 2, 2), 2) * 2,
    "split_list": lambda y: torch.cat([part * 2 for part in y.split([1, 3], 1)], 1),
    "tensor_split": lambda y: y.tensor_split(3)[0] * 2,
    "hstack": lambda y: torch.hstack((y, y.t())) * 2,
    "dstack": lambda y: torch.dstack((y, y.t())) * 2,
    "block_diag": lambda y: torch.block_diag(y, y[:2]) * 2,
    "combined_view": lambda y: y.t().reshape(2, 8).contiguous().view(4, 4).transpose(0, 1) * 2,
}
_LOSSES: dict[str, Callable[[Any], Any]] = {
    "l1": lambda y: F.l1_loss(y, y.detach().flip(0)),
    "smooth_l1": lambda y: F.smooth_l1_loss(y, y.detach().flip(0)),
    "huber": lambda y: F.huber_loss(y, y.detach().flip(0), delta=0.5),
    "kl": lambda y: F.kl_div(y.log_softmax(1), torch.full((4, 4), 0.25), reduction="batchmean"),
    "bce": lambda y: F.binary_cross_entropy(y.sigmoid(), torch.ones(4, 4)),
    "bce_logits": lambda y: F.binary_cross_entropy_with_logits(y, torch.zeros(4, 4), pos_weight=torch.ones(4) * 2),
    "smoothed": lambda y: F.cross_entropy(y, torch.arange(4), label_smoothing=0.1),
    "weighted": lambda y: F.cross_entropy(y, torch.arange(4), weight=torch.arange(4.0)),
    "ignored": lambda y: F.cross_entropy(y, torch.tensor([0, -100, 2, 3]), reduction="sum"),
    "soft_targets": lambda y: F.cross_entropy(y, torch.full((4, 4), 0.25)),
    "margin": lambda y: F.multi_margin_loss(y, torch.arange(4)),
    "triplet": lambda y: F.triplet_margin_loss(y, y.flip(0), y.flip(1)),
    "hinge": lambda y: F.hinge_embedding_loss(y, torch.ones(4, 4)),
    "gaussian": lambda y: F.gaussian_nll_loss(y, torch.zeros(4, 4), y.exp()),
    "poisson": lambda y: F.poisson_nll_loss(y, torch.ones(4, 4)),
    "cosine_embedding": lambda y: F.cosine_embedding_loss(y, y.flip(0), torch.ones(4)),
}
_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "conv_strided": lambda: nn.Conv2d(3, 4, 3, stride=2),
    "conv_dilated": lambda: nn.Conv2d(3, 4, 3, dilation=2),
    "conv_grouped": lambda: nn.Conv2d(3, 6, 3, groups=3),
    "conv_pointwise": lambda: nn.Conv2d(3, 5, 1, bias=False),
    "conv_reflect": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "conv_transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
    "max_pool": lambda: nn.MaxPool2d(3, 2, 1),
    "avg_pool": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True),
    "lp_pool": lambda: nn.LPPool2d(2, 2),
    "adaptive_avg": lambda: nn.AdaptiveAvgPool2d(3),
    "adaptive_max": lambda: nn.AdaptiveMaxPool2d(3),
    "fold": lambda: nn.Unfold(3),
    "nearest": lambda: nn.Upsample(scale_factor=2),
    "bilinear": lambda: nn.Upsample(size=(5, 5), mode="bilinear"),
    "bicubic": lambda: nn.Upsample(size=(5, 5), mode="bicubic", align_corners=True),
    "batch_norm_2d": lambda: nn.BatchNorm2d(3, momentum=None),
    "batch_norm_bare": lambda: nn.BatchNorm2d(3, affine=False, track_running_stats=False),
    "instance_norm_2d": lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
    "group_norm_2d": lambda: nn.GroupNorm(3, 3),
    "layer_norm_2d": lambda: nn.LayerNorm((3, 8, 8)),
    "prelu": lambda: nn.PReLU(3),
    "channel_shuffle": lambda: nn.ChannelShuffle(3),
    "unshuffle": lambda: nn.PixelUnshuffle(2),
    "zero_pad": lambda: nn.ZeroPad2d(2),
}
_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 3, bias=False),
    "bilinear_layer": lambda: _Fed(nn.Bilinear(8, 8, 2), 2),
    "rnn": lambda: nn.RNN(8, 4, batch_first=True),
    "gru": lambda: nn.GRU(8, 4, batch_first=True),
    "lstm": lambda: nn.LSTM(8, 4, batch_first=True),
    "self_attention": lambda: _Fed(nn.MultiheadAttention(8, 2, batch_first=True), 3),
    "decoder": lambda: _Fed(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 2),
    "encoder_norm_first": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True),
    "conv_1d": lambda: nn.Conv1d(6, 4, 3, padding=1),
    "conv_1d_causal": lambda: nn.Sequential(nn.ConstantPad1d((2, 0), 0.0), nn.Conv1d(6, 6, 3)),
    "alpha_dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3)),
    "feature_dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout1d(0.3)),
    "rrelu": lambda: nn.Sequential(nn.Linear(8, 8), nn.RReLU()),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4)),
}


class _Fed(nn.Module):
    """A layer that gets its input as several arguments."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, value: torch.Tensor) -> Any:
        return self.layer(*[value * (place + 1) for place in range(self.times)])


def _mutated(change: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    y = x.clone() @ w  # the backward reads what was there before
    change(x, y)
    return y * 2, x.t() @ w


def _inside(change: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    y = (x @ w).clone()
    view = y[1:3]
    change(view, w[1:3].detach())
    return y.sin() @ w, view * 2


def _aliased(alias: Callable[[Any], Any], w: Any, x: Any) -> Any:
    y = x @ w
    return alias(x), alias(y), y


def _broken(interrupt: Callable[[Any], Any], w: Any, x: Any) -> Any:
    y = (x @ w).tanh()
    interrupt(y)
    return (y @ w).sin() + x


def _hooked(hook: Callable[[Any], Any], w: Any, x: Any) -> Any:
    y = (x @ w).tanh()
    y.register_hook(hook)
    return (y @ w).sin(), Twice.apply(y)


def _under(mode: Callable[[], Any], w: Any, x: Any) -> Any:
    y = x @ w
    with mode():
        z = (y * 2).exp() @ w
    return y.sin() + z


def _python(form: Callable[[Any, Any], Any], w: Any, x: Any) -> Any:
    return form(x @ w, w)


_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x.add_(y.detach()[: len(x)]),
    "mul": lambda x, y: x.mul_(2),
    "copy": lambda x, y: x.copy_(y.detach()[: len(x)]),
    "zero": lambda x, y: x.zero_(),
    "fill": lambda x, y: x.fill_(3.0),
    "clamp": lambda x, y: x.clamp_(-0.5, 0.5),
    "set_item": lambda x, y: operator.setitem(x, (0, 1), 5.0),
    "set_row": lambda x, y: operator.setitem(x, 0, y.detach()[0]),
    "set_mask": lambda x, y: x.masked_fill_(x > 0.5, 0.0),
    "view": lambda x, y: x.view(-1).mul_(3),
    "transposed": lambda x, y: x.t().add_(1),
    "slice": lambda x, y: x[:, ::2].neg_(),
    "index_add": lambda x, y: x.index_add_(0, torch.tensor([1]), y.detach()[:1]),
    "twice": lambda x, y: x.add_(1).sub_(2).exp_(),
    "random": lambda x, y: x.uniform_(),
}
_ALIASES: dict[str, Callable[[Any], Any]] = {
    "same": lambda x: x,
    "view_as": lambda x: x.view_as(x),
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:, :2],
    "expanded": lambda x: x[0].expand(3, 4),
    "detached": lambda x: x.detach(),
    "two_views": lambda x: (x[0], x[1]),
    "nested": lambda x: [x, {"view": x.view(-1), "none": None}],
    "unbound": lambda x: x.unbind(),
    "chunks": lambda x: x.chunk(2),
    "diagonal": lambda x: x.diagonal(),
    "permuted": lambda x: x.view(2, 2, 4).permute(2, 0, 1),
}
_BREAKS: dict[str, Callable[[Any], Any]] = {
    "break": lambda y: torch._dynamo.graph_break(),
    "item": lambda y: y.sum().item(),
    "tolist": lambda y: y.detach().tolist(),
    "numpy": lambda y: y.detach().numpy().sum(),
    "nonzero": lambda y: y.nonzero(),
    "unique": lambda y: y.detach().unique(),
    "bool": lambda y: bool(y.sum() > 0),
    "text": lambda y: str(y.shape),
    "data_ptr": lambda y: y.data_ptr(),
    "skipped": torch.compiler.disable(lambda y: y.exp().sum()),
}
_HOOKS: dict[str, Callable[[Any], Any]] = {
    "scale": lambda grad: grad * 0.5,
    "clip": lambda grad: grad.clamp(-0.1, 0.1),
    "look": lambda grad: None,
    "zero": lambda grad: torch.zeros_like(grad),
    "normalize": lambda grad: grad / (grad.norm() + 1),
}
_MODES: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "set_grad": partial(torch.set_grad_enabled, False),
    "autocast_off": partial(torch.autocast, "cpu", enabled=False),
}
_PYTHON: dict[str, Callable[[Any, Any], Any]] = {
    "comprehension": lambda y, w: sum([row * place for place, row in enumerate(y)]) * w,
    "zip": lambda y, w: torch.stack([a * b for a, b in zip(y, w, strict=True)]),
    "dict": lambda y, w: {key: value * 2 for key, value in {"a": y, "b": w}.items()}["b"] @ y,
    "closure": lambda y, w: (lambda scale: lambda v: v * scale)(3)(y) @ w,
    "partial": lambda y, w: partial(torch.add, alpha=3)(y, w) * 2,
    "getattr": lambda y, w: getattr(y, "sin")() @ w,  # noqa: B009
    "starred": lambda y, w: torch.cat([*y.unbind(), *w.unbind()]) * 2,
    "condition": lambda y, w: (y if y.shape[0] > 2 else w) @ w * 2,
    "shape": lambda y, w: y.view(y.shape[0] // 2, -1) * y.numel(),
    "map": lambda y, w: sum(map(torch.sin, (y, w))) * 2,
    "sorted": lambda y, w: torch.stack([y, w][:: -1 if len(y) > 3 else 1]) * 2,
    "isinstance": lambda y, w: (y * 2 if isinstance(y, torch.Tensor) else w).sin(),
    "try": lambda y, w: (y @ w).sin() if hasattr(y, "sin") else y,
    "namedtuple": lambda y, w: torch.max(y * w, 1).values * 2,
    "reduce": lambda y, w: y.sin().cos().sin().cos().tanh().exp() * w,
    "scalar": lambda y, w: y * 0.5 + 3 - w / 2,
    "constants": lambda y, w: y * torch.tensor(2.0) + torch.arange(4.0) + torch.linspace(0, 1, 4),
    "new": lambda y, w: y + y.new_ones(4, 4) + torch.full_like(w, 2.0) + torch.eye(4),
    "types": lambda y, w: y.double().sum(0).to(torch.float16).float() * w,
    "operators": lambda y, w: -y + abs(w) - (y**2) % 3,
    "matmul": lambda y, w: (y @ w) @ (w @ y),
    "complex_view": lambda y, w: (y[..., 0:1] * w + y[..., -1:]) * 2,
}


def _of_value(operation: Callable[[Any], Any], w: Any, x: Any) -> Any:
    return operation(x @ w) * 1.5, w.sum() * 2


def _of_both(operation: Callable[..., Any], w: Any, x: Any) -> Any:
    return operation(x @ w, w.exp()) * 1.5, w.sum() * 2


def _reduced(operation: Callable[..., Any], w: Any, x: Any) -> Any:
    y = (x @ w).tanh()
    return operation(y, 1) * y, w.sum() * 2


def _functions(module: Any, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


def _family(prefix: str, form: Callable[..., Any], members: dict[str, Any]) -> dict[str, tuple[Maker, Batch]]:
    return {f"{prefix}_{name}": (partial(Function, partial(form, member)), matrix) for name, member in members.items()}


FAMILIES: dict[str, tuple[Maker, Batch]] = {
    **_family("unary", _of_value, _functions(torch, _UNARY)),
    **_family("activation", _of_value, _functions(F, _ACTIVATIONS)),
    **_family("binary", _of_both, _functions(torch, _BINARY)),
    **_family("reduction", _reduced, _functions(torch, _REDUCTIONS)),
    **_family("shaped", _of_value, _SHAPED),
    **_family("loss", _of_value, _LOSSES),
    **_family("mutated", _mutated, _CHANGES),
    **_family("inside", _inside, _CHANGES),
    **_family("aliased", _aliased, _ALIASES),
    **_family("break", _broken, _BREAKS),
    **_family("hook", _hooked, _HOOKS),
    **_family("mode", _under, _MODES),
    **_family("python", _python, _PYTHON),
    **{f"image_{name}": (make, images) for name, make in _IMAGES.items()},
    **{f"sequence_{name}": (make, sequence) for name, make in _SEQUENCES.items()},
}
