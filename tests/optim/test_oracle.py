"""Every optimizer and option against B independent torch optimizers, in float64."""

from importlib import import_module

import pytest
import torch
from tests.fusion.oracle import SIZES

from hocket import optim
from optim.twins import CASES, EACH, Twins, fused_parameters, gradient, of_model, options_of, set_gradients
from quick import covering


@pytest.mark.parametrize(("case", "num_models"), covering(CASES, SIZES))
def test_one_step_and_fifty_are_those_of_single_optimizers(case, num_models):
    twins = Twins(case, num_models)
    twins.step()
    twins.check(1e-12)
    twins.step(49)
    twins.check(1e-9)


@pytest.mark.parametrize("case", EACH)
def test_counting_each_model_on_its_own_changes_no_bit(case):
    together, apart = Twins(case, 3), Twins(case, 3, nonfinite="skip")
    for _ in range(20):
        together.step()
        apart.step()
    apart.check(1e-9)
    for p, q in zip(together.params, apart.params, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("case", CASES)
def test_numbers_that_are_equal_give_the_bits_of_one_number(case):
    name, _ = CASES[case]
    options = {key: of_model(value, 0) for key, value in options_of(case, 7).items()}
    flags = {key: value for key, value in options.items() if isinstance(value, bool)}
    numbers = {key: value for key, value in options.items() if key not in flags}
    listed = {
        key: tuple([part] * 3 for part in value) if isinstance(value, tuple) else [value] * 3
        for key, value in numbers.items()
    }
    one, many = fused_parameters(3), fused_parameters(3)
    optimizers = [getattr(optim, name)(one, **options), getattr(optim, name)(many, **listed, **flags)]
    for step in range(10):
        for params, optimizer in zip((one, many), optimizers, strict=True):
            set_gradients(params, step, range(3))
            optimizer.step()
    for p, q in zip(one, many, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=0)


@pytest.mark.parametrize("case", EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_other_dtypes(case, dtype):
    twins = Twins(case, 3, dtype)
    twins.step(5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.complex128: 1e-12}[dtype]
    twins.check_parameters(tolerance, tolerance)


@pytest.mark.parametrize("case", EACH)
def test_parameters_of_single_models_beside_fused_ones(case):
    """Partial fusion: a block of model 1 that did not fuse takes that model's numbers."""
    twins = Twins(case, 3)
    alone = [torch.nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64)) for _ in range(2)]
    alone[0]._hocket_model = 1
    name, _ = CASES[case]
    fused = getattr(optim, name)([*twins.params, alone[0]], **options_of(case, 3))
    single = getattr(torch.optim, name)(
        [alone[1]], **{key: of_model(value, 1) for key, value in options_of(case, 3).items()}
    )
    for step in range(20):
        set_gradients(twins.params, step, range(3))
        for p in alone:
            p.grad = gradient(p, step, 9, 1)
        fused.step()
        single.step()
    torch.testing.assert_close(alone[0], alone[1], rtol=1e-12, atol=0)
    states = fused.unfuse()
    assert [len(state["param_groups"][0]["params"]) for state in states] == [4, 5, 4]
    own = states[1]["state"].get(4, {})
    for key, value in single.state_dict()["state"].get(0, {}).items():
        torch.testing.assert_close(own[key], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", EACH)
def test_groups_with_options_of_their_own(case):
    rates = [0.02, 0.2, 0.04]

    def groups(own, model=None):
        return [{"params": own[:2], "lr": rates if model is None else rates[model]}, {"params": own[2:], "lr": 0.07}]

    twins = Twins(case, 3, groups=groups)
    twins.step(10)
    twins.check_parameters(1e-12)


@pytest.mark.parametrize("case", EACH)
def test_a_parameter_that_has_a_gradient_only_now_and_then_counts_its_own_steps(case):
    twins = Twins(case, 3)
    for step in range(12):
        set_gradients(twins.params, step, range(3))
        for model, own in enumerate(twins.singles):
            for place, p in enumerate(own):
                p.grad = gradient(p, step, place, model)
        if step % 3:
            for params in (twins.params, *twins.singles):
                params[step % 2].grad = None
        twins.fused.step()
        for other in twins.torch:
            other.step()
    twins.check(1e-11)


@pytest.mark.parametrize(
    ("case", "chunk_bytes", "nonfinite"),
    covering([*EACH, "sgd-nesterovs", "rmsprop-momentum", "adam-amsgrads"], [1, 300], ["step", "freeze"]),
)
def test_no_matter_how_the_parameters_are_cut_into_chunks(case, chunk_bytes, nonfinite, monkeypatch):
    """One model at a time, or a few."""
    whole, cut = (Twins(case, 7, nonfinite=nonfinite) for _ in range(2))
    whole.step(5)
    monkeypatch.setattr(import_module("hocket.optim.chunks"), "CHUNK_BYTES", chunk_bytes)
    cut.step(5)
    cut.check(1e-11)
    for p, q in zip(whole.params, cut.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by torch's kernel, and op by op
@pytest.mark.parametrize("moved", ["parameter", "strides", "exp_avg", "exp_avg_sq", "all"])
def test_large_parameters_that_move_in_memory(moved, dtype, monkeypatch):
    """Parts of what lies elsewhere by now are made anew."""
    monkeypatch.setattr(import_module("hocket.optim.chunks"), "CHUNK_BYTES", 1 << 9)
    options = {"lr": [0.1, 0.03, 0.2], "weight_decay": [0.01, 0.0, 0.1]}
    torch.manual_seed(0)
    one, other = (torch.nn.Parameter(torch.ones(3, 16, 16, dtype=dtype)) for _ in range(2))
    optimizers = [optim.Adam([p], **options, num_models=3) for p in (one, other)]
    kept = []
    for _ in range(4):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        if moved in ("parameter", "all"):
            kept.append(other.data)
            other.data = other.data.clone()
        if moved == "strides":
            kept.append(one.data)
            one.data, other.data = one.data.clone().transpose(1, 2), other.data.transpose(1, 2)
        for key in {"exp_avg", "exp_avg_sq"} if moved == "all" else {moved} - {"parameter", "strides"}:
            kept.append(optimizers[1].state[other][key])
            optimizers[1].state[other][key] = kept[-1].clone()
    assert kept
    assert torch.equal(one, other)
    states = [optimizer.state[p] for optimizer, p in zip(optimizers, (one, other), strict=True)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1 << 9])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": [0.1, 0.03, 0.2]},
        {"lr": [0.1, 0.03, 0.2], "weight_decay": [0.01, 0.0, 0.1], "amsgrad": True, "maximize": True},
        {"lr": 0.1, "weight_decay": [0.01, 0.0, 0.1]},
        {"lr": [0.1, 0.03, 0.2], "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.1, "weight_decay": [0.01, 0.0, 0.1], "decoupled_weight_decay": True},
    ],
)
def test_rates_of_each_model_by_torchs_kernel(options, chunk_bytes, monkeypatch):
    """In single precision, where every model's part fills whole cache lines; against torch in double precision."""
    monkeypatch.setattr(import_module("hocket.optim.chunks"), "CHUNK_BYTES", chunk_bytes)
    name = "_fused_adamw_" if options.get("decoupled_weight_decay") else "_fused_adam_"
    kernel, calls = getattr(torch, name), []

    def counted(*args, **kwargs):
        calls.append(kwargs["lr"])
        return kernel(*args, **kwargs)

    monkeypatch.setattr(torch, name, counted)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(3, *shape)) for shape in ((8, 16), (16,), (4, 4, 4))]
    singles = [[torch.nn.Parameter(p[m].detach().double()) for p in params] for m in range(3)]
    fused = optim.Adam(params, **options, num_models=3)
    others = [
        torch.optim.Adam(own, **{key: of_model(value, m) for key, value in options.items()})
        for m, own in enumerate(singles)
    ]
    for _ in range(10):
        for place, p in enumerate(params):
            p.grad = torch.randn_like(p)
            for m in range(3):
                singles[m][place].grad = p.grad[m].double()
        fused.step()
        for other in others:
            other.step()
    assert set(calls) == {1.0 if isinstance(options["lr"], list) else 0.1}
    for m in range(3):
        for p, single in zip(params, singles[m], strict=True):
            torch.testing.assert_close(p[m].double(), single, rtol=0, atol=2e-6)


def test_the_kernel_leaves_a_model_that_is_not_finite_to_itself(monkeypatch):
    """Nor do chunks leave anything behind for the next one."""
    monkeypatch.setattr(import_module("hocket.optim.chunks"), "CHUNK_BYTES", 1 << 9)
    found = []
    for spoilt in (False, True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3, *shape)) for shape in ((8, 16), (16,), (4, 4, 4))]
        optimizer = optim.Adam(params, lr=[0.1, 0.03, 0.2], num_models=3)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
                if spoilt:
                    p.grad[1] = float("nan")
            optimizer.step()
        found.append([p.detach()[[0, 2]] for p in params])
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean, other)
