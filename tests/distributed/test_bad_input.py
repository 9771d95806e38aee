"""Unusual or wrong input of a job: it is as in one process, or refused by name at all ranks."""

import json
import resource
import threading

import numpy as np
import pytest
import torch
from torch import nn

from distributed.agents import TIMEOUT_S, Counting, rank_that_publishes
from distributed.faulty import serve, work
from distributed.ranks import Ranks, returned
from distributed.training import OPTIMIZERS, Net, Training, batches, check_as_together, tensors_of, training
from hocket import distribute
from hocket.distributed.agent_server import JOB_KEY
from hocket.distributed.description import digest
from hocket.errors import PeerError, StaleCaptureError
from support.refusals import fails


class Empty(Net):
    """Tied weights, and a parameter and a buffer without a byte."""

    def __init__(self) -> None:
        super().__init__(40)
        self.nothing = nn.Parameter(torch.zeros(0, 40).double())
        self.register_buffer("no_numbers", torch.zeros(0).double())

    def forward(self, x):
        return super().forward(x) + self.nothing.sum() + self.no_numbers.sum()


def unusual() -> Training:
    torch.manual_seed(3)
    model = Empty()
    return Training(model, OPTIMIZERS["adam"](model.parameters()))


def train(rank, say, steps, nan_at):
    """Worker 1 has a batch that is not a number."""
    of = unusual()
    if rank == 2:
        return serve(of)
    losses = []
    with work(of) as fast:
        for step, (x, y) in enumerate(batches(rank, steps)):
            losses.append(fast((x * float("nan") if rank == 1 and step == nan_at else x, y)).item())
        fast.gather()
    return losses, tensors_of(of)


def test_tied_and_zero_byte_parameters_train_as_in_one_process():
    (_, found), _, steps = returned(train, 3, 4, None)
    assert steps == 4
    check_as_together(found, unusual(), 2, 4)
    assert found["nothing"].shape == (0, 40)


@pytest.mark.slow
def test_a_gradient_that_is_not_a_number_reaches_all_as_in_one_process():
    (first, found), (second, its), steps = returned(train, 3, 4, 2)
    assert steps == 4
    assert np.isnan(first).tolist() == [False, False, False, True]
    assert np.isnan(second).tolist() == [False, False, True, True]
    for name in ("first.weight", "middle.weight", "last.bias"):
        assert np.isnan(found[name]).all(), name
        assert np.isnan(its[name]).all(), name
    assert found["0.step"] == 4.0


def too_many_servers(rank, say):
    of = unusual()
    of.clip = True
    if rank > 0:
        return serve(of, num_servers=2)
    with work(of, num_servers=2) as fast:
        fast(batches(rank, 1)[0])


@pytest.mark.slow
def test_more_servers_than_shards_are_refused_at_all_ranks():
    with Ranks(too_many_servers, 3) as ranks:
        for rank in range(3):
            assert "2 servers, and the step has 1 shards for them" in ranks.raised(rank)


def branching(rank, say):
    """Calls on a batch whose values lead the step along another branch, in between others."""
    of = training(width=20)

    def step(batch):
        x, _ = batch
        if x.sum() > 1e6:
            return of.step(batch) * 2.0
        return of.step(batch)

    if rank == 1:
        return distribute.server(step, of.model, of.optimizer, batches(0, 1)[0], timeout_s=TIMEOUT_S)
    found = []
    with distribute.worker(step, of.model, of.optimizer, timeout_s=TIMEOUT_S, executor="python") as fast:
        for x, y in batches(0, 3):
            found.append(fast((x, y)).item())
            fails(StaleCaptureError, "branches on", fast, (x + 1e6, y))
        fast.gather()
    return found, tensors_of(of)


def test_a_step_that_is_refused_for_its_batch_was_ordered_of_nobody():
    (losses, found), steps = returned(branching, 2)
    assert steps == 3
    assert np.allclose(losses, check_as_together(found, training(width=20), 1, 3)[0], rtol=1e-12, atol=0)


def counting(rank, say):
    """An update that takes another branch at its sixth step."""
    of = training(width=20)
    of.optimizer = torch.optim.RAdam(of.model.parameters())
    if rank == 1:
        return serve(of)
    with work(of) as fast:
        for batch in batches(rank, 8):
            fast(batch)


def test_an_update_that_takes_another_branch_names_its_number():
    with Ranks(counting, 2) as ranks:
        for rank in range(2):
            assert ".step" in (said := ranks.raised(rank))
            assert "run eager steps before the capture until it stays" in said


def meet_a_liar(rank, say, address, message):
    """An agent of a job that says something of itself that is not so; how much memory the agent took."""
    model = Counting().eval()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fails(PeerError, message, distribute.agent, model, address, timeout_s=TIMEOUT_S)
    assert not [thread for thread in threading.enumerate() if "hocket" in thread.name]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def test_what_a_job_says_of_itself_is_checked_before_memory_is_taken():
    with Ranks(rank_that_publishes, 2, 1, 1, [("begin", 1), ("end", 0)]) as ranks:
        ranks.store.set("begin", "")
        ranks.heard(0, "begin")
        truth = json.loads(ranks.store.get(JOB_KEY))
        values = truth["values"]
        huge = [[*value[:2], 1 << 50, *value[3:]] if value[0] == "layers.1" else value for value in values]
        for lie, message in (
            ({**truth, "torch": "2.0.1"}, r"the job runs torch 2\.0\.1, and this is 2\."),
            ({**truth, "values": huge}, r"'layers.1' is float64 \(200, 200\) here"),
            ({**truth, "values": [*values, ["more", "float64 (9,)", "72", 0, True]]}, "something unknown of a value"),
            (
                {**truth, "values": [*values, ["more", "float64 (9,)", 1 << 60, 0, False]]},
                "'fixed:more' of .* too much",
            ),
            ([], "does not answer as a job"),
        ):
            ranks.store.set(JOB_KEY, json.dumps(lie))
            (grown_kib,) = returned(meet_a_liar, 1, f"127.0.0.1:{ranks.store.port}", message)
            assert grown_kib < 64 << 10
        ranks.store.set("end", "")
        ranks.returned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_tensor_of_one_element_has_bytes_whatever_its_stride(dtype):
    one = torch.ones(2, 2, dtype=dtype)[:1, 0]
    assert one.stride() == (2,)
    assert digest(one) == digest(one.clone())
