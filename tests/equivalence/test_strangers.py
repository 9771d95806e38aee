"""Models that are not prepared for Hocket: pytorchcv's and transformers' own, with random weights and tiny sizes."""

import functools

import pytest
import torch
from torch import nn

from equivalence.compare import check_twins
from hocket.job import Job
from support.steps import update

pytest.importorskip("pytorchcv")
pytest.importorskip("transformers")

VISION = {
    "seresnet20_cifar10": 32,
    "preresnet20_cifar10": 32,
    "shakeshakeresnet20_2x16d_cifar10": 32,
    "fdmobilenet_wd4": 64,
    "shufflenetv2_wd2": 64,
}

WORDS = {"vocab_size": 13, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 16} | WORDS
LANGUAGE = {
    "GPT2LMHeadModel": {"n_layer": 1, "n_head": 2, "n_embd": 8, "n_positions": 8} | WORDS,
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 1},
    "DistilBertForMaskedLM": {"n_layers": 1, "n_heads": 2, "dim": 8, "hidden_dim": 16} | WORDS,
    "RobertaForCausalLM": SMALL | {"is_decoder": True, "max_position_embeddings": 12},
    "AlbertForMaskedLM": SMALL | {"embedding_size": 4},
    "T5ForConditionalGeneration": {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    | WORDS
    | {"decoder_start_token_id": 0},
    "OPTForCausalLM": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "ffn_dim": 16}
    | WORDS
    | {"word_embed_proj_dim": 8, "max_position_embeddings": 12},
    "ViTForImageClassification": SMALL | {"image_size": 8, "patch_size": 4},
}
for unused in WORDS:
    LANGUAGE["ViTForImageClassification"].pop(unused)


def vision_job(name: str) -> Job:
    from pytorchcv.model_provider import get_model

    side = VISION[name]
    model = get_model(name, pretrained=False, in_size=(side, side), **({} if side == 32 else {"num_classes": 10}))
    if side != 32:
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # the original one is for images of 224 pixels
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = [(torch.randn(2, 3, side, side), torch.randint(0, 10, (2,))) for _ in range(3)]

    def step(batch):
        return update(optimizer, nn.functional.cross_entropy(model(batch[0]), batch[1]))

    return Job(step, model, optimizer, batches)


def own_loss_job(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> Job:
    """Train a model that computes its own loss, with clipped gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch):
        optimizer.zero_grad()
        out = model(**batch)
        out.loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return out.loss

    return Job(step, model, optimizer, batches)


def language_job(name: str) -> Job:
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**LANGUAGE[name])).train()
    if name.startswith("ViT"):
        batches = [{"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.tensor([0, 1])} for _ in range(3)]
    else:
        words = [torch.randint(3, 13, (2, 6)) for _ in range(3)]
        batches = [{"input_ids": w, "labels": w.clone()} for w in words]
    return own_loss_job(model, batches)


LARGE = {"shufflenetv2_wd2", "shakeshakeresnet20_2x16d_cifar10", "preresnet20_cifar10"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in VISION])
def test_models_of_pytorchcv(name):
    check_twins(functools.partial(vision_job, name))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n in ("DistilBertForMaskedLM", "OPTForCausalLM"))) for n in LANGUAGE],
)
def test_models_of_transformers(name):
    check_twins(functools.partial(language_job, name))
