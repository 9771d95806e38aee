"""A schedule has the names, the signature and the attributes of its step, and binds to instances as a function does."""

import copy
import functools
import inspect
import pickle
import typing
import weakref

import pytest
import torch
from torch import nn

import hocket
from support.refusals import refused
from support.steps import update


def parts(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    return update(optimizer, model(batch).square().mean()).detach()


def assert_captured(fast: hocket.Schedule) -> None:
    """Some calls make a graph of the step."""
    for _ in range(12):
        fast(torch.randn(3, 4))
    assert fast._pool.current.captured is not None, fast.why


class Trainer:
    def __init__(self, seed: int = 0) -> None:
        self.model, self.optimizer = parts(seed)

    @hocket.scheduled(lambda self: self.model, lambda self: self.optimizer, guard=False, cache=False)
    def training_step(self, batch: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """One step."""
        return train(self.model, self.optimizer, batch * scale)

    def plain_step(self, batch: torch.Tensor) -> torch.Tensor:
        return train(self.model, self.optimizer, batch)


def made() -> tuple[hocket.Schedule, object]:
    model, optimizer = parts()

    def step(batch: torch.Tensor, scale: float = 1.0, *, shift: int = 0) -> torch.Tensor:
        """Trains."""
        return train(model, optimizer, batch * scale + shift)

    step.metric = "loss"  # type: ignore[attr-defined]
    return hocket.schedule(step, model, optimizer, cache=False), step


def test_it_looks_like_its_step():
    fast, step = made()
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__code__", "__defaults__", "__kwdefaults__"):
        assert getattr(fast, name) == getattr(step, name), name
    assert fast.__annotations__ is step.__annotations__
    assert fast.__globals__ is globals()
    assert fast.__wrapped__ is step
    assert fast.metric == "loss"
    assert inspect.signature(fast) == inspect.signature(step)
    assert inspect.getsource(fast) == inspect.getsource(step)
    assert inspect.unwrap(fast) is step
    assert typing.get_type_hints(fast)["scale"] is float
    assert functools.wraps(fast)(lambda *args: None).__name__ == "step"
    assert callable(fast)
    assert "step" in repr(fast)
    with pytest.raises(AttributeError, match="'Schedule' object has no attribute 'unknown'"):
        _ = fast.unknown


@pytest.mark.parametrize("kind", ["partial", "callable object", "lambda"])
def test_of_a_step_that_has_no_name_the_type_is_named(kind):
    model, optimizer = parts()

    class Step:
        """A step."""

        def __call__(self, batch):
            return train(model, optimizer, batch)

    step = {
        "partial": functools.partial(train, model, optimizer),
        "callable object": Step(),
        "lambda": lambda batch: train(model, optimizer, batch),
    }[kind]
    fast = hocket.schedule(step, model, optimizer, cache=False)
    assert fast.__name__ == {"partial": "partial", "callable object": "Step", "lambda": "<lambda>"}[kind]
    assert list(inspect.signature(fast).parameters) == ["batch"]
    assert hasattr(fast, "__code__") == (kind == "lambda")


def test_a_bound_method_shows_its_code_and_its_owner():
    trainer = Trainer()
    fast = hocket.schedule(trainer.plain_step, trainer.model, trainer.optimizer, cache=False)
    assert fast.__code__ is Trainer.plain_step.__code__
    assert fast.__self__ is trainer
    assert list(inspect.signature(fast).parameters) == ["batch"]


def is_overridden(instance: object, parent: type, name: str) -> bool:
    """The question of a framework: does the class of this instance define the method anew?"""
    attribute = getattr(instance, name)
    while hasattr(attribute, "__wrapped__"):
        attribute = attribute.__wrapped__
    return attribute.__code__ is not getattr(parent, name).__code__


class Framework(nn.Module):
    def training_step(self, batch):
        raise NotImplementedError


@pytest.mark.parametrize("place", ["instance", "class body", "class, later"])
def test_a_framework_finds_the_method_overridden_and_calls_it(place):
    class Net(Framework):
        def __init__(self):
            super().__init__()
            self.layer, self.optimizer = parts()
            if place == "instance":
                self.training_step = hocket.schedule(self.training_step, self, self.optimizer, guard=False, cache=False)

        def training_step(self, batch):
            return train(self.layer, self.optimizer, batch)

        if place == "class body":
            training_step = hocket.scheduled(lambda self: self, lambda self: self.optimizer, guard=False, cache=False)(
                training_step
            )

    net = Net()
    if place == "class, later":
        Net.training_step = hocket.schedule(Net.training_step, net, net.optimizer, guard=False, cache=False)
    assert is_overridden(net, Framework, "training_step")
    assert net.training_step.__code__ is inspect.unwrap(Net.training_step).__code__
    assert list(inspect.signature(net.training_step).parameters) == ["batch"]
    layer, optimizer = parts()
    for _ in range(12):
        batch = torch.randn(3, 4)
        assert torch.equal(net.training_step(batch), train(layer, optimizer, batch))
    assert torch.equal(net.layer.weight, layer.weight)
    assert net.training_step._pool.current.captured is not None, net.training_step.why
    assert net.training_step is net.training_step


def test_a_framework_finds_the_method_before_the_instance_has_its_optimizer():
    class Net(Framework):
        @hocket.scheduled(lambda self: self.layer, lambda self: self.optimizer, guard=False, cache=False)
        def training_step(self, batch):
            return train(self.layer, self.optimizer, batch)

    net = Net()
    assert is_overridden(net, Framework, "training_step")
    with pytest.raises(AttributeError, match="no attribute 'layer'"):
        net.training_step(torch.randn(3, 4))
    net.layer, net.optimizer = parts()
    assert_captured(net.training_step)


def test_each_instance_trains_itself_by_a_schedule_of_its_own():
    trainers, twins = [Trainer(seed) for seed in range(2)], [Trainer(seed) for seed in range(2)]
    schedules = [trainer.training_step for trainer in trainers]
    assert schedules[0] is not schedules[1]
    assert isinstance(schedules[0], hocket.Schedule)
    for number in range(12):
        batch = torch.randn(3, 4)
        for trainer, twin in zip(trainers, twins, strict=True):
            result = (
                trainer.training_step(batch, scale=2.0) if number % 2 else Trainer.training_step(trainer, batch, 2.0)
            )
            assert torch.equal(result, train(twin.model, twin.optimizer, batch * 2.0))
    assert Trainer.training_step.__doc__ == "One step."
    assert all(torch.equal(a.model.weight, b.model.weight) for a, b in zip(trainers, twins, strict=True))


def test_instances_are_freed_with_their_schedules():
    trainer = Trainer()
    trainer.training_step(torch.randn(3, 4))
    gone = weakref.ref(trainer)
    del trainer
    import gc

    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("method", [staticmethod, classmethod], ids=lambda kind: kind.__name__)
def test_it_can_be_a_static_and_a_class_method(method):
    net, opt = parts()

    class Static:
        if method is staticmethod:

            @staticmethod
            @hocket.scheduled(net, opt, cache=False)
            def training_step(batch):
                return train(net, opt, batch)
        else:
            model = net

            @classmethod
            def training_step(cls, batch):
                return train(cls.model, opt, batch)

    if method is classmethod:
        Static.training_step = hocket.schedule(Static.training_step, net, opt, cache=False)
    before = net.weight.detach().clone()
    Static.training_step(torch.randn(3, 4))
    between = net.weight.detach().clone()
    Static().training_step(torch.randn(3, 4))
    assert not torch.equal(before, between)
    assert not torch.equal(between, net.weight)


def test_a_subclass_calls_the_step_of_its_base():
    class Further(Trainer):
        def training_step(self, batch):
            return super().training_step(batch) * 2

    mine, twin = Further(), Trainer()
    batch = torch.randn(3, 4)
    assert torch.equal(mine.training_step(batch), train(twin.model, twin.optimizer, batch) * 2)


class Slotted:
    __slots__ = ("model", "optimizer")
    training_step = Trainer.training_step


def test_an_instance_without_a_dict_is_told_so():
    with pytest.raises(AttributeError, match=r"a Slotted has no __dict__ that could hold its schedule"):
        _ = Slotted().training_step


def test_the_decorator_of_a_function_is_a_schedule():
    model, optimizer = parts()

    @hocket.scheduled(model, optimizer, planner="serial", guard=False, cache=False)
    def step(batch):
        return train(model, optimizer, batch)

    assert isinstance(step, hocket.Schedule)
    assert_captured(step)
    refused("unknown planner 'fastest'", hocket.scheduled(model, optimizer, planner="fastest"), step.__wrapped__)


def test_a_decorator_without_its_arguments_is_refused_by_the_first_call():
    @hocket.scheduled
    def step(batch):
        raise AssertionError

    refused(r"scheduled: expected a step, got Tensor; write @scheduled\(model, optimizer", step, torch.ones(3, 4))


def test_a_copy_of_an_owner_trains_itself():
    trainer = Trainer()
    trainer.training_step(torch.randn(3, 4))
    copied = copy.deepcopy(trainer)
    before = trainer.model.weight.detach().clone()
    copied.training_step(torch.randn(3, 4))
    assert torch.equal(before, trainer.model.weight)
    assert not torch.equal(before, copied.model.weight)


def test_a_copy_of_an_owner_that_holds_the_schedule_has_its_own_plain_step():
    trainer = Trainer()
    trainer.plain_step = hocket.schedule(trainer.plain_step, trainer.model, trainer.optimizer, cache=False)
    copied = copy.deepcopy(trainer)
    assert copied.plain_step == Trainer.plain_step.__get__(copied)
    assert copy.copy(trainer.plain_step) is trainer.plain_step


def test_what_owns_a_schedule_is_pickled_without_it():
    trainer = Trainer()
    trainer.training_step(torch.randn(3, 4))
    trainer.plain_step = hocket.schedule(trainer.plain_step, trainer.model, trainer.optimizer, cache=False)
    again = pickle.loads(pickle.dumps(trainer))
    before = trainer.model.weight.detach().clone()
    assert torch.equal(again.model.weight, before)
    assert again.plain_step == Trainer.plain_step.__get__(again)
    again.training_step(torch.randn(3, 4))
    assert torch.equal(trainer.model.weight, before)
    assert not torch.equal(again.model.weight, before)
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(made()[0])


def test_a_step_that_reaches_its_own_schedule_is_captured():
    """A trainer that holds its schedule: what that does changes in each call, and is no part of the step."""
    trainer = Trainer()
    trainer.plain_step = hocket.schedule(trainer.plain_step, trainer.model, trainer.optimizer, guard=False, cache=False)

    class Holder:
        def __init__(self):
            self.plain_step = trainer.plain_step
            self.trainer = trainer

        def step(self, batch):
            assert getattr(self.trainer, "plain_step") is self.plain_step  # noqa: B009  # by a computed name
            return train(self.trainer.model, self.trainer.optimizer, batch)

    fast = hocket.schedule(Holder().step, trainer.model, trainer.optimizer, guard=False, cache=False)
    assert_captured(fast)
