"""Forwards of torch's Transformer layers without their fast paths, which a recorder can follow.

torch's own look at values to choose a fused kernel for inference; what is computed otherwise is the same as here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["TRACEABLE_FORWARDS"]


def _encoder_layer(
    m: Any, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
) -> Any:
    def attend(x: Any) -> Any:
        return m._sa_block(x, src_mask, src_key_padding_mask, is_causal)

    return _layer(m, src, (attend, m._ff_block), (m.norm1, m.norm2))


def _decoder_layer(
    m: Any,
    tgt: Any,
    memory: Any,
    tgt_mask: Any = None,
    memory_mask: Any = None,
    tgt_key_padding_mask: Any = None,
    memory_key_padding_mask: Any = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> Any:
    def attend(x: Any) -> Any:
        return m._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal)

    def look(x: Any) -> Any:
        return m._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal)

    return _layer(m, tgt, (attend, look, m._ff_block), (m.norm1, m.norm2, m.norm3))


def _layer(m: Any, x: Any, blocks: Sequence[Callable[[Any], Any]], norms: Sequence[Any]) -> Any:
    """Blocks around which the input goes, each with its norm before it or after it."""
    for block, norm in zip(blocks, norms, strict=True):
        x = x + block(norm(x)) if m.norm_first else norm(x + block(x))
    return x


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
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerDecoderLayer: _decoder_layer,
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
}
