"""Models of other people, scheduled with both promises of numerics: ``python -m benchmarks strangers``.

Six networks of pytorchcv and six of transformers, unchanged, with random weights and inputs, trained as their users do:
SGD with momentum, or AdamW, with dropout where the library has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.bench import Save, by_target, check_names, columns_of, table_of, unsaved
from benchmarks.contenders import classifier_job, compared, eager_step, language_job, scheduled_step
from benchmarks.turns import title
from hocket.errors import InputError
from hocket.job import Job

IMAGE_BATCH, TEXT_BATCH, TEXT_STEPS = 4, 4, 32
# Name in pytorchcv: the side of its images, pixels.
VISION = {
    "seresnet20_cifar10": 32,
    "preresnet20_cifar10": 32,
    "nin_cifar10": 32,
    "fdmobilenet_wd4": 64,
    "mobilenetv2_wd4": 64,
    "shufflenetv2_wd2": 64,
}
WORDS = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "intermediate_size": 128} | WORDS
# Class in transformers: its configuration.
LANGUAGE: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 64} | WORDS,
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 2},
    "DistilBertForMaskedLM": {"n_layers": 2, "n_heads": 4, "dim": 64, "hidden_dim": 128} | WORDS,
    "RobertaForMaskedLM": SMALL,
    "AlbertForMaskedLM": SMALL | {"embedding_size": 32},
    "T5ForConditionalGeneration": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    | WORDS
    | {"decoder_start_token_id": 0},
}
TARGETS = (*VISION, *LANGUAGE)
NUMERICS = ("bitwise", "close")


def run(targets: tuple[str, ...] = TARGETS, *, rounds: int = 8, block: int = 6, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target by blocks of counted steps."""
    check_names("strangers", targets, TARGETS)
    return by_target(targets, lambda name: _measure(name, rounds, block), save)


def _measure(name: str, rounds: int, block: int) -> dict[str, Any]:
    ways = {"eager": (eager_step,), **{numerics: (scheduled_step, numerics) for numerics in NUMERICS}}
    return compared(ways, job_of, name, rounds, block)


def job_of(name: str) -> Job:
    """The training job of a target, the same one each time.

    Raises:
        InputError: its library is not installed. Names what to install.
    """
    torch.manual_seed(0)
    try:
        return _vision_job(name) if name in VISION else _language_job(name)
    except ImportError as error:
        raise InputError(f"bench strangers: {error}; pip install pytorchcv transformers") from error


def _vision_job(name: str) -> Job:
    from pytorchcv.model_provider import get_model

    side = VISION[name]
    model = get_model(name, pretrained=False, in_size=(side, side), **({} if side == 32 else {"num_classes": 10}))
    if side != 32:
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # the original one is for images of 224 pixels
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    size = (IMAGE_BATCH, 3, side, side)
    batches = [(torch.randn(size), torch.randint(0, 10, (IMAGE_BATCH,))) for _ in range(4)]
    return classifier_job(model, optimizer, batches, name)


def _language_job(name: str) -> Job:
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**LANGUAGE[name])).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = [torch.randint(3, WORDS["vocab_size"], (TEXT_BATCH, TEXT_STEPS)) for _ in range(4)]
    return language_job(model, optimizer, words, name)


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    verdicts = {f"{numerics} is": f"{{said[{numerics}][verdict]}}" for numerics in NUMERICS}
    yield table_of(title(result), {"model": "{name}", **columns_of("speedup", NUMERICS), **verdicts}, result["targets"])
