"""Loops with optimizers beyond torch's plain ones: scaled, sharpness-aware, quasi-Newton, with state of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

from loops.loop import Loop, labelled, loop, mlp, ordinary, update


@loop(planned=True)
def scaled_and_clipped_gradients() -> Loop:
    """Half precision by the book. The scale starts too high, so that steps are skipped."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, growth_interval=30)

    def step(batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Loop(step, model, optimizer, labelled(), scaler.state_dict)


@loop(planned=True)
def scaled_gradients_of_a_fused_update() -> Loop:
    """The scaler hands its scale to the update as an attribute, and infinite gradients are skipped in the kernel."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=15)
    batches = labelled()
    batches[4][0][0, 0] = torch.inf

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    return Loop(step, model, optimizer, batches, scaler.state_dict)


@loop(planned=True)
def a_cache_made_anew_by_each_step(model, optimizer, batches) -> Loop:
    """Activations are kept by a hook while the step runs. Each step leaves another empty table than the one before."""
    kept = {"features": {}}
    seen, repeated = [kept["features"]], []

    def hook(module, args, output):
        kept["features"][type(module).__name__] = output

    model[1].register_forward_hook(hook)

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) + 0.01 * kept["features"]["ReLU"].square().mean()
        kept["features"] = {}
        return update(optimizer, loss)

    def after(n, _):
        repeated.append(any(kept["features"] is one for one in seen))
        seen.append(kept["features"])

    return Loop(step, model, optimizer, batches, lambda: {"features": kept["features"], "repeated": repeated}, after)


@loop(planned=True)
def sharpness_aware(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        scale = 0.05 / (torch.stack([g.norm() for g in grads]).norm() + 1e-12)
        moves = [g * scale for g in grads]
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, batches)


class Sharpness(torch.optim.Optimizer):
    """The same as an optimizer that takes a closure, as it is copied from one repository to the next."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "rho": 0.05})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"])
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
                p.sub_(p.grad, alpha=group["lr"])
        return loss


@loop(planned=True)
def sharpness_aware_with_a_closure() -> Loop:
    model = mlp()
    optimizer = Sharpness(model.parameters(), lr=0.05)

    def step(batch):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Loop(step, model, optimizer, labelled())


@loop()
def quasi_newton() -> Loop:
    model = mlp(8, 4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    batches = [torch.randn(6, 8) for _ in range(3)]

    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :1].sin())
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Loop(step, model, optimizer, batches)


class ScheduleFree(torch.optim.Optimizer):
    """Averages instead of a schedule; counts its steps in the group."""

    def __init__(self, parameters, lr=0.05, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                    state["x"] = p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], weight)
                p.copy_(state["z"].lerp(state["x"], group["beta"]))
            group["k"] += 1


@loop(planned=True)
def schedule_free() -> Loop:
    model = mlp()
    optimizer = ScheduleFree(model.parameters())

    return Loop(ordinary(model, optimizer), model, optimizer, labelled())


class Lookahead(torch.optim.SGD):
    """Every fifth step goes half the way back; the counter is an attribute of the optimizer."""

    taken = 0

    @torch.no_grad()
    def step(self):
        super().step()
        self.taken += 1
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                if self.taken % 5 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


@loop(planned=True)
def optimizer_that_counts() -> Loop:
    model = mlp()
    optimizer = Lookahead(model.parameters(), lr=0.05, momentum=0.9)

    return Loop(ordinary(model, optimizer), model, optimizer, labelled(), lambda: {"taken": optimizer.taken})


class Rectified(torch.optim.Optimizer):
    """Keeps what it has computed in lists of lists of its groups, and counts in pairs of pairs."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "buffer": [[0, 0.0], [0, 0.0]], "seen": ((0, 1.0), 0.5)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                (count, share), rest = state.get("count", group["seen"])
                state["count"] = ((count + 1, share * 0.9), rest)
                group["buffer"][0][:] = [count + 1, group["lr"] / (count + 2)]
                p.add_(p.grad, alpha=-group["buffer"][0][1])
            group["seen"] = ((group["seen"][0][0] + 1, 1.0), 0.5)


@loop(planned=True)
def numbers_in_lists_of_lists_and_pairs_of_pairs() -> Loop:
    model = mlp()
    optimizer = Rectified(model.parameters())

    return Loop(ordinary(model, optimizer), model, optimizer, labelled())
