"""AdamW (Loshchilov and Hutter, ICLR 2019) of B models."""

from __future__ import annotations

from typing import Any

import torch

from hocket.fusion.optim.adam import Adam

__all__ = ["AdamW"]


class AdamW(Adam):
    """`torch.optim.AdamW` of B models: Adam whose weight decay shrinks the parameters and not the gradients.

    Arguments and errors are those of `Adam`; the weight decay is 0.01 by default.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(2, 3)); weights.grad = torch.zeros(2, 3)
        >>> AdamW([weights], lr=0.5, weight_decay=[0.5, 0], num_models=2).step()
        >>> weights[:, 0].tolist()
        [0.75, 1.0]
    """

    torch_class = torch.optim.AdamW

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: Any = 1e-8,
        weight_decay: Any = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        num_models: int | None = None,
        nonfinite: str = "step",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            num_models=num_models,
            nonfinite=nonfinite,
        )
