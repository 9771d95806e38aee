"""Whole training steps in JAX, ``jit`` of loss, gradients and update: what one could write in place of the torch step.

`JaxStep` trains one model, and `JaxPeer` many small ones by ``vmap`` of the same. Both in a process beside torch's:
their threads would get in each other's way in one. The process times its steps itself, some in a row: what a pipe takes
is not part of a step, nor what JAX's threads, which fall asleep between two questions, take to wake up.

The models are those of the zoo's MLP, of its unrolled LSTM cells, and of transformers' GPT-2 without dropout, written
as functions of their weights; weights, batches and numbers of the optimizer are the torch job's own, so the losses are
too, within rounding.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hocket.errors import InputError
from hocket.job import Job

PATIENCE_S = 120.0  # for the first step, which is compiled
IN_A_ROW = 4  # steps for each one that is asked for, where they are timed
OPTIMIZERS = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
OPTIONS = ("lr", "momentum", "betas", "eps", "weight_decay")


def jax_missing() -> str:
    """Return why JAX cannot be measured here, empty if it can."""
    return "" if importlib.util.find_spec("jax") else "jax: is not installed: pip install -e '.[jax]'"


def mean_s(step: Callable[[], Any], in_a_row: int) -> float:
    """Return the mean seconds of a step over several in a row without the first, or of a single one.

    Example:
        >>> mean_s(lambda: None, 4) < 1.0
        True
    """
    begin = perf_counter()
    for number in range(in_a_row):
        if number == 1:
            begin = perf_counter()
        step()
    return (perf_counter() - begin) / max(1, in_a_row - 1)


class JaxProcess:
    """A process that trains by JAX and answers questions. `arguments` are those of `_serve`, which runs in it.

    Raises:
        RuntimeError: the process ended, or did not answer.
    """

    def __init__(self, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *arguments))
        self._process.daemon = True
        self._process.start()
        theirs.close()

    def ask(self, what: str) -> Any:
        """The answer to a question."""
        self._pipe.send(what)
        if not self._pipe.poll(PATIENCE_S):
            raise RuntimeError("jax: its process does not answer")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError("jax: its process ended") from None

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.terminate()


class JaxStep(JaxProcess):
    """A process that takes a job's steps by JAX.

    Args:
        name: of `MODELS`.
        job: whose model has not been trained yet.
        heads: of attention, where there is any.
        in_a_row: steps for each one that is asked for (see `mean_s`).

    Raises:
        InputError: its optimizer is none of SGD, Adam and AdamW, or has options that are not written here.
        RuntimeError: the process ended, or did not answer.
    """

    def __init__(self, name: str, job: Job, *, heads: int = 1, in_a_row: int = 1) -> None:
        (model,), (optimizer,) = job.models, job.optimizers
        kind = OPTIMIZERS.get(type(optimizer))
        if kind is None or len(optimizer.param_groups) != 1:
            raise InputError(f"jax: expected SGD, Adam or AdamW with one group, got {type(optimizer).__name__}")
        group = optimizer.param_groups[0]
        if any(group.get(flag) for flag in ("nesterov", "amsgrad", "maximize", "dampening")):
            raise InputError("jax: expected an optimizer without nesterov, amsgrad, maximize and dampening")
        weights = {each: value.detach().numpy() for each, value in model.named_parameters()}
        batches = [tree_map_only(torch.Tensor, torch.Tensor.numpy, job.batch(number)) for number in range(4)]
        options = {option: group[option] for option in OPTIONS if option in group}
        super().__init__(name, weights, batches, kind, options, heads, in_a_row)
        self.loss = math.nan  # of the last step

    def __call__(self, batch: Any = None) -> float:
        """One training step (or `in_a_row`) on the next batch of its own. Gives its loss."""
        self.seconds(batch)
        return self.loss

    def seconds(self, _: Any = None) -> float:
        """Take such a step and return its mean seconds, measured in its process."""
        took_s, self.loss = self.ask("step")
        return float(took_s)


class JaxPeer(JaxProcess):
    """A process that trains B perceptrons by JAX.

    Args:
        models: linear layers with ReLU between them. Their weights are where JAX begins.
        batches: for each step in turns, inputs ``(N, width)`` and labels ``(N,)``: one pair for all models, or one for
            each.
        optimizer: "sgd", with momentum, or "adam", as torch's are.
        rates, decays: of each model.

    Raises:
        RuntimeError: the process ended, or did not answer.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        batches: Sequence[Sequence[tuple[Any, Any]]],
        optimizer: str,
        rates: Sequence[float],
        decays: Sequence[float],
    ) -> None:
        parameters = [dict(model.named_parameters()) for model in models]
        stacked = {name: np.stack([each[name].detach().numpy() for each in parameters]) for name in parameters[0]}
        has_own = len(batches[0]) > 1
        data = [tuple(map(np.stack, zip(*each, strict=True))) if has_own else tuple(each[0]) for each in batches]
        options = {
            "lr": np.asarray(rates, np.float32),
            "weight_decay": np.asarray(decays, np.float32),
            **{"momentum": 0.9, "betas": (0.9, 0.999), "eps": 1e-8},
        }
        data = [tuple(map(np.asarray, each)) for each in data]
        super().__init__("mlp", stacked, data, optimizer, options, 1, IN_A_ROW, 0 if has_own else None)

    def seconds(self) -> float:
        """Training steps in a row, and what one of them took in its own process."""
        return float(self.ask("step")[0])

    def weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """The parameters by name as they are now, with a leading axis of models."""
        found: dict[str, np.ndarray[Any, Any]] = self.ask("weights")
        return found


def _serve(
    pipe: Any,
    name: str,
    weights: Any,
    batches: list[Any],
    kind: str,
    options: Mapping[str, Any],
    heads: int,
    in_a_row: int,
    batch_axis: int | None = None,
) -> None:
    """Train one model, or as many as there are rates, each of which has its own batch if there is a `batch_axis`."""
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
        one = jax.vmap(one, in_axes=(0, 0, None, 0, 0, batch_axis))
    step = jax.jit(one, donate_argnums=(0, 1))
    weights = jax.tree.map(jnp.asarray, weights)
    states = {key: (jnp.zeros_like(value), jnp.zeros_like(value)) for key, value in weights.items()}
    given = [jax.tree.map(jnp.asarray, batch) for batch in batches]
    count, found = 0, jnp.zeros(())

    def once() -> None:
        nonlocal weights, states, found, count
        count += 1
        weights, states, found = step(weights, states, float(count), rate, decay, given[(count - 1) % len(given)])
        jax.block_until_ready((weights, found))

    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked == "weights":
            pipe.send({key: np.asarray(value) for key, value in weights.items()})
        else:
            took_s = mean_s(once, in_a_row)
            pipe.send((took_s, float(found.mean())))


def _sgd(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: Mapping[str, Any]) -> Any:
    from jax import numpy as jnp

    gradient = gradient + options["weight_decay"] * weight
    if not options["momentum"]:
        return weight - rate * gradient, state
    buffer = jnp.where(count == 1, gradient, options["momentum"] * state[0] + gradient)
    return weight - rate * buffer, (buffer, state[1])


def _adam(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: Mapping[str, Any]) -> Any:
    return _moments(weight, gradient + options["weight_decay"] * weight, state, count, rate, options)


def _adamw(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: Mapping[str, Any]) -> Any:
    return _moments(weight * (1 - rate * options["weight_decay"]), gradient, state, count, rate, options)


def _moments(weight: Any, gradient: Any, state: Any, count: Any, rate: Any, options: Mapping[str, Any]) -> Any:
    from jax import numpy as jnp

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
