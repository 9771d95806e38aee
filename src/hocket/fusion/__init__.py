"""Many small models train as one: ``hocket.fuse`` gives a list of models a leading model axis.

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hocket.fusion.model import Array

__all__ = ["fuse"]


def fuse(
    models: Sequence[Any],
    *,
    backend: str = "auto",
    strict: bool = False,
    separate: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    shared: bool | Mapping[str, bool] | None = None,
) -> Array:
    """Fuse models of one class into one module that trains them all. The models themselves are not touched.

    Source: Wang et al., *Horizontally Fused Training Array*, MLSys 2021, section 3.

    Every parameter of the fused module is an ``nn.Parameter`` of shape ``(B, *shape)``, the models first. An input is
    ``(B, N, ...)``, one batch for each model, or ``(N, ...)``, one batch for all. The output is ``(B, N, ...)``.

    Blocks that differ between the models (another class, other options, a parameter of another shape inside a
    container) stay separate, and the rest fuses. ``array.report()`` lists what fused.

    Args:
        models: B initialised modules of the same class, none of them shared.
        backend: "rule" (grouped convolutions, batched matrix products, ...), "vmap", "loop" (model by model), or
            "auto": the first call runs the plain models and records them, later ones run all models at once or one
            after another, whichever your calls show to be faster.
        strict: raise instead of falling back where an op has no rule, a block stays separate, or the models have no
            common graph.
        separate: names of blocks, such as ``"layer4"``, that shall not fuse.
        seeds: B seeds of random numbers, one for each model: dropout then draws in each model what the plain model
            draws after ``torch.manual_seed(seed)``. Without seeds, all models draw from torch's generator.
        shared: whether inputs are ``(N, ...)`` (True) or ``(B, N, ...)`` (False), or this by the names of arguments,
            as in ``{"x": False, "mask": True}``. With None, the first call settles how many axes one model takes, and
            where it leaves that open, asks for this argument.

    Returns:
        An `hocket.fusion.model.Array`.

    Raises:
        InputError: the models cannot fuse. The message names the layer and the reason.

    Example:
        >>> import torch
        >>> array = fuse([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
        >>> array(torch.ones(5, 3)).shape, array(torch.ones(2, 5, 3)).shape
        (torch.Size([2, 5, 2]), torch.Size([2, 5, 2]))
    """
    from hocket.fusion.model import Array

    return Array(models, backend=backend, strict=strict, separate=separate, seeds=seeds, shared=shared)
