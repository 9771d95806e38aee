"""Forwards that a graph can stand for, or cannot: the acts of a small model, with the reasons of what is refused."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import softmax
from torch.utils.checkpoint import checkpoint

D = torch.float64


class Layer(nn.Module):
    """Runs a function of itself and its input, behind an unpacked shape."""

    def __init__(self, function, number=1.0):
        super().__init__()
        self.function, self.number = function, number
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.register_buffer("mean", torch.zeros(4, dtype=D))
        self.table = torch.arange(4.0, dtype=D)  # belongs to no layer

    def forward(self, x):
        rows, columns = x.shape
        assert rows
        assert columns == 4
        return self.function(self, x)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Cube(torch.autograd.Function):
    """Has twice the gradient that its ops have."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 6 * x * x * grad


def reflected(m, x):
    return 2 - m.a(x), 1 / (m.b(x).square() + 1), 2 ** (0.1 * x), 5 * x + 3 // (x.detach().abs() + 1)


def indexed(m, x):
    h = m.a(x)
    return h[:, 1:3], h[torch.tensor([2, 0])], h[..., None], h[h.shape[0] - 1]


def written(m, x):
    h = m.a(x)
    h += 1
    h[:, 0] = x[:, 0]
    h.mul_(m.number)
    return h


def several(m, x):
    values, places = m.a(x).max(1)
    first, second = m.b(x).split(2, dim=1)
    return {
        "values": values,
        "places": places,
        "pair": Pair(first, second),
        "rows": torch.ones(len(x), dtype=x.dtype) + values,
    }


def attributes(m, x):
    return m.a(x).T.mT + x.type(m.b.weight.dtype).data


def table(m, x):
    return m.a(x) * m.table + torch.arange(4, dtype=x.dtype, device=x.device)


def factories(m, x):
    return m.a(x) + torch.zeros_like(x).fill_(m.number) + x.new_ones(4) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def function(m, x):
    return Cube.apply(m.a(x)) if x.is_floating_point() else x


def iterated(m, x):
    return torch.stack([m.a(row) for row in x])


def averaged(m, x):
    h = m.a(x)
    with torch.no_grad():
        m.mean.lerp_(h.mean(0), 0.1)
        scale = h.abs().max() + 1
    return h / scale + m.mean


def weight_without_gradient(m, x):
    with torch.no_grad():
        fixed = m.b(x)
    return softmax(m.a(x), dim=-1) * fixed + m.b(x)


def written_without_gradient(m, x):
    h = m.a(x)
    with torch.no_grad():
        h.clamp_(min=0)
    return h * 2


def alias(m, x):
    x = m.a(x)
    y = x
    y += 1
    y *= m.b.weight[0]
    y -= x.mean()
    y /= 2
    return x + y


def of_the_input(m, x):
    x = x * 1  # shared by all models until here
    y = x
    y += m.b.bias
    return m.a(y)


def into_a_part(m, x):
    x = m.a(x)
    x[:, 1:3] += m.b(x)[:, 1:3].detach()
    x[0] = 0
    return x


def counting(m, x):
    m.mean += 1
    return m.a(x) * m.mean.clone()  # each model's own would do for plain ones; here they are parts of one tensor


def averaging(m, x):
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return m.a(x - m.mean)


def averaging_without_gradient(m, x):
    with torch.no_grad():
        m.mean = 0.9 * m.mean + 0.1 * m.b(x).mean(0)
    return m.a(x - m.mean)


def copying(m, x):
    m.mean.copy_(x.detach().mean(0))
    return m.a(x) + m.mean


def without_gradient(m, x):
    with torch.no_grad():
        target = m.b(x)
    return m.a(x) * target


def checkpointed(m, x, use_reentrant=False):
    x = m.a(x)
    return x + checkpoint(lambda hidden: torch.tanh(m.b(hidden)), x, use_reentrant=use_reentrant)


def checkpointed_from_within(m, x):
    return checkpointed(m, x, use_reentrant=True)


def checkpointed_on_a_branch(m, x):
    return checkpointed(m, x, use_reentrant=True) if x.sum() < 1e9 else x  # no tracer follows values


def by_its_own_flag(m, x):
    return m.a(x) * (2 if m.b.training else 1)


def into_out(m, x):
    with torch.no_grad():
        m.mean = torch.nn.functional.normalize(m.mean + x.mean(0), dim=0, out=m.mean)
        total = x.new_zeros(4)
        torch.add(m.mean, m.b.bias, out=total)
    return m.a(x) * total + m.mean


def penalised(m, x):
    return m.a(x), sum(parameter.square().sum() for parameter in m.parameters())


FOLLOWED = [indexed, written, several, attributes, table, factories, function, iterated, averaged]
FOLLOWED += [weight_without_gradient, written_without_gradient, reflected]
OTHERS = [checkpointed, checkpointed_from_within, checkpointed_on_a_branch, penalised]
OTHERS += [alias, of_the_input, into_a_part, counting, averaging, averaging_without_gradient, copying]
OTHERS += [without_gradient, into_out]


def hooks(m, x):
    h = m.a(x)
    h.register_hook(lambda grad: grad * 2)
    return h


def prints(m, x):
    return m.a(x) * len(repr(x))


def asks_for_gradients(m, x):
    return m.a(x) if m.a(x).requires_grad else m.b(x)


def own_autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.a(x)


def differentiates(m, x):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(m.a(x).square().sum(), x)
    return grad


def chooses(m, x):
    return m.a(x)[x > 0].sum()


def catches(m, x):
    try:
        return m.a(x) @ x
    except RuntimeError:
        return m.a(x)


def remembers(m, x):
    m.last = m.a(x)
    return m.last * 2


def reads(name):
    return lambda m, x: m.a(x) * float(getattr(m.a(x).detach().sum(), name)())


def called_thrice(array, x):
    """A reason that may pass has two more tries."""
    for _ in range(3):
        array(x)


def gets_memory(m, x):
    k = x.new_ones(4)
    k.set_(x.new_full((4,), 2.0))
    return m.a(x) * k


def gets_memory_unread(m, x):
    m.mean.set_(m.mean + 1)
    return m.a(x)


def swaps(m, x):
    k, other = x.new_ones(4), x.new_full((4,), 2.0)
    torch.utils.swap_tensors(k, other)
    return m.a(x) * k


def steps_inside(m, x):
    k, options = torch.ones(4, dtype=D), {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([k], [torch.ones(4, dtype=D)], [], weight_decay=0.0, lr=0.5, is_first_step=False, **options)
    return m.a(x) * k


REFUSED = {
    gets_memory: "other memory, by set_",
    swaps: "other memory, by set_ or swap_tensors",
    steps_inside: "_fused_sgd_ writes into tensors",
    hooks: "looks at values, by register_hook",
    prints: "looks at values, by __repr__",
    asks_for_gradients: "looks at the attribute requires_grad of a tensor",
    own_autocast: "an autocast of its own",
    differentiates: "grad is no op",
    chooses: "__getitem__ gives tensors whose shapes depend on values",
    catches: "matmul raises RuntimeError",
    remembers: "it changes .*last",
} | {reads(name): f"by {name}" for name in ("item", "__float__", "__bool__", "numpy", "__int__")}


class AsksForTheMode(Layer):
    """Branches on the grad mode, where nothing looks at shapes."""

    def forward(self, x):
        return self.a(x) if torch.is_grad_enabled() else self.b(x)


def asks_for_the_mode(m, x):
    return m.a(x) if torch.is_grad_enabled() else m.b(x)
