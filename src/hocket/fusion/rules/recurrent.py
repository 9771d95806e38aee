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
from torch import Tensor, nn

from hocket.fusion.rules.base import OpContext, rule
from hocket.fusion.rules.dropout import dropped
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


def tanh_cell(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A plain cell."""
    return (torch.tanh(inputs + hidden),)


def relu_cell(inputs: Tensor, hidden: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A plain cell with relu."""
    return (torch.relu(inputs + hidden),)


CELLS: dict[str, Cell] = {"LSTM": lstm_cell, "GRU": gru_cell, "RNN_TANH": tanh_cell, "RNN_RELU": relu_cell}


@rule(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(context: OpContext, input: Any, hx: Any = None) -> Any:
    """Run all layers over ``(T, N, in)`` or, batch first, ``(N, T, in)``. Returns outputs and the last states."""
    module = context.modules[0]
    assert isinstance(module, nn.RNNBase)
    if not isinstance(input, (Stacked, Tensor)) or input.ndim != 3:
        return NotImplemented  # packed sequences, or no batch
    x = with_model_dim(input, context.num_models)
    x = x.transpose(1, 2) if module.batch_first else x  # (B, T, N, in)
    is_lstm = module.mode == "LSTM"
    num_directions = 2 if module.bidirectional else 1
    starts = _starts(context, module, hx, x, num_directions)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for direction in range(num_directions):
            row = layer * num_directions + direction
            start = tuple(state[:, row] for state in starts)
            output, final = _run(context, module, layer, direction, x, start)
            outputs.append(output)
            finals.append(final)
        x = outputs[0] if num_directions == 1 else torch.cat(outputs, -1)
        if module.dropout and module.training and layer < module.num_layers - 1:
            rates = [float(each.dropout) for each in context.modules]  # type: ignore[arg-type]
            x = dropped(context, Stacked(x), rates).tensor
    last = tuple(Stacked(torch.stack(states, 1)) for states in zip(*finals, strict=True))
    out = Stacked(x.transpose(1, 2) if module.batch_first else x)
    return (out, last if is_lstm else last[0])


def _weights(context: OpContext, suffix: str = "") -> tuple[Any, ...]:
    """Weights of inputs and state, their biases, and the weight of an LSTM's projection, each None if absent."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
    return tuple(None if (found := context.lookup(name + suffix)) is None else found.tensor for name in names)


def _starts(context: OpContext, module: nn.RNNBase, hx: Any, x: Tensor, num_directions: int) -> tuple[Tensor, ...]:
    """The first states, ``(B, layers * directions, N, H)`` each."""
    if hx is not None:
        given = hx if isinstance(hx, (tuple, list)) else (hx,)
        return tuple(with_model_dim(state, context.num_models) for state in given)
    rows = module.num_layers * num_directions
    hidden_size = module.proj_size or module.hidden_size
    hidden = x.new_zeros(context.num_models, rows, x.shape[2], hidden_size)
    if module.mode != "LSTM":
        return (hidden,)
    return (hidden, x.new_zeros(context.num_models, rows, x.shape[2], module.hidden_size))


def _run(
    context: OpContext, module: nn.RNNBase, layer: int, direction: int, x: Tensor, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction over all steps of ``(B, T, N, in)``."""
    suffix = f"_l{layer}{'_reverse' if direction else ''}"
    w_ih, w_hh, b_ih, b_hh, w_hr = _weights(context, suffix)
    num_models, steps, batch, width = x.shape
    cell = CELLS[module.mode]
    inputs = product(x.reshape(num_models, steps * batch, width), w_ih, b_ih).view(num_models, steps, batch, -1)
    outputs: list[Tensor] = []
    times = inputs.unbind(1)
    for here in reversed(times) if direction else times:
        state = cell(here, product(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            state = (product(state[0], w_hr), *state[1:])
        outputs.append(state[0])
    if direction:
        outputs.reverse()
    return torch.stack(outputs, 1), state


@rule(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def one_step(context: OpContext, input: Any, hx: Any = None) -> Any:
    """One step over ``(N, in)``. Returns the new state, and both states of an LSTM."""
    module = context.modules[0]
    assert isinstance(module, nn.RNNCellBase)
    if input.ndim != 2:
        return NotImplemented
    x = with_model_dim(input, context.num_models)
    if hx is None:
        zeros = x.new_zeros(context.num_models, x.shape[1], module.hidden_size)
        state: tuple[Tensor, ...] = (zeros, zeros)
    else:
        given = hx if isinstance(hx, (tuple, list)) else (hx,)
        state = tuple(with_model_dim(each, context.num_models) for each in given)
    w_ih, w_hh, b_ih, b_hh, _ = _weights(context)
    if isinstance(module, nn.RNNCell):
        cell = CELLS["RNN_TANH" if module.nonlinearity == "tanh" else "RNN_RELU"]
    else:
        cell = lstm_cell if isinstance(module, nn.LSTMCell) else gru_cell
    new = cell(product(x, w_ih, b_ih), product(state[0], w_hh, b_hh), state)
    return tuple(map(Stacked, new)) if isinstance(module, nn.LSTMCell) else Stacked(new[0])
