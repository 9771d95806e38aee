"""`torch.compile(..., backend="hocket")` as users call it."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hocket.dynamo.backend import BackendOptions
from hocket.errors import InputError
from support.regions import made_regions, run_program, same

pytestmark = pytest.mark.filterwarnings("ignore:::torch", "ignore:The .grad")
NUM_CALLS = 26


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh())


def _rows(num_rows: Callable[[int], int]) -> Callable[[int], tuple[Any, ...]]:
    return lambda number: (torch.randn(num_rows(number), 4, generator=torch.Generator().manual_seed(number)),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numerics": "exact"}, "numerics: expected one of bitwise, rounding, close, got 'exact'"),
        ({"cache": 3}, "cache: expected True, False or a folder, got int"),
        ({"nmerics": "close"}, "unknown 'nmerics'; available: cache, numerics"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        BackendOptions.of(options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=words):
        torch.compile(_model(), backend="hocket", options=options)(torch.ones(2, 4))


def test_a_mode_is_refused() -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="has no modes, got mode='max-autotune'"):
        torch.compile(_model(), backend="hocket", mode="max-autotune")(torch.ones(2, 4))


def test_fullgraph_with_a_break_is_torchs_error() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin().cos()

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="hocket", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize("dynamic", [None, True])
def test_shapes_that_move(dynamic: bool | None) -> None:
    batch = _rows(lambda number: 3 + number % 4)
    with made_regions() as regions:
        found = run_program(_model, batch, "hocket", 4 * NUM_CALLS, dynamic=dynamic)
    assert same(found, run_program(_model, batch, None, 4 * NUM_CALLS))
    assert {region.verdict for region in regions} <= {"planned", "searching"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradients(mode: Callable[[], Any]) -> None:
    model = _model().eval()
    compiled = torch.compile(model, backend="hocket")
    with made_regions(), mode():
        for number in range(NUM_CALLS):
            x = torch.full((3, 4), number / 10)
            found = compiled(x)
            assert torch.equal(found, model(x))
            assert found.is_inference() == torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("make", "backend"),
    # Dynamo computes bias corrections and counts with tensors, where eager has numbers: other bits than eager.
    [(torch.optim.SGD, None), (torch.optim.Adam, "aot_eager"), (torch.optim.Adagrad, "aot_eager")],
)
def test_an_optimizers_step(make: Any, backend: str | None) -> None:
    torch.manual_seed(0)
    mine = _model()
    twin = copy.deepcopy(mine)
    ours, eager = make(mine.parameters(), lr=0.1), make(twin.parameters(), lr=0.1)
    step = torch.compile(ours.step, backend="hocket")
    other = eager.step if backend is None else torch.compile(eager.step, backend=backend)
    with made_regions() as regions:
        for number in range(NUM_CALLS):
            x = torch.full((3, 4), number / 10)
            for model, update, optimizer in ((mine, step, ours), (twin, other, eager)):
                optimizer.zero_grad()
                model(x).square().sum().backward()
                update()
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), twin.parameters(), strict=True))
    assert regions


def test_threads_call_one_model() -> None:
    model = _model()
    compiled = torch.compile(model, backend="hocket")
    wrong: list[Any] = []

    def train(seed: int) -> None:
        for number in range(NUM_CALLS):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * seed + number)).requires_grad_()
            (found,) = torch.autograd.grad(compiled(x).sum(), x)
            (expected,) = torch.autograd.grad(model(x).sum(), x)
            if not torch.equal(found, expected):
                wrong.append((seed, number))

    with made_regions():
        compiled(torch.ones(3, 4, requires_grad=True)).sum().backward()
        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_activations_are_let_go() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp().sin()

    model = nn.Sequential(nn.Linear(4, 4), Activation())
    compiled = torch.compile(model, backend="hocket")
    with made_regions() as regions:
        for _ in range(NUM_CALLS):
            x = torch.ones(3, 4)
            kept.append(weakref.ref(x))
            compiled(x).sum().backward()
            del x
    gc.collect()
    assert {region.verdict for region in regions} == {"planned"}
    assert not any(reference() is not None for reference in kept)


def test_the_hooks_of_saved_tensors_run_in_the_users_call_alone() -> None:
    model = _model()
    compiled = torch.compile(model, backend="hocket")
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    numbers = []
    with made_regions(), saved_tensors_hooks(pack, lambda tensor: tensor):
        for run in (model, compiled):
            saved.clear()
            run(torch.ones(3, 4)).sum().backward()
            numbers.append(len(saved))
    assert numbers[0] == numbers[1]


def test_a_region_that_raises_is_eagers_error() -> None:
    table = nn.Embedding(5, 4)
    compiled = torch.compile(lambda rows: table(rows).sin().cos(), backend="hocket")
    with made_regions():
        for number in range(NUM_CALLS):
            rows = torch.tensor([0, 9 if number % 5 == 4 else 1])
            if number % 5 == 4:
                with pytest.raises(IndexError, match="out of range"):
                    compiled(rows)
            else:
                assert torch.equal(compiled(rows), table(rows).sin().cos())


def test_a_compiled_model_compiles_again_and_has_its_models_state() -> None:
    model = _model()
    compiled = torch.compile(model, backend="hocket")
    x = torch.ones(2, 4)
    assert torch.equal(torch.compile(compiled, backend="hocket")(x), model(x))
    mine: Any = compiled
    state = pickle.loads(pickle.dumps(mine.state_dict()))
    assert all(torch.equal(state[name], value) for name, value in mine.state_dict().items())


def test_close_numerics_stay_close() -> None:
    batch = _rows(lambda number: 3)
    with made_regions(guard=True):
        found = run_program(_model, batch, "hocket", 2 * NUM_CALLS, options={"numerics": "close"})
    expected = run_program(_model, batch, None, 2 * NUM_CALLS)
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_backward_may_run_twice() -> None:
    """Also after backwards that let the graph go."""

    def gradients(backend: str | None) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU())
        run = model if backend is None else torch.compile(model, backend=backend)
        found = []
        for number in range(NUM_CALLS):
            loss = run(torch.full((2, 4), 0.1 * number)).square().sum()
            if number % 2:
                loss.backward(retain_graph=True)
            loss.backward()
            found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        return torch.stack(found)

    with made_regions():
        assert torch.equal(gradients("hocket"), gradients(None))


class Checkpointed(nn.Module):
    """Layers that are computed again in the backward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.parametrize("layer", [lambda: nn.Dropout(0.5), lambda: nn.BatchNorm1d(4)], ids=["dropout", "norm"])
def test_a_checkpoint_draws_and_averages_as_in_eager(layer: Callable[[], nn.Module]) -> None:
    def made() -> nn.Module:
        return Checkpointed(nn.Linear(4, 4), layer(), nn.Linear(4, 4))

    with made_regions():
        found = run_program(made, _rows(lambda _: 6), "hocket", NUM_CALLS)
    assert same(found, run_program(made, _rows(lambda _: 6), None, NUM_CALLS))


def test_a_checkpoint_around_a_compiled_block() -> None:
    """It makes the call again, which has to save what the first one saved."""

    def gradients(backend: str | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())
        run = model if backend is None else torch.compile(model, backend=backend)
        for number in range(2 * NUM_CALLS):
            x = torch.full((3, 4), 0.1 * number)
            found = run(x) if number % 4 == 3 else checkpoint(run, x, use_reentrant=False)
            found.square().sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    with made_regions():
        assert torch.equal(gradients("hocket"), gradients(None))


def test_a_compiled_model_is_differentiated_in_forward_mode() -> None:
    model, x = _model(), torch.ones(3, 4)
    compiled = torch.compile(model, backend="hocket")
    with made_regions():
        for _ in range(NUM_CALLS):
            compiled(x).sum().backward()
            with forward_ad.dual_level():
                pairs = [forward_ad.unpack_dual(run(forward_ad.make_dual(x, x * 2))) for run in (compiled, model)]
                assert torch.equal(pairs[0].tangent, pairs[1].tangent)


def test_an_argument_of_a_checkpoint_that_is_written_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))

    def written(x: torch.Tensor) -> torch.Tensor:
        inner = x * 2
        result = checkpoint(model, inner, use_reentrant=False)
        inner.add_(1)
        return result

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.compile(written, backend="hocket")(torch.ones(2, 4)).sum().backward()


def test_a_graph_that_cannot_be_traced_raises_eagers_error() -> None:
    weight = torch.ones(3, requires_grad=True)

    def returned(x: torch.Tensor) -> torch.Tensor:
        kept = (weight * x).exp()
        result = kept * 2
        kept.add_(1)
        return result

    with pytest.raises(RuntimeError, match="modified by an inplace operation") as found:
        torch.compile(returned, backend="hocket")(torch.ones(3)).sum().backward()
    assert found.type is RuntimeError
