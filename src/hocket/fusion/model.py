r"""The fused module: B models as one, their parameters stacked, their ops fused where a rule, ``vmap`` or a loop can.

    models --compare--> blocks --trace--> graph --rules--> program --choose--> what runs    (`fusion.dispatcher`),
       |                                                            or runs with its loss (`fusion.step_planner`)
       \--tensors, stacked--> parameters (B, *shape)
        \--without tensors--> templates, from which `unfuse` makes plain modules again

Source: S. Wang et al., "Horizontally Fused StepPlanner Array", MLSys 2021, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import compare
from hocket.fusion.loss import per_model_loss
from hocket.fusion.report import report
from hocket.fusion.step_planner import StepPlanner

__all__ = ["Array"]

BACKENDS = ("auto", "rule", "vmap", "loop")


class Array(StepPlanner):
    """B models fused; see `hocket.fusion.fuse`.

    Attributes:
        num_models: B.
        backend: "auto", "rule", "vmap" or "loop".
        choices: what was timed and chosen, one for each kind of call so far (``backend="auto"``).
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        backend: str = "auto",
        strict: bool = False,
        separate: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        shared: bool | Mapping[str, bool] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise InputError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
        blocks = compare(models, separate)
        models = list(models)
        if strict and blocks.separate:
            named = "; ".join(f"{name}: {reason}" for name, reason in blocks.separate.items())
            raise InputError(f"blocks that cannot fuse (strict=True): {named}")
        if seeds is not None and len(seeds) != len(models):
            raise InputError(f"seeds: expected {len(models)}, one for each model, got {len(seeds)}")
        super().__init__(models, blocks, seeds, backend=backend, strict=strict, shared=shared)

    def loss(self, fn: Callable[..., Any], out: Any, target: Any, *args: Any) -> Tensor:
        """The loss of each model, ``(B,)``; its ``backward()`` gives each model its own gradient.

        Args:
            fn: any loss function or module of one model's output and target.
            out: what the array gave, ``(B, N, ...)``.
            target: ``(B, N, ...)``, or ``(N, ...)`` for all models.
            args: more arguments of `fn`.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> loss = array.loss(nn.functional.mse_loss, array(torch.ones(5, 3)), torch.zeros(5, 2))
            >>> loss.shape
            torch.Size([2])
            >>> loss.backward()
        """
        return per_model_loss(fn, out, (target, *args), self.num_models, self.model_axis)

    def unfuse(self) -> list[nn.Module]:
        """B plain modules of the user's class, with parameters and buffers of their own.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> [type(model).__name__ for model in array.unfuse()]
            ['Linear', 'Linear']
        """
        return [self._plain(index) for index in range(self.num_models)]

    def report(self) -> str:
        """What fused, line by line: layer, op, and what computed it in the last call.

        Example:
            >>> array = Array([nn.Sequential(nn.Linear(3, 2), nn.ReLU()) for _ in range(2)], backend="rule")
            >>> _ = array(torch.ones(5, 3))
            >>> print(array.report())
            2 models, 2 ops: 2 by rule
            0  linear  rule
            1  relu    rule
        """
        return report(self)
