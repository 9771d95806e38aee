"""Loops with hooks: added and removed while training, and hooks that read or write Python state."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, labelled, loop, ordinary, task


def hooked(add, state=dict, when=CHANGE, removed=None):
    """A plain loop; ``add(model, optimizer)`` is called after step `when` and gives a handle."""
    model, optimizer, batches = task()
    handles = []
    if when is None:
        handles.append(add(model, optimizer))

    def after(n, _):
        if n == when:
            handles.append(add(model, optimizer))
        if n == removed:
            handles.pop().remove()

    def close():
        for handle in handles:
            handle.remove()

    return Loop(ordinary(model, optimizer), model, optimizer, batches, state, after, close=close)


@loop(planned=True)
def gradient_hook_added() -> Loop:
    return hooked(lambda model, _: model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)))


@loop(planned=True)
def forward_hook_added() -> Loop:
    return hooked(lambda model, _: model[0].register_forward_hook(lambda module, args, out: 0.5 * out))


@loop(planned=True)
def forward_pre_hook_added() -> Loop:
    return hooked(lambda model, _: model[2].register_forward_pre_hook(lambda module, args: (args[0] - 0.1,)))


@loop(planned=True)
def full_backward_hook_added() -> Loop:
    return hooked(lambda model, _: model[2].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,)))


@loop(planned=True)
def hook_of_all_modules_added() -> Loop:
    def add(*_):
        return nn.modules.module.register_module_forward_hook(
            lambda module, args, out: out + 0.1 if isinstance(module, nn.ReLU) else None
        )

    return hooked(add)


@loop(planned=True)
def post_accumulate_hook_added() -> Loop:
    def halve(parameter):
        parameter.grad.mul_(0.5)

    return hooked(lambda model, _: model[2].weight.register_post_accumulate_grad_hook(halve))


@loop(planned=True)
def optimizer_hook_added() -> Loop:
    def shrink(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            torch._foreach_mul_([p.grad for p in group["params"]], 0.9)

    return hooked(lambda _, optimizer: optimizer.register_step_pre_hook(shrink))


@loop(planned=True)
def gradient_hook_removed() -> Loop:
    return hooked(lambda model, _: model[0].weight.register_hook(lambda grad: 2 * grad), when=None, removed=CHANGE)


@loop(planned=True)
def hook_that_collects_activations() -> Loop:
    seen = []
    return hooked(
        lambda model, _: model[1].register_forward_hook(lambda module, args, out: seen.append(out.detach().mean())),
        lambda: {"seen": seen},
        when=None,
    )


@loop(planned=True)
def hook_that_collects_norms() -> Loop:
    norms = {}

    def add(model, _):
        return model[0].weight.register_hook(lambda grad: norms.__setitem__("weight", grad.norm().item()))

    return hooked(add, lambda: norms, when=None)


@loop(planned=True)
def hook_that_collects_from_a_certain_step_on() -> Loop:
    seen = []
    return hooked(
        lambda model, _: model[1].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape))),
        lambda: {"seen": seen},
    )


@loop(planned=True)
def hook_whose_value_changes() -> Loop:
    model, optimizer, batches = task()
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
