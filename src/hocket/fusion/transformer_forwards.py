"""Forwards of torch's Transformer layers without their fast paths, which a recorder can follow.

torch's own look at values to choose a fused kernel for inference; what is computed otherwise is the same as here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["TRACEABLE_FORWARDS"]


def _encoder(m: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    for layer in m.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    return src if m.norm is None else m.norm(src)


def _decoder(m: Any, tgt: Any, memory: Any, **masks: Any) -> Any:
    for layer in m.layers:
        tgt = layer(tgt, memory, **masks)
    return tgt if m.norm is None else m.norm(tgt)


def _transformer(m: Any, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None, **masks: Any) -> Any:
    memory = m.encoder(src, mask=src_mask, src_key_padding_mask=masks.get("src_key_padding_mask"))
    return m.decoder(
        tgt,
        memory,
        tgt_mask=tgt_mask,
        memory_mask=masks.get("memory_mask"),
        tgt_key_padding_mask=masks.get("tgt_key_padding_mask"),
        memory_key_padding_mask=masks.get("memory_key_padding_mask"),
    )


TRACEABLE_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
