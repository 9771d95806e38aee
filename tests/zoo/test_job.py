"""Job: what it accepts, what it refuses and in which words, and how it cycles through its batches."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from hocket.errors import HocketError, InputError
from hocket.job import Job


class Twice:
    """Batches that can be iterated again and again, but neither counted nor indexed."""

    def __init__(self, *items: int) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


def parts(**changes):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    usual = {"step": lambda batch: batch, "model": model, "optimizer": optimizer, "batches": [1, 2, 3]}
    return usual | changes


def test_single_model_and_optimizer_become_tuples_of_one():
    job = Job(**parts(name="line"))
    assert job.models == (job.model,)
    assert job.optimizers == (job.optimizer,)
    assert job.name == "line"


def test_lists_of_models_and_optimizers_stay_as_given():
    models = [nn.Linear(2, 1), nn.Linear(1, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    job = Job(**parts(model=models, optimizer=optimizers))
    assert job.models == tuple(models)
    assert job.optimizers == tuple(optimizers)


def test_sequential_model_counts_as_one_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert Job(**parts(model=model)).models == (model,)


def test_job_is_frozen():
    job = Job(**parts())
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.name = "other"


@pytest.mark.parametrize("batches", [[5, 6, 7], (5, 6, 7), Twice(5, 6, 7)], ids=["list", "tuple", "iterable"])
def test_batch_cycles(batches):
    job = Job(**parts(batches=batches))
    assert [job.batch(index) for index in range(7)] == [5, 6, 7, 5, 6, 7, 5]


def test_batch_cycles_through_a_data_loader():
    loader = torch.utils.data.DataLoader(torch.arange(6), batch_size=2)
    job = Job(**parts(batches=loader))
    assert [job.batch(index).tolist() for index in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_batch_cycles_through_a_data_loader_over_a_stream():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(4))

    job = Job(**parts(batches=torch.utils.data.DataLoader(Stream(), batch_size=2)))
    assert [job.batch(index).tolist() for index in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_checking_a_data_loader_draws_no_random_numbers():
    given = parts(batches=torch.utils.data.DataLoader(torch.arange(6), shuffle=True))
    before = torch.get_rng_state()
    Job(**given)
    assert torch.equal(torch.get_rng_state(), before)


def test_negative_index_is_refused():
    with pytest.raises(InputError, match=r"Job\.batch: expected an index of 0 or more, got -1"):
        Job(**parts()).batch(-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": None}, r"Job\.step: expected a function step\(batch\) -> loss, got None"),
        ({"model": 3}, r"Job\.model: expected a torch\.nn\.Module, got a value of type int"),
        ({"model": []}, r"Job\.model: .* got an empty list"),
        ({"model": [nn.Linear(1, 1), None]}, r"Job\.model\[1\]: expected a torch\.nn\.Module, got None"),
        ({"model": nn.Linear}, r"Job\.model: .* got the class Linear itself"),
        ({"optimizer": None}, r"Job\.optimizer: expected a torch\.optim\.Optimizer, got None"),
        ({"optimizer": ()}, r"Job\.optimizer: .* got an empty list"),
        ({"optimizer": torch.optim.SGD}, r"Job\.optimizer: .* got the class SGD itself"),
        ({"batches": []}, r"Job\.batches: expected at least one batch, got none"),
        ({"batches": Twice()}, r"Job\.batches: expected at least one batch, got none"),
        ({"batches": iter([1])}, r"Job\.batches: an iterator is read only once.* use list\(batches\)"),
        ({"batches": {"x": 1}}, r"Job\.batches: expected a sequence of batches, got one dict"),
        ({"batches": None}, r"Job\.batches: expected a sequence of batches, got None"),
        ({"batches": torch.tensor(1.0)}, r"Job\.batches: expected a sequence .* got a value of type Tensor"),
        ({"name": None}, r"Job\.name: expected a string, got None"),
    ],
)
def test_wrong_parts_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        Job(**parts(**changes))


def test_errors_belong_to_one_family():
    with pytest.raises(HocketError):
        Job(**parts(batches=[]))


def test_job_does_not_load_torch():
    code = "import sys, hocket.job; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Counting:
    """Batches 0 to 4 that can only be iterated, and how many were read."""

    def __init__(self):
        self.num_read = 0

    def __iter__(self):
        for number in range(5):
            self.num_read += 1
            yield number


def test_batches_that_are_iterated_are_read_once_a_pass():
    batches = Counting()
    made = Job(**parts(batches=batches))
    batches.num_read = 0
    assert [made.batch(index) for index in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert batches.num_read == 12
    assert [made.batch(index) for index in (12, 12, 14, 11, 3)] == [2, 2, 4, 1, 3]
    assert batches.num_read == 12 + 1 + 2 + 2 + 2
