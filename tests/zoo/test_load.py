"""The registry and load(): names, options, errors, and what is left of the caller's random numbers."""

import math
import random
import sys

import numpy as np
import pytest
import torch

from hocket import zoo
from hocket.errors import HocketError, InputError
from tiny_sizes import TINY_SIZES


def test_entries_have_a_name_each_and_cannot_be_changed():
    entries = zoo.entries()
    assert set(entries) == set(TINY_SIZES)
    assert all(entry.name == name for name, entry in entries.items())
    with pytest.raises(TypeError):
        entries["other"] = entries["mlp"]


def test_every_entry_says_what_it_is_in_one_line():
    for entry in zoo.entries().values():
        assert entry.summary
        assert "\n" not in entry.summary
        assert entry.source[-4:].isdigit(), "a source ends with its year"
        assert (entry.package is None) == (entry.extra is None)
        assert entry.extra in {None, "zoo", "demo"}
        assert all(option.summary and option.default >= option.minimum for option in entry.options)


def test_defaults_are_the_entrys_own():
    job = zoo.load("mlp")
    assert job.name == "mlp"
    assert len(job.batches) == 8
    assert job.batch(0)[0].shape == (32, 256)
    assert isinstance(job.optimizer, torch.optim.SGD)
    assert job.optimizer.param_groups[0]["lr"] == zoo.entries()["mlp"].lr


def test_sizes_batches_and_rate_are_as_asked():
    job = zoo.load("mlp", batch_size=5, num_batches=3, lr=0.25, depth=2, width=16)
    assert len(job.batches) == 3
    assert job.batch(0)[0].shape == (5, 16)
    assert sum(isinstance(module, torch.nn.Linear) for module in job.model.modules()) == 3
    assert job.optimizer.param_groups[0]["lr"] == 0.25


def test_numbers_of_numpy_are_numbers():
    assert zoo.load("mlp", width=np.int64(16), depth=1).batch(0)[0].shape == (32, 16)


def test_unknown_name_lists_near_ones_and_the_command():
    with pytest.raises(InputError, match=r"'resnet-50': did you mean .*resnet50.*\? `hocket zoo` lists"):
        zoo.load("resnet-50")
    with pytest.raises(InputError, match=r"^no zoo entry is called 'xyzzy': `hocket zoo` lists them all$"):
        zoo.load("xyzzy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 8}, r"mlp: unknown option 'image_size': it takes depth, width"),
        ({"width": 0}, r"mlp: width: expected a whole number of at least 1, got 0"),
        ({"width": 1.5}, r"mlp: width: expected a whole number of at least 1, got 1\.5"),
        ({"width": True}, r"mlp: width: expected a whole number of at least 1, got True"),
        ({"batch_size": 0}, r"mlp: batch_size: expected a whole number of at least 1, got 0"),
        ({"num_batches": "8"}, r"mlp: num_batches: expected a whole number of at least 1, got '8'"),
        ({"seed": -1}, r"mlp: seed: expected a whole number from 0 to \d+, got -1"),
        ({"optimizer": "lion"}, r"optimizer: expected one of sgd, adam, adamw, got 'lion'"),
        *(
            ({"lr": lr}, f"lr: expected a positive number, got {lr!r}")
            for lr in (0, -1, math.inf, math.nan, True, "0.1")
        ),
        ({"device": "abacus"}, r"mlp: device: expected one such as 'cpu' or 'cuda:0', got 'abacus'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(InputError, match=message):
        zoo.load("mlp", **arguments)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("dcgan", {"image_size": 24}, r"dcgan: image_size: expected a power of two, got 24"),
        ("transformer", {"width": 30, "heads": 4}, r"transformer: width: expected an even multiple of heads"),
        ("transformer", {"width": 3, "heads": 1}, r"transformer: width: expected an even multiple of heads"),
        ("bert-tiny", {"width": 100}, r"bert-tiny: width: expected a multiple of 64, got 100"),
        ("inception-v3", {"image_size": 64}, r"inception-v3: image_size: .* at least 75, got 64"),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, size, message):
    with pytest.raises(InputError, match=message):
        zoo.load(name, **size)


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("digits-cnn", "sklearn.datasets", r"^digits-cnn needs scikit-learn: pip install 'hocket\[demo\]'$"),
        ("resnet20", "pytorchcv.models.resnet_cifar", r"^resnet20 needs pytorchcv: pip .*'hocket\[zoo\]'$"),
        ("vgg16", "pytorchcv.models.vgg", r"^vgg16 needs pytorchcv: pip .*'hocket\[zoo\]'$"),
        ("bert-tiny", "transformers.models.bert", r"^bert-tiny needs transformers: pip .*'hocket\[zoo\]'$"),
    ],
)
def test_absent_package_names_the_install_command(monkeypatch, name, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(HocketError, match=message) as caught:
        zoo.load(name)
    assert "\n" not in str(caught.value)


def test_random_numbers_of_the_caller_go_on_undisturbed():
    torch.manual_seed(5)
    numpy_before = np.random.get_state()[1].copy()  # noqa: NPY002
    python_before, before = random.getstate(), torch.get_rng_state()
    zoo.load("mlp", seed=1, depth=1, width=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numpy_before).all()  # noqa: NPY002
    assert random.getstate() == python_before


def test_random_numbers_are_put_back_also_after_an_error():
    before = torch.get_rng_state()
    with pytest.raises(InputError):
        zoo.load("dcgan", image_size=24)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_callers_default_device_does_not_matter():
    with torch.device("meta"):
        job = zoo.load("mlp", depth=1, width=8)
    assert {parameter.device.type for parameter in job.model.parameters()} == {"cpu"}
    assert job.batch(0)[0].device.type == "cpu"


def test_another_seed_gives_other_weights_and_batches():
    first, second = zoo.load("mlp", seed=1), zoo.load("mlp", seed=2)
    assert not torch.equal(next(first.model.parameters()), next(second.model.parameters()))
    assert not torch.equal(first.batch(0)[0], second.batch(0)[0])
