"""LSTM, GRU and plain RNN, and their cells: time step by time step, each step one batched product for all models.

    all steps at once    inputs   (B, T*N, in) x (B, in, gates*H)
    then, for t < T      state    (B, N, H) x (B, H, gates*H), and the gates

The products of the inputs do not wait for the state, so they are one product. What is left in the loop are small
operations, whose number does not grow with B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.rules.dropout import dropped, rates_of
from hocket.fusion.rules.linear import product
from hocket.fusion.stacked import Stacked, with_model_dim

Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def lstm_cell(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Add the gates ``(B, N, 4*H)`` of inputs and state, and compute the new hidden and cell state."""
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def gru_cell(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The reset gate acts on the state's part of the candidate alone, so the two parts stay apart."""
    input_r, input_z, input_n = inputs.chunk(3, -1)
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, -1)
    r, z = torch.sigmoid(input_r + hidden_r), torch.sigmoid(input_z + hidden_z)
    n = torch.tanh(input_n + r * hidden_n)
    return (n + z * (state[0] - n),)


CELLS: dict[str, Cell] = {
    "lstm": lstm_cell,
    "gru": gru_cell,
    "rnn_tanh": lambda inputs, hidden, state: (torch.tanh(inputs + hidden),),
    "rnn_relu": lambda inputs, hidden, state: (torch.relu(inputs + hidden),),
}


@rule(*CELLS)
def recurrent(
    context: OpContext,
    input: Any,
    hx: Any,
    weights: Any,
    has_biases: bool,
    num_layers: int,
    dropout: Any,
    training: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """Run all layers over ``(T, N, in)`` or, batch first, ``(N, T, in)``. Returns outputs and the last states."""
    if input.ndim != 3 or not all(isinstance(weight, Stacked) for weight in weights):
        return NotImplemented  # packed sequences have other arguments
    x = with_model_dim(input, context.num_models)
    x = x.transpose(1, 2) if batch_first else x  # (B, T, N, in)
    states = _states(context, hx)
    num_directions = 2 if bidirectional else 1
    size = len(weights) // (num_layers * num_directions)  # of one layer in one direction
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(num_directions):
            row = layer * num_directions + direction
            own = [weight.tensor for weight in weights[row * size : (row + 1) * size]]
            start = tuple(state[:, row] for state in states)
            output, final = _run(CELLS[context.name], own, has_biases, x, start, is_reversed=bool(direction))
            outputs.append(output)
            finals.append(final)
        x = outputs[0] if num_directions == 1 else torch.cat(outputs, -1)
        rates = rates_of(context, dropout)
        if any(rates) and training and layer < num_layers - 1:
            x = dropped(context, Stacked(x), rates).tensor
    last = [Stacked(torch.stack(states, 1)) for states in zip(*finals, strict=True)]
    return (Stacked(x.transpose(1, 2) if batch_first else x), *last)


def _states(context: OpContext, hx: Any) -> tuple[Tensor, ...]:
    """The first states, ``(B, layers * directions, N, H)`` each, or ``(B, N, H)`` of a cell."""
    given = hx if isinstance(hx, (tuple, list)) else (hx,)
    return tuple(with_model_dim(state, context.num_models) for state in given)


def _run(
    cell: Cell, weights: list[Tensor], has_biases: bool, x: Tensor, state: tuple[Tensor, ...], *, is_reversed: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction over all steps of ``(B, T, N, in)``."""
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    projection = rest[2 * has_biases :]  # of an LSTM's hidden state
    num_models, steps, batch, width = x.shape
    inputs = product(x.reshape(num_models, steps * batch, width), w_ih, b_ih).view(num_models, steps, batch, -1)
    outputs: list[Tensor] = []
    times = inputs.unbind(1)
    for here in reversed(times) if is_reversed else times:
        state = cell(here, product(state[0], w_hh, b_hh), state)
        if projection:
            state = (product(state[0], projection[0]), *state[1:])
        outputs.append(state[0])
    if is_reversed:
        outputs.reverse()
    return torch.stack(outputs, 1), state


@rule(*(f"{name}_cell" for name in CELLS))
def one_step(context: OpContext, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """One step over ``(N, in)``. Returns the new state, and both states of an LSTM."""
    if any(isinstance(each, Tensor) for each in (w_ih, w_hh, b_ih, b_hh)):
        return NotImplemented  # a weight that all models share
    state, cell = _states(context, hx), CELLS[context.name.removesuffix("_cell")]
    of_input = product(with_model_dim(input, context.num_models), w_ih.tensor, None if b_ih is None else b_ih.tensor)
    of_state = product(state[0], w_hh.tensor, None if b_hh is None else b_hh.tensor)
    new = cell(of_input, of_state, state)
    return tuple(map(Stacked, new)) if len(new) > 1 else Stacked(new[0])
