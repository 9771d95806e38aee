"""Batches that torch's pytree does not see into: objects, dicts of other classes, arrays of numpy."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

import hocket
from hocket.arguments import Arguments
from hocket.pystate.batches import folded, unfolded
from support.steps import update
from support.twins import Program, captured, ran

pytestmark = pytest.mark.usefixtures("one_core")


@dataclasses.dataclass
class Data:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    y: Any


@dataclasses.dataclass(slots=True)
class Slots:
    x: Any
    y: Any


class Own:
    """As a library of graphs has it: attributes by another way."""

    def __init__(self, x: Any, y: Any) -> None:
        self.__dict__["_store"] = {"x": x, "y": y}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_store"][name]
        except KeyError:
            raise AttributeError(name) from None


class Record(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Pair(list[Any]):
    x = property(lambda self: self[0])
    y = property(lambda self: self[1])

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__([x, y])


class Couple(tuple[Any, ...]):
    __slots__ = ()
    x = property(lambda self: self[0])
    y = property(lambda self: self[1])

    def __new__(cls, x: Any, y: Any) -> Couple:
        return super().__new__(cls, (x, y))


class User(collections.UserDict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


def encoding(x: Any, y: Any) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


def features(x: Any, y: Any) -> Any:
    from transformers import BatchFeature

    return BatchFeature({"x": x, "y": y})


KINDS = {
    "dataclass": Data,
    "frozen": Frozen,
    "slots": Slots,
    "Namespace": lambda x, y: argparse.Namespace(x=x, y=y),
    "SimpleNamespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "UserDict": lambda x, y: User(x=x, y=y),
    "dict": lambda x, y: Record(x=x, y=y),
    "list": Pair,
    "tuple": Couple,
    "own": Own,
    "BatchEncoding": encoding,
    "BatchFeature": features,
    "nested": lambda x, y: Data([Data(x, None)], {"y": argparse.Namespace(y=y)}),
}


def unpacked(batch: Any) -> tuple[Any, Any]:
    x, y = batch.x, batch.y
    return (x[0].x if isinstance(x, list) else x), (y["y"].y if isinstance(y, dict) else y)


def _difference(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def program(read: Any = unpacked) -> Any:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def step(batch: Any) -> torch.Tensor:
            x, y = read(batch)
            return update(optimizer, (model(x) - y).square().mean()).detach()

        return Program(step, model, optimizer)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_any_kind_is_seen_through(kind):
    captured(program(), lambda number: KINDS[kind](torch.randn(4, 6), torch.randn(4, 3)))


def test_a_tuple_of_plain_values_beside_an_array_is_folded_as_it_was():
    batch = Arguments((None, (1, "a")), {"x": np.arange(3)})
    seen = unfolded(batch)
    leaves, _ = tree_flatten(seen)
    assert folded(seen.tree, iter(leaves)).args == batch.args


@pytest.mark.parametrize(
    "usual",
    [torch.ones(2), (torch.ones(2), 1), {"a": [None, torch.ones(1)]}, collections.OrderedDict(a=1), 3, "text", None],
    ids=str,
)
def test_what_the_pytree_sees_is_left_alone(usual):
    assert unfolded(usual) is usual


@pytest.mark.parametrize(
    "strange",
    [object(), {1, 2}, nn.Linear(1, 1), lambda: 1, np.array(["text"])],
    ids=lambda value: type(value).__name__,
)
def test_what_is_more_than_it_holds_is_left_alone(strange):
    assert unfolded([strange])[0] is strange


def test_what_refers_to_itself_is_left_alone():
    batch = argparse.Namespace(x=1)
    batch.me = batch
    assert unfolded(batch) is batch


def test_a_number_in_an_object_is_read_anew_and_a_text_makes_another_variant():
    def read(batch: Any) -> Any:
        return batch.x / batch.scale if batch.mode == "a" else batch.x, batch.y

    def batch(number: int) -> Any:
        mode = "a" if number < 14 else "b"
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        return argparse.Namespace(x=x, y=y, scale=number + 0.5, mode=mode)

    captured(program(read), batch, 28)


class Scaled:
    factor = 1.0

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    @property
    def scaled(self) -> torch.Tensor:
        return self.x * self.factor


def test_what_the_class_of_a_batch_says_is_guarded():
    def make() -> Program:
        made = program(lambda batch: (batch.scaled, batch.y))()
        made.between = lambda number: setattr(Scaled, "factor", 1.0 if number < 12 else 2.0)
        return made

    captured(make, lambda number: Scaled(torch.randn(4, 6), torch.randn(4, 3)), 26)


def test_a_batch_that_the_step_writes_to_is_written_to_by_each_step():
    seen: list[bool] = []

    def read(batch: Any) -> Any:
        seen.append(hasattr(batch, "seen"))
        batch.seen = True
        return batch.x, batch.y

    captured(program(read), lambda number: argparse.Namespace(x=torch.randn(4, 6), y=torch.randn(4, 3)))
    assert not any(seen)


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]")


@pytest.mark.parametrize("asks", [False, True])
def test_what_a_tokenizer_gives_may_be_a_batch_also_where_its_encodings_are_read(asks):
    words = tokenizer()

    def make() -> Program:
        model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Any) -> torch.Tensor:
            if asks:
                batch.word_ids(0)
            return update(
                optimizer, (model(batch["input_ids"]) * batch.attention_mask.unsqueeze(2)).square().mean()
            ).detach()

        return Program(step, model, optimizer)

    def batch(number: int) -> Any:
        return words([" ".join("ab"[(number + place) % 2] for place in range(4))] * 3, return_tensors="pt")

    captured(make, batch)


# ------------------------------------------------------------------------------------------------ arrays of numpy


def by_from_numpy(batch: Any) -> Any:
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1]).float()


def by_as_tensor(batch: Any) -> Any:
    return torch.as_tensor(batch[0]), torch.as_tensor(batch[1], dtype=torch.float32)


def by_tensor(batch: Any) -> Any:
    return torch.tensor(batch[0]), torch.tensor(batch[1], dtype=torch.float32)


def by_asarray(batch: Any) -> Any:
    return torch.asarray(batch[0]), torch.asarray(batch[1], dtype=torch.float32)


def by_constructors(batch: Any) -> Any:
    return torch.Tensor(batch[0][:, :]), torch.zeros(()).new(batch[1]).float()


def by_collating(batch: Any) -> Any:
    x, y = torch.utils.data.default_convert(batch)
    return x, y.float()


def of_its_shape(batch: Any) -> Any:
    assert len(batch[0]) == batch[0].shape[0]
    assert (batch[0].dtype, isinstance(batch[0], np.ndarray)) == (np.float32, True)
    return torch.from_numpy(batch[0]), torch.zeros(batch[1].shape)


def arrays(number: int) -> list[Any]:
    x = np.random.default_rng(number).standard_normal((4, 6)).astype(np.float32)
    return [x, np.full((4, 3), number % 2, dtype=np.int64)]


READERS = [by_from_numpy, by_as_tensor, by_tensor, by_asarray, by_constructors, by_collating, of_its_shape]


@pytest.mark.parametrize("read", READERS)
def test_tensors_made_of_arrays_of_the_batch_are_followed(read):
    captured(program(read), arrays)


def test_arrays_that_must_not_be_written_to_are_followed_without_a_warning(recwarn):
    def batch(number: int) -> Any:
        found = arrays(number)
        found[0].flags.writeable = False
        return found

    captured(program(by_tensor), batch)
    assert not [each for each in recwarn if "writable" in str(each.message)]


COMPUTED = ["ufunc", "index", "method", "float", "branch", "function", "size", "text"]


def computed(also: str) -> Any:
    """A reader of a batch that computes with one of its arrays."""

    def read(batch: Any) -> Any:
        x, y = batch
        found = torch.as_tensor(y, dtype=torch.float32)
        match also:
            case "ufunc":
                return torch.from_numpy(x / 2), found
            case "index":
                return torch.from_numpy(x[:, list(range(x.shape[1]))]), found
            case "method":
                return torch.from_numpy(x.clip(0)), found
            case "float":
                return torch.from_numpy(x) * (1 / float(y[0, 0] + 1)), found
            case "branch":
                return torch.from_numpy(x) * (2 if (x > 1e9).any() else 1), found
            case "function":
                return torch.from_numpy(np.concatenate([x])), found
            case "size":
                return torch.from_numpy(x) * len(torch.Tensor(y[0, :1].reshape(()))), found
            case _:
                return torch.from_numpy(x), found + len(str(x)) * 0

    return read


@pytest.mark.parametrize("also", COMPUTED)
def test_a_first_statement_that_computes_with_an_array_stays_python(also):
    captured(program(computed(also)), arrays)


@pytest.mark.parametrize("also", COMPUTED)
def test_a_step_that_computes_with_an_array_is_planned_or_says_why_not(also):
    def make() -> Program:
        found = program()()
        read = computed(also)

        def step(batch: Any) -> torch.Tensor:
            return update(found.optimizer, _difference(found.model, *read(batch))).detach()

        return Program(step, found.model, found.optimizer)

    fast = ran(make, arrays)
    if also in ("float", "size", "text"):
        assert "computes with a numpy array" in fast.why
        assert "test_kinds_of_batches.py:" in fast.why
    else:
        assert fast._pool.current.captured is not None


def test_the_step_returns_its_own_array():
    one = program(by_from_numpy)()
    inner, kept = one.step, arrays(0)
    fast = hocket.schedule(
        lambda batch: (inner(batch), batch[0])[1], one.model, one.optimizer, guard=False, cache=False
    )
    for _ in range(9):
        assert fast(kept) is kept[0]


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_named_tuple_that_the_step_makes_anew_is_seen_through():
    """Its class is met in the step's variables: the getters of its fields are values."""

    def read(batch: Any) -> Any:
        kind, found = Named, Named(*batch)
        assert kind is type(found)
        return found.x, found.y

    captured(program(read), lambda number: [torch.randn(4, 6), torch.randn(4, 3)])
