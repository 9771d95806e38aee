"""Models that leave, move and come in everything at once: array, optimizer, scheduler, scaler, random numbers."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from hocket.errors import InputError
from hocket.optim import ModelSlots, TrainedModel
from support.refusals import refused

RATES = [0.01, 0.03, 0.02]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


class Training:
    """Models in training, with dropout from generators of their own, a schedule each and a scale each."""

    def __init__(self, models, rates, seeds, separate=()):
        self.array = hocket.fuse(models, backend="rule", seeds=seeds, shared=True, separate=separate)
        self.optimizer = hocket.optim.Adam(self.array.parameters(), lr=rates)
        periods = [3 + model for model in range(len(models))]
        self.scheduler = hocket.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=periods)
        self.scaler = hocket.optim.GradScaler(len(models), init_scale=8.0, growth_interval=3)
        self.slots = ModelSlots(self.array, self.optimizer, self.scheduler, self.scaler)

    def step(self, number):
        torch.manual_seed(1000 + number)
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
        self.optimizer.zero_grad()
        losses = self.array.loss(F.cross_entropy, self.array(x), y)
        self.scaler.scale(losses).sum().backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return losses.detach()

    def all_of(self, model):
        state = self.slots.state(model)
        tensors = [*state.module.state_dict().values(), *state.generators.values()]
        for entries in state.optimizers[0]["state"].values():
            tensors += entries.values()
        return tensors, state.optimizers[0]["param_groups"], state.schedulers, state.scaler, state.seed


def same(first, second):
    for one, other in zip(first[0], second[0], strict=True):
        assert torch.equal(one, other)
    assert first[1:] == second[1:]


def training(models=(0, 1, 2), **more):
    return Training(
        [net(model) for model in models], [RATES[model] for model in models], [7 + m for m in models], **more
    )


@pytest.mark.parametrize("separate", [(), ("4",)], ids=["fused", "partly"])
@pytest.mark.parametrize("kept", [[0, 2], [2, 0, 1], [1]])
def test_models_that_are_kept_go_on_bit_for_bit(kept, separate):
    changed, untouched = training(separate=separate), training(separate=separate)
    for number in range(3):
        changed.step(number)
        untouched.step(number)
    changed.slots.take(kept)
    assert changed.array.num_models == changed.optimizer.num_models == changed.scaler.num_models == len(kept)
    for number in range(3, 8):
        changed.step(number)
        untouched.step(number)
    for slot, model in enumerate(kept):
        own, other = changed.all_of(slot), untouched.all_of(model)
        for one, reference in zip(own[0], other[0], strict=True):
            # Batched products of other numbers of matrices may round otherwise.
            torch.testing.assert_close(one, reference, rtol=1e-12, atol=1e-13)
        assert own[1:] == other[1:]
    assert changed.scheduler.epochs == [8] * len(kept)


@pytest.mark.parametrize("separate", [(), ("4",)], ids=["fused", "partly"])
def test_a_model_that_was_taken_out_goes_on_where_it_stopped(separate):
    """Model 1 pauses for three steps: its weights, moments, epoch, scale and random numbers are those it left with."""
    paused, untouched = training(separate=separate), training(separate=separate)
    for number in range(3):
        paused.step(number)
        untouched.step(number)
    gone = paused.slots.refill(1, net(9), seed=99, lr=0.5)
    kept = copy.deepcopy(gone)
    assert paused.scheduler.epochs == [3, 0, 3]
    for number in range(10, 13):
        paused.step(number)
    back = paused.slots.refill(1, gone)
    assert [epoch["last_epoch"] for epoch in back.schedulers[0]["schedulers"]] == [3]
    assert paused.scheduler.epochs == [6, 3, 6]
    same(paused.all_of(1), untouched.all_of(1))
    for number in range(3, 7):
        paused.step(number)
        untouched.step(number)
    same(paused.all_of(1), untouched.all_of(1))
    for one, other in zip(gone.module.state_dict().values(), kept.module.state_dict().values(), strict=True):
        assert torch.equal(one, other), "what was taken out is a copy"


def test_a_refilled_slot_trains_as_a_new_training_would():
    changed, untouched = training(), training()
    for number in range(4):
        changed.step(number)
        untouched.step(number)
    changed.slots.refill(1, net(5), seed=50, lr=0.04)
    alone = Training([net(5), net(5)], [0.04, 0.04], [50, 50])
    alone.scheduler.refill(0, T_max=4)
    for number in range(4, 9):
        changed.step(number)
        untouched.step(number)
        alone.step(number)
    own, other = changed.all_of(1), alone.all_of(0)
    for one, reference in zip(own[0], other[0], strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-12, atol=1e-13)
    assert own[1:] == other[1:]
    for model in (0, 2):
        same(changed.all_of(model), untouched.all_of(model))


def test_a_refill_that_does_not_fit_changes_nothing():
    run = training()
    run.step(0)
    before = [run.all_of(model) for model in range(3)]
    state = run.slots.state(0)
    for arguments, options, match in (
        ((1, nn.Linear(4, 3).double()), {"seed": 1}, "refill: the new model differs|differ"),
        ((1, net(1)), {}, "seed: expected a number"),
        ((1, net(1)), {"seed": 1, "lr": -1.0}, "lr: expected numbers >= 0, got -1.0"),
        ((1, net(1)), {"seed": 1, "rate": 1.0}, "refill: expected options among lr"),
        ((3, net(1)), {"seed": 1}, "model: expected a slot from 0 to 2, got 3"),
    ):
        refused(match, run.slots.refill, *arguments, **options)
    lonely = ModelSlots(run.array, run.optimizer)
    refused("expected a model of 1 optimizers and 0 schedulers, got one of 1 and 1", lonely.refill, 1, state)
    for match, models in (("at most once, got \\[1, 1\\]", [1, 1]), ("at least one model", []), ("got 4", [0, 4])):
        refused(match, run.slots.take, models)
    for model in range(3):
        same(before[model], run.all_of(model))


def test_what_is_not_of_the_same_models_is_refused():
    run, other = training(), training((0, 1))
    with pytest.raises(InputError, match=r"expected optimizers, schedulers and scaler of 3 models, got \[2\]"):
        ModelSlots(run.array, other.optimizer)
    run.step(0)
    run.array.drop(1)
    refused(r"expected optimizers, schedulers and scaler of 2 models, got \[3, 3, 3\]", run.slots.drop, 0)
    single = hocket.fuse([net(0)])
    slots = ModelSlots(single, hocket.optim.SGD(single.parameters(), lr=0.1))
    refused("drop: only one model is left", slots.drop, 0)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_an_optimizer_that_does_not_know_of_a_drop_says_so(name):
    array = hocket.fuse([nn.Linear(4, 3) for _ in range(3)])
    optimizer = getattr(hocket.optim, name)(array.parameters(), lr=RATES)
    for models in (3, 2):
        array(torch.ones(2, 4)).sum().backward()
        if models == 3:
            optimizer.step()
            array.drop(1)
    before = [p.detach().clone() for p in array.parameters()]
    refused(r"shape \(2, 3(, 4)?\): expected a fused one, \(3, ...\) .*ModelSlots", optimizer.step)
    for was, p in zip(before, array.parameters(), strict=True):
        assert torch.equal(was, p)
    optimizer.drop(1)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"].tolist() == [0.01, 0.02]


def test_torchs_clipping_of_an_array_warns_that_it_couples_the_models():
    array = hocket.fuse([nn.Linear(4, 3) for _ in range(3)])
    array(torch.ones(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="one norm over all models"):
        nn.utils.clip_grad_norm_(array.parameters(), 1.0)
    hocket.optim.clip_grad_norm_(array.parameters(), 1.0)
    nn.utils.clip_grad_value_(array.parameters(), 1.0)
    nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)


def blocks(width):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2)))


def test_a_separate_block_of_other_shapes_trains_from_then_on():
    """Its parameters are others: the optimizer takes them for those that went, and begins their states anew."""
    torch.manual_seed(0)
    array = hocket.fuse([blocks(width) for width in (3, 4, 5)], separate=("2",), shared=True)
    optimizer = hocket.optim.SGD(array.parameters(), lr=[0.1, 0.2, 0.3], momentum=0.9)
    slots = ModelSlots(array, optimizer)
    x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))

    def step():
        optimizer.zero_grad()
        array.loss(F.cross_entropy, array(x), y).sum().backward()
        optimizer.step()

    step()
    new = blocks(6)
    alone = copy.deepcopy(new)
    gone = slots.refill(1, new)
    single = torch.optim.SGD(alone.parameters(), lr=0.2, momentum=0.9)
    for _ in range(3):
        step()
        single.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        single.step()
    for p, q in zip(array.unfuse()[1].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    refused(r"state: momentum_buffer of parameter 2: expected shape \(6, 8\), got \(4, 8\)", slots.refill, 1, gone)
    for model in (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), blocks(7).append(nn.Linear(2, 2))):
        refused(
            r"refill: the new model differs: expected parameters \['0.bias', '0.weight', '2.0", slots.refill, 1, model
        )
    step()


class Tied(nn.Module):
    """Two layers, whose weights may be one parameter, and an attribute that its forward reads."""

    def __init__(self, is_tied, scale=1.0, function=torch.tanh):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        if is_tied:
            self.second.weight = self.first.weight
        self.scale, self.function = scale, function

    def forward(self, x):
        return self.function(self.second(self.first(x))) * self.scale


@pytest.mark.parametrize("is_tied", [False, True])
def test_only_a_model_that_differs_in_values_leaves_what_was_captured(is_tied):
    array = hocket.fuse([Tied(is_tied) for _ in range(3)], backend="rule", shared=True)
    slots = ModelSlots(array, hocket.optim.SGD(array.parameters(), lr=0.1))
    version, x = array._hocket_version, torch.randn(4, 3)
    for new, is_kept in (
        (Tied(is_tied), True),
        (Tied(is_tied, function=lambda each: torch.tanh(each)), False),
        (Tied(is_tied, scale=2.0), False),
    ):
        slots.refill(1, new)
        torch.testing.assert_close(array(x)[1], new(x))
        assert (array._hocket_version == version) == is_kept
        slots.refill(1, Tied(is_tied))
        version = array._hocket_version
    for new, match in ((Tied(not is_tied), "models differ"), (Tied(is_tied).eval(), "training is True in model 0")):
        before = array.unfuse()[1].state_dict()
        refused(match, slots.refill, 1, new)
        same = zip(before.values(), array.unfuse()[1].state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in same)
    refused(r"first.weight and second.weight: one tensor in model 1, not in 0", hocket.fuse, [Tied(False), Tied(True)])


@pytest.mark.parametrize("separate", [(), ("4",)], ids=["fused", "partly"])
def test_a_state_read_into_a_module_and_put_back_is_the_same(separate):
    run = training(separate=separate)
    for number in range(2):
        run.step(number)
    before = run.all_of(1)
    own = net(9)
    state = run.slots.state(1, own)
    assert state.module is own
    run.slots.put(1, TrainedModel(net(8), [], [], seed=3), lr=0.5)
    assert run.optimizer.param_groups[0]["lr"][1] == 0.5
    run.slots.put(1, state)
    same(before, run.all_of(1))
