"""Gradients of compiled graphs: for some of their outputs, twice, and of themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo.programs import Method
from hocket.autotune import runner
from hocket.dynamo.gradients import without_gradients
from quick import covering, some
from support.regions import made_regions, same

pytestmark = [
    pytest.mark.usefixtures("one_core"),
    pytest.mark.filterwarnings("ignore:::torch", "ignore:.*autograd.function.Function"),
]


class Heads(nn.Module):
    """A language model in small: a loss, logits, and a weight that it hands out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.body(self.dropout(x)))
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        return {"loss": loss, "logits": logits, "other": self.other(hidden), "weight": self.head.weight}


def trained(
    backend: str | None,
    loss_of: Callable[[Any, torch.Tensor, int], torch.Tensor],
    make: Callable[[], nn.Module] = Heads,
    **options: Any,
) -> list[Any]:
    """Losses and numbers of gradients of 40 steps with momentum, and the model's state after them."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    run = model if backend is None else torch.compile(model, backend=backend)
    batches = [torch.randn(3, 4) for _ in range(4)]
    found: list[Any] = []
    for number in range(40):
        optimizer.zero_grad()
        loss = loss_of(run, batches[number % 4], number)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), sum(each.grad is not None for each in model.parameters())]
    return [*found, *model.state_dict().values()]


def _some(model: Any, x: torch.Tensor, number: int) -> torch.Tensor:
    found = model(x)
    loss: torch.Tensor = found["loss"]
    if number % 3 == 1:
        loss = loss + found["other"].square().mean()
    return loss + found["weight"].sum() * 0.01 if number % 3 == 2 else loss


def _twice(model: Any, x: torch.Tensor, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(x)["loss"]
    loss.backward(retain_graph=True)
    return loss


def _penalty(model: Any, x: torch.Tensor, number: int) -> torch.Tensor:
    x = x.clone().requires_grad_()
    loss: torch.Tensor = model(x)["loss"]
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


@pytest.mark.parametrize(("loss_of", "dropout"), covering([_some, _twice, _penalty], [0.5, 0.0]))
def test_a_training_ends_where_eager_ends(loss_of: Any, dropout: float) -> None:
    with made_regions() as regions:
        found = trained("hocket", loss_of, lambda: Heads(dropout))
    assert regions
    assert same(found, trained(None, loss_of, lambda: Heads(dropout)))


@pytest.mark.parametrize("dropout", some([0.5, 0.0]))
def test_gradients_are_differentiated_from_a_certain_step_on(dropout: float) -> None:
    def late(model: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        return (_penalty if number >= 30 else _some)(model, x, number)

    found, expected = (trained(backend, late, lambda: Heads(dropout)) for backend in ("hocket", None))
    assert same(found[:61], expected[:61])
    for one, other in zip(found[61:], expected[61:], strict=True):  # sums of gradients in another order, in one step
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_graph_that_writes_cannot_begin_to_be_differentiated_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(model, backend="hocket")
    for number in range(6):
        x = torch.randn(5, 4, requires_grad=True)
        loss = compiled(x).square().sum()
        if number == 3:
            with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
                torch.autograd.grad(loss, x, create_graph=True)
        else:
            torch.autograd.grad(loss, x, create_graph=number > 3)


def test_what_was_written_after_the_forward_is_not_differentiated_again() -> None:
    """Eager's backward of an exponential reads its result alone."""
    weight = torch.randn(4, 4, requires_grad=True)
    compiled = torch.compile(lambda x: x.exp() * 3, backend="hocket")
    for number in range(6):
        x = weight * 1.0
        loss = compiled(x).sum()
        x.add_(1)
        if number == 3:
            with pytest.raises(RuntimeError, match=r"inputs have been written.*cannot be differentiated twice"):
                torch.autograd.grad(loss, weight, create_graph=True)
        else:
            (found,) = torch.autograd.grad(loss, weight, create_graph=number > 3)
            assert torch.equal(found, weight.exp() * 3)


@pytest.mark.parametrize("looks", [False, True], ids=["two branches", "a look in between"])
def test_a_batch_norm_runs_again_before_the_backward(looks: bool) -> None:
    """A siamese model, whose first call is made by the graph as it stands, and one that is read without gradients."""

    def difference(run: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        loss = run(x).square().sum()
        with torch.set_grad_enabled(not looks):
            other = run(torch.randn(5, 4)).sum()
        return loss - other

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    with made_regions():
        assert same(trained("hocket", difference, make), trained(None, difference, make))


def test_a_tensor_that_is_saved_may_not_be_written() -> None:
    model = Method(lambda m, x: (x @ m.weight).sin())
    compiled = torch.compile(model, backend="hocket")
    x = torch.randn(4, 4)
    for _ in range(3):
        result = compiled(x)
        with torch.no_grad():
            model.weight.mul_(1.0)
        x.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_what_depends_on_missing_gradients_alone_is_left_out() -> None:
    def backward(saved: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        both = one + torch.ops.aten.tanh_backward(other, saved)
        return [both @ saved, other.sum(0), torch.cat([one, other])]

    saved, one, other = (torch.randn(3, 3) for _ in range(3))
    graph = make_fx(backward, tracing_mode="fake")(saved, one, other)
    without = without_gradients(graph, 1, frozenset({1}))
    assert len(without.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)) == 1
    assert not [node for node in without.graph.nodes if "tanh" in str(node.target) or "add" in str(node.target)]
    first, missing, joined = without(saved, one)
    assert torch.equal(first, one @ saved)
    assert missing is None
    assert torch.equal(joined, torch.cat([one, torch.zeros(3, 3)]))


def _residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = x + (x @ m.weight).tanh()
    return (hidden + (hidden @ m.weight).tanh() * m.count.exp()) @ m.weight


@pytest.mark.parametrize("function", [lambda m, x: (x @ m.weight).tanh() @ m.weight / m.weight.norm(), _residual])
def test_gradients_of_several_uses_are_added_as_by_eager(function: Callable[..., Any]) -> None:
    """A graph that is called several times before one backward, and inputs that are used beside it."""

    def loss_of(run: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        model = getattr(run, "_orig_mod", run)
        rows = (x @ model.weight).sigmoid()
        loss = sum(run(rows * scale).square().mean() for scale in (1.0, 0.7, 0.3))
        return loss + model.weight.abs().sum() * 0.01 + rows.sin().mean()

    with made_regions() as regions:
        found, expected = (trained(backend, loss_of, lambda: Method(function)) for backend in ("hocket", None))
    assert "plain" not in [region.verdict for region in regions]
    assert same(found, expected)


@pytest.mark.parametrize("kind", ["autocast", "dynamic", "view"])
def test_graphs_by_autograds_own_node_run_as_they_stand_once_they_are_differentiated_twice(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    compiled = torch.compile(lambda x: model(x).view(-1, 2) if kind == "view" else model(x), backend="hocket")
    failed = []
    for number in range(8):
        x = torch.randn(2 + (kind == "dynamic") * number, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = compiled(x).float().square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=number > 3)
        try:
            gradient.sum().backward() if number > 3 else None
        except RuntimeError:
            failed.append(number)
    assert failed in ([], [4])


def test_gradients_may_be_taken_many_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    compiled = torch.compile(model, backend="hocket")
    given = torch.eye(6).view(6, 3, 2).transpose(1, 2)
    with made_regions():
        for _ in range(40):
            x = torch.randn(2, 4, requires_grad=True)
            compiled(x).sum().backward()
            (found,), (expected,) = (
                torch.autograd.grad(run(x), x, given, is_grads_batched=True) for run in (compiled, model)
            )
            assert torch.equal(found, expected)


class _Both(torch.autograd.Function):
    """Two results, whose backward runs as soon as one has a gradient."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return one * 2, other * 3

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return given[0] * 2 + 1, given[1] * 3 + 1


@pytest.mark.parametrize(
    "heads",
    [
        lambda one, other: (one, other.softmax(1)),
        lambda one, other: (one, torch.where(other > 0, other, 0.0)),
        lambda one, other: (one, other.gather(1, torch.zeros(3, 1, dtype=torch.long))),
        lambda one, other: _Both.apply(one, other),
    ],
    ids=["softmax", "where", "gather", "function of two results"],
)
def test_a_head_without_a_gradient_is_not_moved(heads: Callable[..., Any]) -> None:
    class Model(Heads):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            one, other = heads(self.body(x).tanh(), self.other(x.repeat(1, 2)[:, :6]))
            return {"loss": one.square().mean(), "other": other * 2}

    def loss_of(run: Any, x: torch.Tensor, number: int) -> torch.Tensor:
        found = run(x)
        return found["loss"] + (found["other"].sum() if number % 4 == 0 else 0)

    with made_regions():
        found, expected = (trained(backend, loss_of, Model, weight_decay=0.1) for backend in ("hocket", None))
    assert same(found, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_may_run_twice_where_results_share_memory(dynamic: bool) -> None:
    model = Method(lambda m, x: (x @ m.weight).tanh().view(-1))
    compiled = torch.compile(model, backend="hocket", dynamic=dynamic)
    for number in range(8):
        loss = compiled(torch.randn(2 + dynamic * (number % 2), 4)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize("backend", ["eager", "hocket"])
def test_compiled_autograd_leaves_eagers_bits(backend: str) -> None:
    def trained_by(compiler: str | None) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = torch.compile(model, backend="hocket") if compiler else model
        for number in range(12):
            optimizer.zero_grad()
            loss = run(torch.full((3, 4), number / 10)).square().sum()
            if compiler and number > 5:
                with torch._dynamo.compiled_autograd._enable(torch.compile(backend=compiler)):
                    loss.backward()
            else:
                loss.backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert same(trained_by(backend), trained_by(None))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (3, 6)),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 4)), (4, 1, 6, 6)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (3, 5, 8)),
    ],
    ids=["mlp", "convolution", "transformer"],
)
def test_what_the_first_call_records_of_copies_stands_for_the_calls_after_it(
    make: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []
    record = runner.recorded_form

    def counted(config: Any, batch: Any, form: str) -> Any:
        recorded.append(len(batch))
        return record(config, batch, form)

    monkeypatch.setattr(runner, "recorded_form", counted)
    torch.manual_seed(0)
    compiled = torch.compile(make(), backend="hocket", options={"cache": False})
    for _ in range(8):
        compiled(torch.randn(shape)).sum().backward()
    assert len(recorded) == 2  # a forward and a backward
