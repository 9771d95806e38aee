"""Modules of every rule with the shape of an input, and wrappers of what is no module or takes two inputs."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


class Apply(nn.Module):
    """A function between two layers of parameters, so that gradients flow through it on both sides."""

    def __init__(self, function, width: int = 4) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return self.function(x * self.scale)


BY_RULE = {"rule", "shared"}
# name -> (make, shape of one model's input)
MODULES = {
    "linear": (partial(nn.Linear, 4, 3), (5, 4)),
    "linear without bias": (partial(nn.Linear, 4, 3, bias=False), (5, 4)),
    "linear, three axes": (partial(nn.Linear, 4, 3), (2, 5, 4)),
    "linear, five axes": (partial(nn.Linear, 4, 3), (2, 1, 3, 2, 4)),
    "linear, a vector": (partial(nn.Linear, 4, 3), (4,)),
    "linear, one output": (partial(nn.Linear, 4, 1), (1, 4)),
    "conv1d": (partial(nn.Conv1d, 4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (3, 4, 11)),
    "conv1d, same": (partial(nn.Conv1d, 4, 6, 3, padding="same", dilation=2), (3, 4, 11)),
    "conv1d, reflect": (partial(nn.Conv1d, 4, 6, 3, padding=2, padding_mode="reflect"), (3, 4, 11)),
    "conv2d": (partial(nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding=(1, 0)), (3, 4, 7, 5)),
    "conv2d, one element": (partial(nn.Conv2d, 4, 5, 1), (3, 4, 7, 5)),
    "conv2d, depthwise": (partial(nn.Conv2d, 4, 8, 3, groups=4, bias=False), (1, 4, 5, 6)),
    "conv2d, circular": (partial(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 5, 6)),
    "conv2d, replicate": (partial(nn.Conv2d, 4, 6, 3, padding=1, padding_mode="replicate"), (2, 4, 5, 6)),
    "conv2d, valid": (partial(nn.Conv2d, 4, 6, (2, 3), padding="valid", groups=2, dilation=(1, 2)), (2, 4, 7, 9)),
    "conv3d, strides": (partial(nn.Conv3d, 2, 3, 2, stride=(2, 1, 3), padding=1, dilation=(1, 2, 1)), (1, 2, 5, 4, 6)),
    "conv3d": (partial(nn.Conv3d, 2, 4, (1, 2, 3), groups=2, padding=(0, 1, 1)), (2, 2, 3, 4, 5)),
    "conv_transpose1d": (partial(nn.ConvTranspose1d, 4, 6, 3, stride=2, output_padding=1, groups=2), (3, 4, 6)),
    "conv_transpose2d": (partial(nn.ConvTranspose2d, 4, 3, (3, 2), stride=(2, 1), padding=1, dilation=2), (2, 4, 5, 6)),
    "conv_transpose2d, groups": (
        partial(nn.ConvTranspose2d, 4, 6, 3, stride=3, groups=2, output_padding=(1, 2), bias=False),
        (2, 4, 3, 5),
    ),
    "conv_transpose3d, strides": (
        partial(
            nn.ConvTranspose3d, 2, 4, (2, 3, 1), stride=(2, 1, 3), groups=2, padding=(0, 1, 0), output_padding=(1, 0, 2)
        ),
        (1, 2, 3, 4, 3),
    ),
    "conv_transpose3d": (partial(nn.ConvTranspose3d, 2, 4, 2, bias=False), (2, 2, 3, 4, 3)),
    "batch_norm1d": (partial(nn.BatchNorm1d, 4), (5, 4)),
    "batch_norm1d, three axes": (partial(nn.BatchNorm1d, 4, momentum=0.3), (5, 4, 3)),
    "batch_norm2d": (partial(nn.BatchNorm2d, 4, eps=1e-3), (3, 4, 5, 2)),
    "batch_norm2d, plain": (partial(nn.BatchNorm2d, 4, affine=False), (3, 4, 5, 2)),
    "batch_norm2d, no statistics": (partial(nn.BatchNorm2d, 4, track_running_stats=False), (3, 4, 5, 2)),
    "batch_norm3d": (partial(nn.BatchNorm3d, 2), (2, 2, 3, 2, 4)),
    "layer_norm": (partial(nn.LayerNorm, 4), (2, 3, 4)),
    "layer_norm, two axes": (partial(nn.LayerNorm, (3, 4)), (2, 3, 4)),
    "layer_norm, plain": (partial(nn.LayerNorm, 4, elementwise_affine=False), (3, 4)),
    "layer_norm, no bias": (partial(nn.LayerNorm, 4, bias=False), (3, 4)),
    "rms_norm": (partial(nn.RMSNorm, 4), (2, 3, 4)),
    "group_norm": (partial(nn.GroupNorm, 2, 4), (3, 4, 5)),
    "group_norm, images": (partial(nn.GroupNorm, 4, 4), (3, 4, 5, 2)),
    "group_norm, plain": (partial(nn.GroupNorm, 2, 4, affine=False), (3, 4, 5)),
    "instance_norm1d": (partial(nn.InstanceNorm1d, 4), (3, 4, 5)),
    "instance_norm2d": (partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True), (3, 4, 5, 2)),
    "instance_norm3d": (partial(nn.InstanceNorm3d, 2, affine=True), (2, 2, 3, 2, 4)),
    "local_response_norm": (partial(nn.LocalResponseNorm, 3), (2, 4, 5, 3)),
    "prelu": (nn.PReLU, (3, 4, 2)),
    "prelu, channels": (partial(nn.PReLU, 4), (3, 4, 2)),
    "prelu, two axes": (partial(nn.PReLU, 4), (3, 4)),
    "upsample": (partial(nn.Upsample, scale_factor=2), (2, 3, 4)),
    "upsample, bilinear": (partial(nn.Upsample, scale_factor=2, mode="bilinear"), (2, 3, 4, 5)),
    "upsample, size": (partial(nn.Upsample, size=(7, 3), mode="bicubic", align_corners=True), (2, 3, 4, 5)),
    "pixel_shuffle": (partial(nn.PixelShuffle, 2), (2, 8, 3, 4)),
    "pixel_unshuffle": (partial(nn.PixelUnshuffle, 2), (2, 2, 4, 6)),
    "channel_shuffle": (partial(nn.ChannelShuffle, 2), (2, 4, 3, 2)),
    "upsample, nearest-exact": (partial(nn.Upsample, scale_factor=(1.5, 2), mode="nearest-exact"), (2, 3, 4, 5)),
    "upsample, trilinear": (partial(nn.Upsample, scale_factor=2, mode="trilinear"), (1, 2, 2, 3, 2)),
    "flatten": (nn.Flatten, (2, 3, 4)),
    "flatten from 0": (partial(nn.Flatten, 0), (2, 3, 4)),
    "flatten, negative": (partial(nn.Flatten, -2, -1), (2, 3, 4)),
    "unflatten": (partial(nn.Unflatten, 1, (2, 2)), (3, 4)),
    "softmax": (partial(nn.Softmax, 1), (3, 4, 2)),
    "log_softmax": (partial(nn.LogSoftmax, -1), (3, 4)),
    "softmin": (partial(nn.Softmin, 0), (3, 4)),
    "softmax2d": (nn.Softmax2d, (2, 3, 4, 2)),
    "zero_pad": (partial(nn.ZeroPad2d, (1, 0, 2, 1)), (2, 3, 4, 5)),
    "reflection_pad": (partial(nn.ReflectionPad2d, 1), (2, 3, 4, 5)),
    "unfold": (partial(nn.Unfold, (2, 2)), (2, 3, 4, 5)),
    "fold": (partial(nn.Fold, (3, 4), (2, 2)), (2, 8, 6)),
    "glu": (partial(nn.GLU, 1), (3, 4)),
    "max_pool1d": (partial(nn.MaxPool1d, 2, padding=1), (2, 3, 7)),
    "max_pool2d": (partial(nn.MaxPool2d, 3, stride=2, ceil_mode=True), (2, 3, 6, 7)),
    "max_pool2d, indices": (partial(nn.MaxPool2d, 2, return_indices=True), (2, 3, 6, 7)),
    "max_pool3d": (partial(nn.MaxPool3d, 2), (2, 3, 4, 4, 5)),
    "avg_pool1d": (partial(nn.AvgPool1d, 2), (2, 3, 7)),
    "avg_pool2d": (partial(nn.AvgPool2d, 3, padding=1, count_include_pad=False), (2, 3, 6, 7)),
    "avg_pool3d": (partial(nn.AvgPool3d, 2), (2, 3, 4, 4, 5)),
    "adaptive_avg_pool1d": (partial(nn.AdaptiveAvgPool1d, 3), (2, 3, 7)),
    "adaptive_avg_pool2d": (partial(nn.AdaptiveAvgPool2d, (2, None)), (2, 3, 6, 7)),
    "adaptive_avg_pool3d": (partial(nn.AdaptiveAvgPool3d, 2), (2, 3, 4, 4, 5)),
    "adaptive_max_pool1d": (partial(nn.AdaptiveMaxPool1d, 3), (2, 3, 7)),
    "adaptive_max_pool2d": (partial(nn.AdaptiveMaxPool2d, 2), (2, 3, 6, 7)),
    "adaptive_max_pool3d": (partial(nn.AdaptiveMaxPool3d, (2, 1, 3)), (2, 3, 4, 4, 5)),
    "max_pool1d, dilated": (partial(nn.MaxPool1d, 3, stride=1, dilation=2), (2, 3, 9)),
    "avg_pool2d, divisor": (partial(nn.AvgPool2d, 2, ceil_mode=True, divisor_override=3), (2, 3, 5, 7)),
    "lp_pool1d": (partial(nn.LPPool1d, 3, 2), (2, 3, 7)),
    "lp_pool2d": (partial(nn.LPPool2d, 2, 2), (2, 3, 6, 7)),
}


class Attend(nn.Module):
    """Attention of one input to itself or of one to another."""

    def __init__(self, options, call) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(**{"embed_dim": 8, "num_heads": 2} | options)
        self.call = call

    def forward(self, query, memory):
        return self.call(self.attention, query, memory)
