"""The steps in JAX train as torch's do."""

import pytest

import forked
from benchmarks.contenders import gpt2
from benchmarks.jax_steps import jax_missing, jax_step
from hocket import zoo


def job_of(name):
    if name == "gpt2":
        pytest.importorskip("transformers")
        return gpt2(8)
    return zoo.load(name, **{"mlp": {"depth": 8, "width": 8}, "lstm-cells": {"width": 8, "steps": 3, "vocab": 9}}[name])


@pytest.mark.skipif(bool(jax_missing()), reason=jax_missing())
@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm-cells", "gpt2"))]
)
def test_losses_are_those_of_the_torch_job(name, monkeypatch):
    forked.in_place_of_spawn(monkeypatch)
    job, twin = job_of(name), job_of(name)
    number_of_batches = 4
    step = jax_step(name, twin)
    try:
        for number in range(2 * number_of_batches):
            assert min(step.times_s(1)) > 0.0
            loss = job.step(job.batch(number % number_of_batches)).item()
            assert step.loss == pytest.approx(loss, rel=2e-4)
    finally:
        step.end()
