"""Attention as a module and as a function, and transformers with it."""

from __future__ import annotations

import pytest
import torch
from tests.fusion.oracle import SIZES, assert_close, assert_each, check, check_state, made
from torch import nn
from torch.nn import functional as F

import hocket
from fusion.rules.layers import BY_RULE, Attend
from quick import covering

ATTENTION = {
    "to itself": ({}, lambda m, q, k: m(q, q, q)),
    "batch first": ({"batch_first": True}, lambda m, q, k: m(q, q, q, need_weights=False)[0]),
    "to another": ({"bias": False}, lambda m, q, k: m(q, k, k)),
    "other widths": ({"kdim": 6, "vdim": 6}, lambda m, q, k: m(q, k[..., :6], k[..., :6])),
    "a mask": (
        {},
        lambda m, q, k: m(q, q, q, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), need_weights=False)[0],
    ),
    "a mask to be added": ({}, lambda m, q, k: m(q, q, q, attn_mask=torch.arange(25.0).view(5, 5).double())),
    "padding": (
        {"batch_first": True},
        lambda m, q, k: m(q, k, k, key_padding_mask=torch.arange(12).view(2, 6) % 3 == 1, average_attn_weights=False),
    ),
}


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, num_models):
    options, call = ATTENTION[name]
    first = options.get("batch_first", False)
    q = torch.randn(num_models, *((2, 5, 8) if first else (5, 2, 8))).double()
    k = torch.randn(num_models, *((2, 6, 8) if first else (6, 2, 8))).double()
    check(made(lambda: Attend(options, call), num_models), q, k, shared=False, strict=True, expect=BY_RULE)


@pytest.mark.parametrize("need_weights", [False, True])
def test_queries_all_of_whose_keys_are_masked_are_as_alone(need_weights):
    masked = torch.tensor([[False, True, False], [True, True, True]])

    def call(attention, q, k):
        return attention(q, k, k, key_padding_mask=masked, need_weights=need_weights)[0]

    models = made(lambda: Attend({"batch_first": True, "dropout": 0.5}, call), 3)
    array = hocket.fuse(models, backend="rule", shared=True, strict=True, seeds=[5, 6, 7])
    q, k = torch.randn(2, 2, 3, 8).double()
    out = array(q, k)
    out.nan_to_num().sum().backward()
    for index, model in enumerate(models):
        torch.manual_seed(5 + index)
        own = model(q, k)
        own.nan_to_num().sum().backward()
        assert_close(out[index].detach(), own.detach(), f"output of model {index}")
    check_state(array, models)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_attention_with_keys_and_values_of_its_own():
    options, x = {"add_bias_kv": True, "add_zero_attn": True}, torch.randn(3, 5, 2, 8).double()
    check(made(lambda: Attend(options, lambda m, q, k: m(q, k, k)), 3), x, x, shared=False)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
def test_a_hint_of_causal_attention_without_a_mask_is_refused_as_by_torch():
    array = hocket.fuse(made(lambda: Attend({}, lambda m, q, k: m(q, k, k, is_causal=True)), 2), shared=True)
    with pytest.raises(hocket.errors.InputError, match=r"layer attention.*Need attn_mask"):
        array(torch.ones(5, 2, 8).double(), torch.ones(5, 2, 8).double())


class Scaled(nn.Module):
    """Scaled dot-product attention as a function."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.options = options
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, q, k):
        return F.scaled_dot_product_attention(q * self.scale, k, k * self.scale, **self.options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()}])
def test_heads_of_queries_that_have_keys_in_common(options):
    q, k = torch.randn(3, 2, 4, 5, 4).double(), torch.randn(3, 2, 2, 5, 4).double()
    check(made(lambda: Scaled(enable_gqa=True, **options), 3), q, k, shared=False, strict=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()}],
    ids=["plain", "causal", "scale", "mask"],
)
@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 3, 5, 4)])
def test_scaled_dot_product_attention(options, shape, num_models):
    q, k = torch.randn(num_models, *shape).double(), torch.randn(num_models, *shape).double()
    check(made(lambda: Scaled(**options), num_models), q, k, shared=False, strict=True)


DROPPING = {
    "function": lambda rate: Scaled(dropout_p=rate),
    "module": lambda rate: Attend({"embed_dim": 4, "dropout": rate}, lambda m, q, k: m(q, k, k)[0]),
}


@pytest.mark.parametrize("kind", DROPPING.values(), ids=DROPPING)
def test_attention_drops_by_the_rate_of_each_model(kind):
    models = [kind(rate).double() for rate in (0.5, 0.0, 0.1)]
    x = torch.randn(3, 2, 5, 4).double()
    array = hocket.fuse(models, shared=False, seeds=(1, 2, 3), strict=True)
    drawn = [[], [], []]
    for model, own, seed, outs in zip(models, x, (1, 2, 3), drawn, strict=True):
        torch.manual_seed(seed)
        outs.extend(model(own, own) for _ in range(2))
    for step in range(2):
        assert_each(array(x, x), [outs[step] for outs in drawn])


TRANSFORMERS = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, norm_first=True, activation="gelu", batch_first=True
    ),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0), 2, norm=nn.LayerNorm(8), enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_encoders(name, num_models, training):
    models = made(TRANSFORMERS[name], num_models, training=training)
    check(models, torch.randn(num_models, 5, 2, 8).double(), shared=False, strict=True, expect=BY_RULE)


DECODERS = {
    "layer": lambda: nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0),
    "layer, norm first": lambda: nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, norm_first=True, bias=False),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0), 2),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize(("name", "training"), covering(DECODERS, [True, False]))
@pytest.mark.parametrize("num_models", SIZES)
def test_transformer_decoders(name, num_models, training):
    tgt, memory = torch.randn(num_models, 5, 3, 8).double(), torch.randn(num_models, 5, 3, 8).double()
    models = made(DECODERS[name], num_models, training=training)
    check(models, tgt, memory, shared=False, strict=True, expect=BY_RULE)


class Masked(nn.Module):
    """A decoder as language models call it: a causal mask, and padded memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, tgt, memory):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1], dtype=tgt.dtype)
        padding = torch.arange(memory.shape[1]).expand(memory.shape[0], -1) >= 3
        return self.layer(tgt, memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)


def test_a_decoder_with_masks():
    tgt, memory = torch.randn(3, 2, 5, 8).double(), torch.randn(3, 2, 4, 8).double()
    check(made(Masked, 3), tgt, memory, shared=False, strict=True)


class Padded(nn.Module):
    """An encoder as classifiers call it, with sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))

    def forward(self, tokens, padding):
        return self.encoder(tokens, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("backend", ["rule", "auto"])
@pytest.mark.parametrize("padded", [(3, 4), (0, 4)], ids=["at the end", "at both"])
def test_an_encoder_leaves_zeros_at_padding_where_torch_does(padded, backend):
    models = made(Padded, 3, training=False)
    array = hocket.fuse(models, shared=True, backend=backend).eval()
    given = torch.randn(3, 5, 8).double(), torch.zeros(3, 5, dtype=torch.bool)
    given[1][1, list(padded)] = True
    for mode in (torch.no_grad, torch.enable_grad):
        for _ in range(2):
            with mode():
                for fused, model in zip(array(*given), models, strict=True):
                    assert_close(fused.detach(), model(*given).detach(), mode.__name__)
