"""BERT at two of its small published sizes, filling in masked tokens, with random weights.

Sources: J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers", 2018, for the model and
the task; I. Turc et al., "Well-Read Students Learn Better", 2019, for the size. The model is the one of the
package ``transformers``, fed and called as its users do, with a dictionary.

    job = load("bert-tiny", steps=32, vocab=1000)
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hocket.errors import InputError
from hocket.job import Job
from hocket.zoo import data
from hocket.zoo.base import Option, Request, ZooEntry, optional

MASKED_SHARE = 0.15
NOT_SCORED = -100
HEAD_WIDTH = 64
PACKAGE = "transformers"
EXTRA = "zoo"

Batch = dict[str, Tensor]


def build(request: Request) -> Job:
    """A masked language model; batches ``{"input_ids": [batch, steps], "labels": [batch, steps]}`` int64."""
    vocab, width, steps = (request.size[name] for name in ("vocab", "width", "steps"))
    if width % HEAD_WIDTH:
        raise InputError(f"{request.name}: width: expected a multiple of {HEAD_WIDTH}, got {width}")
    bert = optional("transformers.models.bert", package=PACKAGE, extra=EXTRA, needed_by=request.name)
    config = bert.BertConfig(
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=request.size["depth"],
        num_attention_heads=width // HEAD_WIDTH,
        intermediate_size=4 * width,
        max_position_embeddings=max(512, steps),
    )
    model = bert.BertForMaskedLM(config).to(request.device).train()
    optimizer = request.optimizer(model.parameters())

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, _batches(request, vocab, steps), name=request.name)


def _batches(request: Request, vocab: int, steps: int) -> list[Batch]:
    """Generated text with 15% of its tokens hidden behind the last word of the vocabulary."""
    mask_token = vocab - 1
    drawn = data.generator(request)
    batches = []
    for tokens, _ in data.tokens(request, vocab=vocab - 1, steps=steps):
        is_masked = (torch.rand(tokens.shape, generator=drawn) < MASKED_SHARE).to(tokens.device)
        is_masked[:, 0] = True  # at least one, or the loss would have no value
        batches.append(
            {
                "input_ids": tokens.masked_fill(is_masked, mask_token),
                "labels": tokens.masked_fill(~is_masked, NOT_SCORED),
            }
        )
    return batches


ENTRY = ZooEntry(
    name="bert-tiny",
    summary="BERT with 2 layers of 128 and random weights, masked language model",
    source="Devlin et al., BERT, 2018; Turc et al., Well-Read Students Learn Better, 2019",
    build=build,
    batch_size=8,
    optimizer="adamw",
    lr=1e-3,
    options=(
        Option("width", 128, "width of the layers, a multiple of 64"),
        Option("depth", 2, "layers"),
        Option("steps", 128, "tokens in a sequence"),
        Option("vocab", 30_522, "different tokens", minimum=3),
    ),
    package=PACKAGE,
    extra=EXTRA,
)

MEDIUM = replace(
    ENTRY,
    name="bert-medium",
    summary="BERT with 8 layers of 512 and random weights, masked language model",
    lr=1e-4,
    options=(
        Option("width", 512, "width of the layers, a multiple of 64"),
        Option("depth", 8, "layers"),
        *ENTRY.options[2:],
    ),
)
