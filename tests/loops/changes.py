"""Loops with hooks, and loops that change their model or their optimizer while they run. See also `step_changes`."""

from __future__ import annotations

import copy
import importlib
import operator
import warnings
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from loops.loop import CHANGE, Loop, classifier, labelled, loop, mlp, ordinary, train, update


def supervised(model, optimizer, after, batches=None, state=dict):
    """The plainest step, and `after` to change what it works on."""

    return Loop(ordinary(model, optimizer), model, optimizer, batches or labelled(), state, after)


@loop(planned=True)
def batch_norm_evaluated_between() -> Loop:
    # No bias before batch norm: its gradient is all rounding, and eager at one thread has another one than at two.
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = labelled(1, 20)[0]
    scores = []

    def after(n, _):
        if n % 25 == 24:
            model.eval()
            with torch.no_grad():
                scores.append((model(x).argmax(1) == y).float().mean().item())
            model.train()

    return supervised(model, optimizer, after, state=lambda: {"scores": scores})


@loop(planned=True)
def model_made_double(model, optimizer, batches) -> Loop:
    doubles = [(x.double(), y) for x, y in batches]

    def after(n, _):
        if n == CHANGE - 1:
            model.double()
            for state in optimizer.state.values():
                state["momentum_buffer"] = state["momentum_buffer"].double()

    return supervised(model, optimizer, after, lambda n: (doubles if n >= CHANGE else batches)[n % 10])


@loop(planned=True)
def tensor_replaced_between_steps(model, optimizer, batches) -> Loop:
    weights = {"of_class": torch.ones(4)}

    def step(batch):
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1], weight=weights["of_class"]))

    def after(n, _):
        if n % 5 == 4:
            weights["of_class"] = torch.linspace(1, 1 + n % 3, 4)

    return Loop(step, model, optimizer, batches, lambda: dict(weights), after)


@loop(planned=True)
def buffer_and_rate_exchanged_that_closures_hold() -> Loop:
    """The closure goes on with the ones of before."""
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4))
    means, rate = tuple(model.buffers()), torch.tensor(0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)

    def step(batch):
        rate.mul_(0.99)
        return train(model, optimizer, (batch[0] + means[0].mean(), batch[1]))

    def after(n, _):
        if n == CHANGE:
            model[1].running_mean = torch.ones(6)
        if n == CHANGE + 5:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.03)

    return Loop(step, model, optimizer, labelled(), lambda: {"means": list(means), "rate": rate}, after)


@loop(planned=True)
def adam_begun_anew_and_loaded() -> Loop:
    """Trainers make their optimizer anew at a checkpoint. The schedule knows the first one."""
    model = mlp()
    first = optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(batch):
        return train(model, optimizer, batch)

    def after(n, _):
        nonlocal optimizer
        if n in (20, 50):
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if n == 50:
                optimizer.load_state_dict(state)

    return Loop(step, model, first, labelled(), lambda: {"used": optimizer.state_dict()}, after)


@loop(planned=True)
def hook_that_collects_activations(model, optimizer, batches) -> Loop:
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean()))
    return Loop(ordinary(model, optimizer), model, optimizer, batches, lambda: {"seen": seen})


@loop(planned=True)
def hook_whose_value_changes(model, optimizer, batches) -> Loop:
    scale = {"factor": 1.0}
    model[2].weight.register_hook(lambda grad: scale["factor"] * grad)

    def after(n, _):
        if n == CHANGE:
            scale["factor"] = 0.1

    return Loop(ordinary(model, optimizer), model, optimizer, batches, lambda: scale, after)


@loop(planned=True)
def optimizer_in_the_backward_pass() -> Loop:
    """Every parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def apply(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return Loop(step, model, list(optimizers.values()), labelled())


@dataclass
class _Weights:
    fit: float = 1.0
    size: float = 0.01


class _Scales:
    fit = 1.0
    size = 1.0

    def __getitem__(self, name):
        return self.__dict__[name]


@loop(planned=True)
def weights_found_by_computed_names(model, optimizer, batches) -> Loop:
    """Their names stand in no attribute of the step's code, and in a tuple where a dict is spelled out."""
    of_rate = operator.attrgetter("rate")  # made outside of the step
    weights, scales, own = _Weights(), type("Scales", (_Scales,), {"fit": 1.0, "size": 1.0}), _Scales()
    own.fit = own.size = 1.0
    own.name, own.rate, kept = "first", 1.0, {"name": ""}

    def step(batch):
        out = model(batch[0])
        losses = {"fit": F.cross_entropy(out, batch[1]), "size": out.square().mean()}
        found = asdict(weights)
        loss = sum(found[name] * getattr(scales, name) * own[name] * value for name, value in losses.items())
        kept["name"] = "{0.name}".format(own)  # noqa: UP030, UP032
        return update(optimizer, loss * of_rate(own))

    def after(n, _):
        if n == CHANGE:
            weights.fit = 0.5
        elif n == CHANGE + 7:
            scales.size = 2.0
        elif n == CHANGE + 14:
            own.fit, own.name = 0.8, "second"
        elif n == CHANGE + 21:
            own.rate = 0.7

    return Loop(step, model, optimizer, batches, lambda: kept, after)


@loop(planned=True)
def functions_of_torch_exchanged(model, optimizer, batches) -> Loop:
    """Torch's own code calls them, by the name of a module or of a class."""
    linear, call = F.linear, nn.Module.__call__
    state = {"scale": 0.9, "hook": None}

    def scaled(x, weight, bias=None):
        return linear(x, weight * state["scale"], bias)

    def decayed(optimizer, args, kwargs):
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p.mul_(0.99)

    def after(n, _):
        if n == CHANGE - 30:
            F.linear = scaled
        elif n == CHANGE - 20:
            state["scale"] = 0.5
        elif n == CHANGE - 10:
            F.linear = linear
            nn.Module.__call__ = lambda self, *args: 1.01 * call(self, *args)
        elif n == CHANGE:
            nn.Module.__call__ = call
            state["hook"] = register_optimizer_step_post_hook(decayed)
        elif n == CHANGE + 10:
            state["hook"].remove()

    return Loop(ordinary(model, optimizer), model, optimizer, batches, after=after)


@loop(planned=True)
def module_imported_in_the_step(model, optimizer, batches) -> Loop:
    """Nothing else leads to it, and functions of its own run in the step, too."""
    shared = importlib.import_module("loops.loop")
    shared.rate = 1.0

    def step(batch):
        from loops import loop as found

        return update(optimizer, found.rate * found.classifier(model, batch))

    def after(n, _):
        if n == CHANGE:
            shared.rate = 0.5

    return Loop(step, model, optimizer, batches, after=after, close=lambda: delattr(shared, "rate"))


@loop(planned=True)
def flag_raised_before_every_other_step(model, optimizer, batches) -> Loop:
    state = {"again": False}

    def step(batch):
        loss = classifier(model, batch)
        if state["again"]:
            loss, state["again"] = 2 * loss, False
        return update(optimizer, loss)

    def after(n, _):
        state["again"] = n % 2 == 0

    return Loop(step, model, optimizer, batches, lambda: dict(state), after)


class _Positioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.positions = mlp(), None

    def forward(self, x):
        if self.positions is None or len(self.positions) != len(x):
            self.positions = torch.linspace(0, 1, len(x))[:, None]
        return self.inner(x + self.positions)


@loop(planned=True)
def positions_made_anew_after_an_evaluation() -> Loop:
    """The step that makes them is refused, and those after it are not."""
    model = _Positioned()

    def after(n, _):
        if n == CHANGE - 50:
            with torch.no_grad():
                model(torch.ones(2, 8))

    return supervised(model, torch.optim.SGD(model.parameters(), lr=0.05), after)


@loop(planned=True)
def warned_of_as_filters_say(model, optimizer, batches) -> Loop:
    """Torch warns of shapes that differ: in no step, in each, in each by an error, and in no step again."""
    shown: list[str] = []
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.showwarning = lambda message, *_args, **_kwargs: shown.append(str(message))
    warnings.simplefilter("ignore")

    def step(batch):
        return update(optimizer, F.mse_loss(model(batch[0]), batch[1].float()[:, None]))

    def after(n, _):
        if action := {CHANGE - 40: "always", CHANGE - 20: "error", CHANGE: "ignore"}.get(n):
            warnings.simplefilter(action)

    return Loop(step, model, optimizer, batches, lambda: {"shown": shown}, after, close=lambda: caught.__exit__())
