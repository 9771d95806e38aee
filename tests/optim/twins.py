"""One fused optimizer beside B of torch's, over the same parameters, gradients and options.

A gradient is made from the parameter itself and from noise, so that an error feeds on itself as it would in training.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hocket import optim

# The last dimension of a matrix is odd, so that vectorised kernels have a rest; one parameter is a single number.
SHAPES = ((4, 5), (7,), (), (2, 3, 3))

# For each case the class, and options for B = 7: a list is one number for each model; fewer take the first ones.
RATES = [0.1, 0.03, 0.2, 0.01, 0.07, 0.05, 0.15]
DECAYS = [0.01, 0.0, 0.1, 0.02, 0.0, 0.3, 0.05]
MOMENTA = [0.9, 0.0, 0.5, 0.1, 0.99, 0.7, 0.3]
BETAS = ([0.9, 0.5, 0.0, 0.8, 0.95, 0.99, 0.3], [0.999, 0.9, 0.99, 0.5, 0.95, 0.98, 0.9999])
EPS = [1e-8, 1e-6, 1e-4, 1e-8, 1e-2, 1e-10, 1e-8]
LARGER_EPS = [1e-8, 1e-6, 1e-4, 1e-8, 1e-2, 1e-3, 1e-8]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1}),
    "sgd-rates": ("SGD", {"lr": RATES}),
    "sgd-rate-0": ("SGD", {"lr": [0, *RATES[1:]]}),
    "sgd-momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd-momenta": ("SGD", {"lr": RATES, "momentum": MOMENTA}),
    "sgd-dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "sgd-dampenings": (
        "SGD",
        {"lr": RATES, "momentum": MOMENTA, "dampening": [0.1, 0.5, 0.0, 0.2, 0.9, -0.1, 0.3], "weight_decay": DECAYS},
    ),
    "sgd-nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-nesterovs": (
        "SGD",
        {"lr": RATES, "momentum": [0.9, 0.2, 0.5, 0.1, 0.99, 0.7, 0.3], "nesterov": True, "weight_decay": DECAYS},
    ),
    "sgd-maximize": ("SGD", {"lr": RATES, "momentum": 0.5, "weight_decay": DECAYS, "maximize": True}),
    "adam": ("Adam", {"lr": 0.1}),
    "adam-rates": ("Adam", {"lr": RATES}),
    "adam-all": ("Adam", {"lr": RATES, "betas": BETAS, "eps": EPS, "weight_decay": DECAYS}),
    "adam-beta1": ("Adam", {"lr": 0.1, "betas": ([0.9, 0.5, 0.0, 0.8, 0.95, 0.99, 0.3], 0.99)}),
    "adam-amsgrad": ("Adam", {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "adam-amsgrads": ("Adam", {"lr": RATES, "amsgrad": True, "eps": EPS}),
    "adam-maximize": ("Adam", {"lr": RATES, "maximize": True}),
    "adam-decoupled": ("Adam", {"lr": RATES, "weight_decay": DECAYS, "decoupled_weight_decay": True}),
    "adamw": ("AdamW", {"lr": 0.1}),
    "adamw-all": ("AdamW", {"lr": RATES, "weight_decay": DECAYS, "betas": (0.8, [0.9] * 7), "amsgrad": True}),
    "nadam": ("NAdam", {"lr": 0.1}),
    "nadam-all": (
        "NAdam",
        {
            "lr": RATES,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": DECAYS,
            "momentum_decay": [4e-3, 0.0, 0.1, 1e-3, 0.01, 0.5, 4e-3],
        },
    ),
    "nadam-decoupled": ("NAdam", {"lr": RATES, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    "radam": ("RAdam", {"lr": 0.1}),
    "radam-all": ("RAdam", {"lr": RATES, "betas": BETAS, "eps": EPS, "weight_decay": DECAYS}),
    "radam-decoupled": ("RAdam", {"lr": RATES, "weight_decay": DECAYS, "decoupled_weight_decay": True}),
    "adamax": ("Adamax", {"lr": 0.1, "weight_decay": 0.01}),
    "adamax-all": ("Adamax", {"lr": RATES, "betas": BETAS, "eps": EPS, "weight_decay": DECAYS}),
    "adamax-maximize": ("Adamax", {"lr": 0.1, "maximize": True}),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "rmsprop-momentum": ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    "rmsprop-all": (
        "RMSprop",
        {
            "lr": [rate / 10 for rate in RATES],
            "alpha": [0.99, 0.9, 0.5, 0.8, 0.95, 0.0, 0.7],
            "eps": LARGER_EPS,
            "weight_decay": DECAYS,
            "momentum": MOMENTA,
        },
    ),
    "rmsprop-centered": ("RMSprop", {"lr": RATES, "alpha": [0.99, 0.9, 0.5, 0.8, 0.95, 0.6, 0.7], "centered": True}),
    "rmsprop-maximize": ("RMSprop", {"lr": 0.01, "maximize": True, "eps": LARGER_EPS}),
    "adagrad": ("Adagrad", {"lr": 0.1}),
    "adagrad-all": (
        "Adagrad",
        {
            "lr": RATES,
            "lr_decay": [0.0, 0.1, 0.01, 0.5, 1.0, 0.2, 0.3],
            "weight_decay": DECAYS,
            "initial_accumulator_value": [0.0, 0.1, 1.0, 0.5, 0.0, 2.0, 0.3],
            "eps": [1e-10, 1e-6, 1e-4, 1e-8, 1e-2, 1e-3, 1e-8],
        },
    ),
    "adagrad-maximize": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2, "maximize": True}),
    "adadelta": ("Adadelta", {}),
    "adadelta-all": (
        "Adadelta",
        {
            "lr": [1.0, 0.5, 2.0, 0.1, 0.0, 0.3, 1.5],
            "rho": [0.9, 0.5, 0.99, 0.0, 1.0, 0.8, 0.95],
            "eps": [1e-6, 1e-4, 1e-2, 1e-8, 1e-3, 1e-5, 1e-1],
            "weight_decay": DECAYS,
        },
    ),
    "adadelta-maximize": ("Adadelta", {"weight_decay": 0.1, "maximize": True}),
}

# One of each class, with numbers that differ, for tests of what the classes share.
EACH = (
    *("sgd-rates", "sgd-dampenings", "adam-all", "adamw-all", "nadam-all", "radam-all", "adamax-all"),
    *("rmsprop-all", "adagrad-all", "adadelta-all"),
)


def options_of(case: str, num_models: int) -> dict[str, Any]:
    """The options of a case for B models."""
    return {key: cut(value, num_models) for key, value in CASES[case][1].items()}


def cut(value: Any, num_models: int) -> Any:
    """The part of an option that belongs to the first models."""
    if isinstance(value, tuple):
        return tuple(cut(part, num_models) for part in value)
    return value[:num_models] if isinstance(value, list) else value


def of_model(value: Any, model: int) -> Any:
    """The part of an option that belongs to one model."""
    if isinstance(value, tuple):
        return tuple(of_model(part, model) for part in value)
    return value[model] if isinstance(value, list) else value


def fused_parameters(num_models: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in SHAPES:
        # Each model's numbers are drawn on their own: they are the same whatever B is.
        p = torch.nn.Parameter(torch.stack([torch.randn(shape, dtype=dtype, generator=generator) for _ in range(7)]))
        p.data = p.data[:num_models].clone()
        p._hocket_models = num_models
        params.append(p)
    return params


def gradient(p: torch.Tensor, step: int, place: int, model: int) -> torch.Tensor:
    """The gradient of one model's parameter, the same in whatever company it is."""
    return 0.3 * p.detach() + _noise(p.shape, p.dtype, 1000 * step + 10 * place + model)


@functools.cache
def _noise(shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Drawn once for all tests, which add it to something of theirs."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def set_gradients(params: Sequence[torch.Tensor], step: int, models: Sequence[int], nan: Sequence[int] = ()) -> None:
    """Give fused parameters the gradients of these models; those in `nan` get one number that is none."""
    for place, p in enumerate(params):
        p.grad = torch.stack([gradient(p[slot], step, place, model) for slot, model in enumerate(models)])
        for slot in nan:
            p.grad[slot].view(-1)[step % p.grad[slot].numel()] = float("nan")


def trained(
    case: str, steps: int = 4, nan_from: int | None = None, num_models: int = 3, **more: Any
) -> tuple[list[torch.nn.Parameter], Any]:
    """Parameters and their optimizer after some steps; from step `nan_from` on, model 1 has gradients not finite."""
    params = fused_parameters(num_models)
    optimizer = getattr(optim, CASES[case][0])(params, **options_of(case, num_models), **more)
    for step in range(steps):
        is_spoilt = nan_from is not None and step >= nan_from
        set_gradients(params, step, range(num_models), nan=[1] if is_spoilt else [])
        optimizer.step()
    return params, optimizer


class Twins:
    """A fused optimizer, and beside it a torch optimizer for each model.

    Args:
        groups: makes groups of parameters: those of all models, or of one model by its number.
        more: options of the fused optimizer alone.
    """

    def __init__(
        self,
        case: str,
        num_models: int,
        dtype: torch.dtype = torch.float64,
        groups: Callable[..., Any] = lambda params, model=None: params,
        **more: Any,
    ) -> None:
        name, _ = CASES[case]
        options = options_of(case, num_models)
        self.models = list(range(num_models))
        self.params = fused_parameters(num_models, dtype)
        self.singles = [[torch.nn.Parameter(p[m].detach().clone()) for p in self.params] for m in self.models]
        self.fused = getattr(optim, name)(groups(self.params), **options, **more)
        self.torch = [
            getattr(torch.optim, name)(groups(params, m), **{key: of_model(value, m) for key, value in options.items()})
            for m, params in enumerate(self.singles)
        ]
        self.steps = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            set_gradients(self.params, self.steps, self.models)
            self.fused.step()
            for slot, model in enumerate(self.models):
                self.step_single(slot, model)
            self.steps += 1

    def step_single(self, slot: int, model: int) -> None:
        for place, p in enumerate(self.singles[slot]):
            p.grad = gradient(p, self.steps, place, model)
        self.torch[slot].step()

    def check(self, tolerance: float) -> None:
        """Parameters, state and options, each element to `tolerance` of its size."""
        self.check_parameters(tolerance)
        states = self.fused.unfuse()
        for slot in range(len(self.models)):
            same_state(states[slot], self.torch[slot].state_dict(), tolerance)

    def check_parameters(self, tolerance: float, atol: float = 0.0) -> None:
        for slot in range(len(self.models)):
            for p, single in zip(self.params, self.singles[slot], strict=True):
                torch.testing.assert_close(p[slot], single, rtol=tolerance, atol=atol)


def same_state(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert found["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        own = found["state"][index]
        assert own.keys() == entries.keys()
        for key, value in entries.items():
            torch.testing.assert_close(
                own[key], value, rtol=tolerance, atol=0, msg=lambda text, key=key: f"{key}: {text}"
            )
    assert len(found["param_groups"]) == len(expected["param_groups"])
    for own, group in zip(found["param_groups"], expected["param_groups"], strict=True):
        assert own == group


def snapshot(params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, model: int) -> list[torch.Tensor]:
    """All tensors of one model: its parameters and its state."""
    values = [p[model].detach().clone() for p in params]
    for entries in optimizer.unfuse()[model]["state"].values():
        values += [entries[key] for key in sorted(entries)]
    return values


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
