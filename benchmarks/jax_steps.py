"""Whole training steps in JAX, ``jit`` of loss, gradients and update: what one could write in place of the torch step.

`jax_step` trains one model, and `jax_peer` many small ones by ``vmap`` of the same. Both in a process beside torch's:
their threads would get in each other's way in one (`benchmarks.turns.Elsewhere`, whose `loss` is the last one's).

The models are the zoo's MLP and unrolled LSTM cells and transformers' GPT-2 without dropout; weights, batches and
numbers of the optimizer are the torch job's own, so the losses are too, within rounding.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks.turns import Elsewhere, answer
from hocket.job import Job

OPTIMIZERS = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
OPTIONS = ("lr", "momentum", "betas", "eps", "weight_decay")


def jax_missing() -> str:
    """Return why JAX cannot be measured here, empty if it can."""
    return "" if importlib.util.find_spec("jax") else "jax: is not installed: pip install -e '.[jax]'"


def jax_step(name: str, job: Job, *, heads: int = 4) -> Elsewhere:
    """A process that takes the steps of a job (of `MODELS`, by SGD, Adam or AdamW) that has not been trained yet."""
    (model,), (optimizer,) = job.models, job.optimizers
    weights = {each: value.detach().numpy() for each, value in model.named_parameters()}
    batches = [tree_map_only(torch.Tensor, torch.Tensor.numpy, job.batch(number)) for number in range(4)]
    options = {option: value for option, value in optimizer.param_groups[0].items() if option in OPTIONS}
    return Elsewhere(_serve, name, weights, batches, OPTIMIZERS[type(optimizer)], options, heads)


def jax_peer(
    models: Sequence[nn.Module],
    batches: Sequence[tuple[Any, Any]],
    optimizer: str,
    rates: Sequence[float],
    decays: Sequence[float],
) -> Elsewhere:
    """A process that trains B perceptrons, from the weights of these models, by a rate and a weight decay for each.

    Batches are for each step in turns, inputs ``(N, width)`` and labels ``(N,)`` for all models.
    """
    parameters = [dict(model.named_parameters()) for model in models]
    stacked = {name: np.stack([each[name].detach().numpy() for each in parameters]) for name in parameters[0]}
    options = {
        "lr": np.asarray(rates, np.float32),
        "weight_decay": np.asarray(decays, np.float32),
        **{"momentum": 0.9, "betas": (0.9, 0.999), "eps": 1e-8},
    }
    data = [tuple(map(np.asarray, each)) for each in batches]
    return Elsewhere(_serve, "mlp", stacked, data, optimizer, options, 1)


def _serve(
    pipe: Any,
    name: str,
    weights: Any,
    batches: list[Any],
    kind: str,
    options: Mapping[str, Any],
    heads: int,
) -> None:
    """Train one model, or as many as there are rates."""
    import jax
    from jax import numpy as jnp

    loss = partial(MODELS[name], heads)
    update = {"sgd": _sgd, "adam": _adam, "adamw": _adamw}[kind]
    rate, decay = options["lr"], options["weight_decay"]

    def one(weights: Any, states: Any, count: Any, rate: Any, decay: Any, batch: Any) -> Any:
        own = {**options, "weight_decay": decay}
        found, gradients = jax.value_and_grad(loss)(weights, batch)
        pairs = {key: update(weights[key], gradients[key], states[key], count, rate, own) for key in weights}
        return {key: new for key, (new, _) in pairs.items()}, {key: state for key, (_, state) in pairs.items()}, found

    if np.ndim(rate):
        one = jax.vmap(one, in_axes=(0, 0, None, 0, 0, None))
    step = jax.jit(one, donate_argnums=(0, 1))
    weights = jax.tree.map(jnp.asarray, weights)
    states = {key: (jnp.zeros_like(value), jnp.zeros_like(value)) for key, value in weights.items()}
    given = [jax.tree.map(jnp.asarray, batch) for batch in batches]

    def once(number: int) -> Any:
        nonlocal weights, states
        weights, states, found = step(weights, states, number + 1.0, rate, decay, given[number % len(given)])
        return jax.block_until_ready((found, weights))[0]

    answer(pipe, {}, once, lambda number: number, lambda found: float(found.mean()))


def _sgd(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: dict[str, Any]) -> Any:
    from jax import numpy as jnp

    gradient = gradient + options["weight_decay"] * weight
    if not options["momentum"]:
        return weight - rate * gradient, state
    buffer = jnp.where(count == 1, gradient, options["momentum"] * state[0] + gradient)
    return weight - rate * buffer, (buffer, state[1])


def _adam(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: dict[str, Any]) -> Any:
    return _adamw(
        weight, gradient + options["weight_decay"] * weight, state, count, rate, options | {"weight_decay": 0}
    )


def _adamw(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: dict[str, Any]) -> Any:
    from jax import numpy as jnp

    weight = weight * (1 - rate * options["weight_decay"])
    beta1, beta2 = options["betas"]
    first = beta1 * state[0] + (1 - beta1) * gradient
    second = beta2 * state[1] + (1 - beta2) * gradient**2
    root = jnp.sqrt(second / (1 - beta2**count)) + options["eps"]
    return weight - rate * (first / (1 - beta1**count)) / root, (first, second)


def _cross_entropy(scores: Any, labels: Any) -> Any:
    import jax
    from jax import numpy as jnp

    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1).mean()


def _mlp(_: int, weights: Mapping[str, Any], batch: Any) -> Any:
    import jax

    x, labels = batch
    layers = sorted((key.removesuffix(".weight") for key in weights if key.endswith(".weight")), key=int)
    for layer in layers:
        x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        x = x if layer == layers[-1] else jax.nn.relu(x)
    return _cross_entropy(x, labels)


def _lstm_cells(_: int, weights: Mapping[str, Any], batch: Any) -> Any:
    import jax
    from jax import numpy as jnp

    tokens, labels = batch
    embedded = weights["embedding.weight"][tokens]
    depth = sum(key.endswith(".weight_ih") for key in weights)
    zeros = jnp.zeros_like(embedded[:, 0])
    states = [(zeros, zeros)] * depth
    outputs = []
    for time in range(embedded.shape[1]):
        x = embedded[:, time]
        for layer in range(depth):
            hidden, cell = states[layer]
            own = {key.rpartition(".")[2]: value for key, value in weights.items() if key.startswith(f"cells.{layer}.")}
            gates = x @ own["weight_ih"].T + own["bias_ih"] + hidden @ own["weight_hh"].T + own["bias_hh"]
            enter, forget, new, leave = jnp.split(gates, 4, axis=1)
            cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
            x = jax.nn.sigmoid(leave) * jnp.tanh(cell)
            states[layer] = (x, cell)
        outputs.append(x)
    scores = jnp.stack(outputs, 1) @ weights["projection.weight"].T + weights["projection.bias"]
    return _cross_entropy(scores, labels)


def _gpt2(heads: int, weights: Mapping[str, Any], batch: Any) -> Any:
    import jax
    from jax import numpy as jnp

    words = batch["input_ids"]
    rows, steps = words.shape
    x = weights["transformer.wte.weight"][words] + weights["transformer.wpe.weight"][:steps]
    width = x.shape[-1]
    causal = jnp.tril(jnp.ones((steps, steps), bool))

    def norm(x: Any, key: str) -> Any:
        mean = x.mean(-1, keepdims=True)
        scaled = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
        return scaled * weights[f"{key}.weight"] + weights[f"{key}.bias"]

    def dense(x: Any, key: str) -> Any:
        return x @ weights[f"{key}.weight"] + weights[f"{key}.bias"]

    for layer in range(sum(key.endswith(".attn.c_attn.weight") for key in weights)):
        key = f"transformer.h.{layer}"
        mixed = dense(norm(x, f"{key}.ln_1"), f"{key}.attn.c_attn")
        own = [part.reshape(rows, steps, heads, -1).swapaxes(1, 2) for part in jnp.split(mixed, 3, -1)]
        scores = own[0] @ own[1].swapaxes(2, 3) / math.sqrt(width // heads)
        attended = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ own[2]
        x = x + dense(attended.swapaxes(1, 2).reshape(rows, steps, width), f"{key}.attn.c_proj")
        inner = jax.nn.gelu(dense(norm(x, f"{key}.ln_2"), f"{key}.mlp.c_fc"), approximate=True)
        x = x + dense(inner, f"{key}.mlp.c_proj")
    scores = norm(x, "transformer.ln_f") @ weights["transformer.wte.weight"].T
    return _cross_entropy(scores[:, :-1], batch["labels"][:, 1:])


MODELS: dict[str, Callable[[int, Mapping[str, Any], Any], Any]] = {
    "mlp": _mlp,
    "lstm-cells": _lstm_cells,
    "gpt2": _gpt2,
}
