"""Ranks of a job on real devices train what one process trains on one."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from distributed import training
from distributed.ranks import Ranks
from distributed.training import rank_of_job, tensors_of, together

pytestmark = pytest.mark.gpu

JOB = (1, 4, "sgd", False, "layer")  # servers, steps, optimizer, clipped, order


def on_device(index: int, patch: Any = setattr) -> None:
    """Let jobs of this process make their models and batches on a device."""
    patch(training, "training", partial(_moved, training.training, index))
    patch(training, "batches", partial(_moved, training.batches, index))


def rank_on_device(rank: int, say: Any, *arguments: Any) -> Any:
    on_device(rank % torch.cuda.device_count())
    return rank_of_job(rank, say, *arguments)


def _moved(make: Any, index: int, *given: Any, **options: Any) -> Any:
    made = make(*given, **options)
    if not isinstance(made, list):
        made.model.cuda(index)
        return made
    return [tuple(tensor.cuda(index) for tensor in batch) for batch in made]


def test_a_job_on_gpus_trains_as_one_process(monkeypatch):
    with Ranks(rank_on_device, 3, *JOB) as ranks:
        first, second, steps = ranks.returned(120)
    on_device(0, monkeypatch.setattr)
    one = training.training("sgd")
    losses = together(one, 2, 4)
    assert steps == 4
    assert np.allclose(losses, [first[0], second[0]], rtol=1e-9)
    for name, value in tensors_of(one).items():
        assert np.allclose(first[3][name], value, rtol=1e-9, atol=1e-9), name
