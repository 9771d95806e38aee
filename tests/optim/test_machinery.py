"""torch's own machinery on a fused optimizer: hooks, closures, zero_grad, schedulers, and a captured step."""

import pytest
import torch
from torch.optim import lr_scheduler

import hocket
from hocket import optim
from optim.twins import Twins, fused_parameters, set_gradients


def test_hooks_closure_and_zero_grad():
    params = fused_parameters(2)
    optimizer = optim.SGD(params, lr=[0.1, 0.2])
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.requires_grad
    assert seen == ["before", "after"]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in params)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)
    assert "lr: PerModel([0.1000, 0.2000]" in repr(optimizer)


def test_rates_that_people_write_into_groups():
    params = fused_parameters(2)
    optimizer = optim.SGD(params, lr=0.1)
    for value, second in (([0.5, 0.0], 0.0), (torch.tensor([0.5, 0.0]), 0.0), (0.5, 0.5)):
        before = [p.detach().clone() for p in params]
        optimizer.param_groups[0]["lr"] = value
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for was, p in zip(before, params, strict=True):
            torch.testing.assert_close(was[0] - 0.5, p[0].detach())
            torch.testing.assert_close(was[1] - second, p[1].detach())
        optimizer.param_groups[0]["lr"] = 0.1


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
    "linear-then-cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 6)], milestones=[2]
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("case", ["sgd-momentum", "sgd-momenta", "adam", "adam-all"])
def test_schedulers_of_torch_with_one_argument_for_all(case, scheduler):
    twins = Twins(case, 3)
    schedules = [SCHEDULERS[scheduler](optimizer) for optimizer in (twins.fused, *twins.torch)]
    for _ in range(10):
        twins.step()
        for schedule in schedules:
            schedule.step()
    twins_rates = [optimizer.param_groups[0]["lr"] for optimizer in twins.torch]
    found = twins.fused.param_groups[0]["lr"]
    found = found.tolist() if isinstance(found, torch.Tensor) else [found] * 3
    assert found == pytest.approx(twins_rates, rel=1e-12)
    twins.check_parameters(1e-10)


@pytest.mark.parametrize("refilled", [False, True])
def test_no_step_waits_for_values_in_tensors(refilled):
    """No number is read from a tensor of B, be it that the models count in step or, after a refill, each by itself."""
    twins = Twins("adam-all", 3)
    read = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._local_scalar_dense.default:
                read.append(args[0].device.type)
            return function(*args, **(kwargs or {}))

    twins.step()
    if refilled:
        twins.fused.refill(1)
    for step in range(2):
        set_gradients(twins.params, step, range(3))
        with Watch():
            twins.fused.step()
    # The count of steps that are taken together, which torch keeps on the CPU.
    assert read == ([] if refilled else ["cpu", "cpu"])


def test_a_group_that_is_empty_is_said_to_be():
    model = torch.nn.Linear(3, 2)
    params = list(hocket.fuse([model, torch.nn.Linear(3, 2)]).parameters())
    decayed = [p for p in params if p.ndim >= 2]
    with pytest.warns(UserWarning, match="a group is empty.*form groups by names"):
        optim.AdamW([{"params": decayed}, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}])
