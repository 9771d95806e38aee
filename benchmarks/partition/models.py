"""Models that are cut into stages, and what their layers are for those who cut at equal numbers of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class UNet(nn.Module):
    """Two skips over everything between them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.down3 = nn.Conv2d(2 * width, 4 * width, 3, padding=1, stride=2)
        self.up3 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.conv3 = nn.Conv2d(4 * width, 2 * width, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.conv2 = nn.Conv2d(2 * width, width, 3, padding=1)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.down1(image))
        second = F.relu(self.down2(first))
        low = F.relu(self.down3(second))
        up = F.relu(self.conv3(torch.cat([self.up3(low), second], 1)))
        found: torch.Tensor = self.out(F.relu(self.conv2(torch.cat([self.up2(up), first], 1))))
        return found


class Logits(nn.Module):
    """A language model that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


class LayeredModel(NamedTuple):
    """A model, one micro-batch, and the names of its layers in order. Other modules belong to the nearest layer."""

    model: nn.Module
    micro_batch: torch.Tensor
    layers: tuple[str, ...]


def _gpt2() -> LayeredModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=8192, n_positions=64, n_embd=128, n_layer=8, n_head=4, **no_dropout)
    config.bos_token_id = config.eos_token_id = 0
    names = tuple(f"model.transformer.h.{number}" for number in range(8))
    return LayeredModel(Logits(GPT2LMHeadModel(config)), torch.randint(0, 8192, (4, 64)), names)


def _llama() -> LayeredModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 8,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(vocab_size=8192, num_attention_heads=4, num_key_value_heads=4, **sizes)
    names = tuple(f"model.model.layers.{number}" for number in range(8))
    return LayeredModel(Logits(LlamaForCausalLM(config)), torch.randint(0, 8192, (4, 64)), names)


def _resnet18() -> LayeredModel:
    from hocket.zoo import load

    names = tuple(f"features.stage{stage}.unit{unit}" for stage in range(1, 5) for unit in (1, 2))
    model = load("resnet18", image_size=96).model
    assert isinstance(model, nn.Module)
    return LayeredModel(model.train(), torch.randn(4, 3, 96, 96), names)


def _unet() -> LayeredModel:
    names = ("down1", "down2", "down3", "up3", "conv3", "up2", "conv2", "out")
    return LayeredModel(UNet(48), torch.randn(4, 3, 32, 32), names)


MODELS: dict[str, Callable[[], LayeredModel]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "resnet18": _resnet18,
    "unet": _unet,
}
