"""Language models that look for padding in their batch: captured, and right for batches padded otherwise."""

import functools

import pytest
import torch

from equivalence.compare import Planned, assert_same, check_twins, copied, twins
from equivalence.test_strangers import LANGUAGE, SMALL, own_loss_job
from hocket.job import Job
from quick import covering

pytest.importorskip("transformers")

MODELS = {
    **{name: LANGUAGE[name] for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration")},
    "BertForMaskedLM": SMALL | {"max_position_embeddings": 12},
}


def padded_batch(seed: int, shortest: int) -> dict[str, torch.Tensor]:
    """Two rows of six words, of which the first has `shortest` words and then padding."""
    words = torch.randint(3, 13, (2, 6), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, shortest:] = 0
    return {
        "input_ids": words.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def padded_job(name: str, attention: str, batches: list[dict[str, torch.Tensor]], *, cache: bool = False) -> Job:
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class(**MODELS[name], attn_implementation=attention)
    config.use_cache = cache
    return own_loss_job(kind(config).train(), batches)


@pytest.mark.parametrize(
    ("name", "attention"),
    covering([pytest.param(name, marks=[pytest.mark.slow] * (name[0] == "T")) for name in MODELS], ["sdpa", "eager"]),
)
def test_padded_batches_are_stepped_by_one_capture(name, attention):
    batches = [padded_batch(seed, shortest=2 + seed) for seed in range(4)]
    captured = check_twins(functools.partial(padded_job, name, attention, batches))
    assert captured.holds(padded_batch(9, shortest=4))
    looks = bool(captured.trace.batch_guards.parts)
    assert looks or attention == "eager", "nobody looked for padding"
    full = padded_batch(9, shortest=6)
    assert (captured.begin(full) is None) == looks


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name[0] != "G")) for name in MODELS])
def test_batches_without_padding_between_them_are_captured_anew(name):
    batches = [padded_batch(seed, shortest=6 if seed in (0, 3) else 4) for seed in range(4)]
    check_twins(functools.partial(padded_job, name, "sdpa", batches), captures=3)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_a_cache_that_the_model_fills_on_the_way_changes_nothing(name):
    batches = [padded_batch(seed, shortest=2 + seed) for seed in range(3)]
    check_twins(functools.partial(padded_job, name, "sdpa", batches, cache=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_with_another_kind_of_padding_is_stale_and_changes_nothing(name):
    batches = [padded_batch(0, shortest=3), padded_batch(1, shortest=6)]
    job = twins(functools.partial(padded_job, name, "sdpa", batches)).planned
    job.step(job.batch(0))
    captured = Planned(job).capture(job.batch(0))
    before = copied(job)
    assert captured.fits(job.batch(1))
    assert captured.begin(job.batch(1)) is None
    assert_same(before, copied(job))
