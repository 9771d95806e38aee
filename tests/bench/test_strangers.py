"""The bench of other people's models."""

import math

import pytest
from torch.utils._pytree import tree_leaves

from benchmarks import strangers
from support.refusals import refused

pytest.importorskip("pytorchcv")
pytest.importorskip("transformers")


def test_an_unknown_one_is_named_before_anything_is_measured():
    refused(r"expected some of seresnet20_cifar10, .*, got 'lenet'", strangers.run, ("nin_cifar10", "lenet"))


@pytest.mark.parametrize("name", ["nin_cifar10", "shufflenetv2_wd2", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def test_each_trains_and_is_the_same_job_every_time(name):
    job, twin = strangers.job_of(name), strangers.job_of(name)
    for own, other in zip(tree_leaves(job.batch(0)), tree_leaves(twin.batch(0)), strict=True):
        assert own.equal(other)
    for own, other in zip(job.models[0].parameters(), twin.models[0].parameters(), strict=True):
        assert own.equal(other)
    before = [parameter.clone() for parameter in job.models[0].parameters()]
    assert math.isfinite(job.step(job.batch(0)).item())
    assert not all(own.equal(old) for own, old in zip(job.models[0].parameters(), before, strict=True))


@pytest.mark.slow
def test_both_promises_are_measured_in_one_run():
    saved = []
    found = strangers.run(("GPT2LMHeadModel",), rounds=1, block=2, save=saved.append)
    row = found["targets"]["GPT2LMHeadModel"]
    assert set(row["speedup"]) == set(row["contenders"]) == {"eager", "bitwise", "close"}
    assert row["speedup"]["eager"] == 1.0
    assert all(row["said"][numerics]["verdict"] in ("planned", "eager") for numerics in ("bitwise", "close"))
    assert saved
