"""Models that are not prepared for fusing: pytorchcv's and transformers' own, with random weights, unchanged."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from tests.fusion.oracle import check_step
from torch import nn

import hocket
from quick import some

pytest.importorskip("pytorchcv")
transformers = pytest.importorskip("transformers")

VISION = {
    "resnet20_cifar10": ("resnet_cifar", 16),
    "preresnet20_cifar10": ("preresnet_cifar", 16),
    "sepreresnet20_cifar10": ("sepreresnet_cifar", 16),
    "densenet40_k12_cifar10": ("densenet_cifar", 8),
    "nin_cifar10": ("nin_cifar", 32),
    "fdmobilenet_wd4": ("fdmobilenet", 64),
    "mobilenetv2_wd4": ("mobilenetv2", 64),
    "mobilenetv3_small_w7d20": ("mobilenetv3", 64),
    "shufflenetv2_wd2": ("shufflenetv2", 64),
}
SMALL = {
    "vocab_size": 29,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = {key: SMALL[key] for key in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")}
LANGUAGE = {
    "BertForMaskedLM": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "GPT2LMHeadModel": {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8, "resid_pdrop": 0.0}
    | {
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
        "vocab_size": 29,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "DistilBertForMaskedLM": {"n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 16, "dropout": 0.0}
    | {"attention_dropout": 0.0}
    | TOKENS,
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 1, "use_cache": False},
    "RobertaForMaskedLM": SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5ForConditionalGeneration": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    | {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
    | TOKENS,
}


# Two threads sum up a channel of stacked images in other parts than one of a single model's: 5e-11 where sums cancel.
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", some(VISION))
def test_vision(name):
    module, side = VISION[name]
    torch.manual_seed(0)
    models = []
    for _ in range(2):
        model = getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)(pretrained=False).double().train()
        if hasattr(model.features, "final_pool"):
            model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # the original one is for larger images
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        models.append(model)
    array = hocket.fuse(models, backend="rule", strict=True, shared=True)
    x = torch.randn(3, 3, side, side, dtype=torch.float64)
    check_step(array, models, lambda model: model(x))
    assert array.report().startswith("2 models"), array.report()


@pytest.mark.filterwarnings("ignore:hocket.fuse", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", LANGUAGE)
def test_language(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    models = [kind(kind.config_class(**LANGUAGE[name])).double().train() for _ in range(2)]
    tokens = torch.randint(3, 29, (3, 5))
    labels = {"labels": tokens} if name.startswith("T5") else {}
    array = hocket.fuse(models, backend="rule", shared=True)
    check_step(array, models, lambda model: model(input_ids=tokens, **labels).logits)
    assert "linear" in array.report(), "its linear layers fuse one by one"


def test_a_library_that_looks_at_values_is_named_in_the_warning_and_the_report():
    config = transformers.DebertaConfig(**SMALL)
    array = hocket.fuse([transformers.DebertaForSequenceClassification(config) for _ in range(2)], shared=True)
    reason = (
        r"nonzero gives tensors whose shapes depend on values \(test_strangers.py:\d+, in modeling_deberta.py:\d+\)"
    )
    with pytest.warns(UserWarning, match=reason):
        array(input_ids=torch.ones(2, 3, dtype=torch.long), labels=torch.tensor([0, 1]))
    assert re.match(rf"2 models, one by one: {reason}$", array.report())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_with_padding_in_some_batches(name):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    models = [kind(kind.config_class(**LANGUAGE[name] | {"pad_token_id": 0})).double().train() for _ in range(2)]
    array = hocket.fuse(models, backend="rule", shared=True, strict=True)

    def check(length):
        mask = torch.ones(3, 5, dtype=torch.long)
        mask[:, length:] = 0
        tokens = torch.randint(3, 29, (3, 5)) * mask
        labels = {"labels": tokens} if name.startswith("T5") else {}
        for each in (array, *models):
            each.zero_grad()
        check_step(array, models, lambda model: model(input_ids=tokens, attention_mask=mask, **labels).logits)

    for length in (5, 3, 5, 4):
        check(length)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_computes_its_own_loss():
    options = LANGUAGE["BertForMaskedLM"]
    models = [transformers.BertForMaskedLM(transformers.BertConfig(**options)).double() for _ in range(3)]
    tokens = torch.randint(3, 29, (3, 5))
    labels = tokens.masked_fill(tokens > 15, -100)
    array = hocket.fuse(models, backend="rule", strict=True, shared=True)
    check_step(array, models, lambda model: model(input_ids=tokens, labels=labels).loss)
