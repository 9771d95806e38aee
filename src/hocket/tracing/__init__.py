"""A torch training step becomes a `hocket.ir.Graph`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.tracing.captured import Captured

__all__ = ["capture"]


def capture(
    step: Callable[[Any], Any],
    model: Any,
    optimizer: Any,
    batch: Any,
    *,
    split: bool = True,
    pays: Callable[[str, str], bool] | None = None,
) -> Captured:
    """Capture one whole training step as a graph. The user's state stays as it is.

    The step runs on the given batch (more often when the optimizer has no state yet, or when the step branches on a
    number that is moved while it is traced) and is then undone: parameters, buffers, gradients, optimizer state and
    random state are restored. Values of the batch that the step reads in Python (``if mask.all()``) are guarded:
    `Captured.begin` returns None for a batch with another outcome.

    Args:
        step: ``step(batch) -> loss``, closing over model and optimizer.
        model: a module, or a list of modules.
        optimizer: an optimizer, or a list of optimizers.
        batch: any tree of tensors and plain values.
        split: split a convolution's backward into activation, weight and bias gradient.
        pays: ``pays(name, part) -> bool`` for each part of a split op (``activation``, ``weight``, ``bias``). Parts
            that do not pay stay together in one op.

    Returns:
        A `Captured`, whose ``graph`` is a `hocket.ir.Graph`.

    Raises:
        CaptureError: the step cannot become a graph (it branches on what it computes, changes shapes, ...). The message
            says why and where, even if the step itself swallowed the error.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     model(batch).square().mean().backward()
        ...     optimizer.step()
        >>> captured = capture(step, model, optimizer, torch.ones(2, 4))
        >>> sorted({op.role for op in captured.graph.ops})
        ['activation_grad', 'bias_grad', 'forward', 'update', 'weight_grad']
    """
    from hocket.tracing.capturing import capture_step

    return capture_step(step, model, optimizer, batch, split=split, pays=pays)
