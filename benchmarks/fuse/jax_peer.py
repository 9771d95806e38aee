"""An alternative for many small models: the same perceptrons in JAX, ``jit(vmap(value_and_grad))``.

JAX runs in a separate process, see `benchmarks.jax_process`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from benchmarks.jax_process import IN_A_ROW, JaxProcess, mean_s
from hocket.errors import InputError

__all__ = ["JaxPeer"]

BETAS, EPS, MOMENTUM = (0.9, 0.999), 1e-8, 0.9


class JaxPeer(JaxProcess):
    """A process that trains B perceptrons by JAX.

    Args:
        models: the perceptrons, linear layers with ReLU between them. Their weights are where JAX begins.
        batches: for each step in turns, inputs ``(N, width)`` and labels ``(N,)``: one pair for all models, or one for
            each.
        optimizer: "sgd", with momentum, or "adam", as torch's are.
        rates, decays: of each model.

    Raises:
        InputError: a model is no such perceptron.
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
        layers = [_layers_of(model) for model in models]
        stacked = [
            (np.stack([w for w, _ in each]), np.stack([b for _, b in each])) for each in zip(*layers, strict=True)
        ]
        own_batches = len(batches[0]) > 1
        data = [
            tuple(np.stack([np.asarray(part) for part in parts]) for parts in zip(*each, strict=True))
            for each in batches
        ]
        if not own_batches:
            data = [(x[0], y[0]) for x, y in data]
        options = (optimizer, np.asarray(rates, np.float32), np.asarray(decays, np.float32))
        super().__init__(_serve, stacked, data, own_batches, *options)

    def seconds(self) -> float:
        """Training steps in a row, and what one of them took in its own process."""
        return float(self.ask("step"))

    def weights(self) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """Weight ``(B, out, in)`` and bias ``(B, out)`` of each layer, as they are now."""
        found: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = self.ask("weights")
        return found


def _layers_of(model: nn.Module) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    parts = list(model.children())
    if not all(isinstance(part, (nn.Linear, nn.ReLU)) for part in parts) or not isinstance(model, nn.Sequential):
        raise InputError(f"bench fuse: jax: expected linear layers and ReLU, got {type(model).__name__}")
    linear = [part for part in parts if isinstance(part, nn.Linear)]
    return [(part.weight.detach().numpy(), part.bias.detach().numpy()) for part in linear]


def _serve(pipe: Any, weights: Any, data: Any, own_batches: bool, optimizer: str, rates: Any, decays: Any) -> None:
    import jax
    from jax import numpy as jnp

    def loss(weights: Any, x: Any, y: Any) -> Any:
        for weight, bias in weights[:-1]:
            x = jax.nn.relu(x @ weight.T + bias)
        weight, bias = weights[-1]
        scores = jax.nn.log_softmax(x @ weight.T + bias)
        return -jnp.take_along_axis(scores, y[:, None], 1).mean()

    each = 0 if own_batches else None
    losses_and_gradients = jax.vmap(jax.value_and_grad(loss), in_axes=(0, each, each))

    def of_models(values: Any, like: Any) -> Any:
        return values.reshape((-1,) + (1,) * (like.ndim - 1))

    def sgd(weight: Any, gradient: Any, state: Any, count: Any) -> Any:
        (buffer,) = state
        buffer = jnp.where(count == 1, gradient, MOMENTUM * buffer + gradient)
        return weight - of_models(rates, weight) * buffer, (buffer,)

    def adam(weight: Any, gradient: Any, state: Any, count: Any) -> Any:
        first, second = state
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
        root = jnp.sqrt(second / (1 - BETAS[1] ** count)) + EPS
        return weight - of_models(rates, weight) * (first / (1 - BETAS[0] ** count)) / root, (first, second)

    update = {"sgd": sgd, "adam": adam}[optimizer]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights: Any, states: Any, count: Any, x: Any, y: Any) -> Any:
        losses, gradients = losses_and_gradients(weights, x, y)
        leaves, tree = jax.tree.flatten(weights)
        decayed = [g + of_models(decays, w) * w for g, w in zip(jax.tree.leaves(gradients), leaves, strict=True)]
        updated = [update(w, g, s, count) for w, g, s in zip(leaves, decayed, states, strict=True)]
        return jax.tree.unflatten(tree, [w for w, _ in updated]), [s for _, s in updated], losses

    weights = jax.tree.map(jnp.asarray, weights)
    kinds = {"sgd": 1, "adam": 2}[optimizer]
    states = [tuple(jnp.zeros_like(leaf) for _ in range(kinds)) for leaf in jax.tree.leaves(weights)]
    batches = [tuple(map(jnp.asarray, each)) for each in data]
    count, losses = 0, None

    def once() -> None:
        nonlocal weights, states, losses, count
        count += 1
        weights, states, losses = step(weights, states, float(count), *batches[(count - 1) % len(batches)])
        jax.block_until_ready((weights, losses))

    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        if asked == "weights":
            pipe.send([(np.asarray(weight), np.asarray(bias)) for weight, bias in weights])
            continue
        pipe.send(mean_s(once, IN_A_ROW))
