"""Functions of torch, by the knowledge that their results give and a graph needs.

Transformers have forwards here without torch's fast paths, which are chosen by looking at values, and some
layers without the questions for shapes that torch's ask.

Views by strides, which count elements of memory: of a model's own, where the model runs alone.

x.as_strided((2, 2), (1, 1))          within a contiguous x: the same places in each model's part
h.t().as_strided((2, 2), (1, 1))      as x lies in memory, where fused models may have another order
w.as_strided((2, 2), (1, 1), 1)       from the beginning of the memory, where other models' weights are
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hocket.errors import InputError

# The properties of its tensors that a forward reads, besides rank, type and device.
NOTHING, SHAPE, LAYOUT = range(3)

# The results of these are known without values, as are those of functions without tensors among their arguments.
KNOWN = dict.fromkeys(
    (
        "dim", "ndimension", "is_floating_point", "is_complex", "is_signed", "is_tensor", "element_size", "get_device",
        "result_type", "promote_types", "can_cast", "is_inference", "type",
    ),
    NOTHING,
)  # fmt: skip
KNOWN |= dict.fromkeys(("size", "numel", "nelement", "__len__", "is_same_size"), SHAPE)
KNOWN |= dict.fromkeys(("stride", "storage_offset", "is_contiguous"), LAYOUT)
# Not whether a tensor has gradients: that is another thing under `torch.no_grad()`, where the same graph runs.
KNOWN_ATTRIBUTES = dict.fromkeys(
    (
        "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn",
        "is_xpu", "is_mps", "is_nested", "itemsize", "names",
    ),
    NOTHING,
)  # fmt: skip
KNOWN_ATTRIBUTES |= dict.fromkeys(("shape", "nbytes"), SHAPE)
VIEWS = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))  # attributes that are tensors
# These give the memory of a tensor to code that torch does not see.
SHARING = frozenset(("numpy", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage"))
# The number of tensors that these return depends on shapes.
AS_MANY = frozenset(["unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "meshgrid"])
# The shapes of what these give depend on values.
SHAPED_BY_VALUES = frozenset(
    ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "_unique2")
)
OF_GENERATORS = frozenset(["get_rng_state", "set_rng_state", "manual_seed", "seed", "initial_seed"])
REFLECTED = {f"__r{name}__": getattr(operator, name) for name in ("sub", "truediv", "floordiv", "mod", "pow")}
REFLECTED |= {"__rdiv__": operator.truediv, "__rmatmul__": operator.matmul}
# Some of a tensor's operators go by another name.
OPERATORS = {getattr(Tensor, name): name for name in dir(Tensor) if name in ("__pow__", "__ipow__", "__rpow__")}
WITHOUT_RESULT = ("__setitem__", "_assert", "_assert_async")  # and yet ops
_MASKS = (torch.bool, torch.uint8)


def is_write(name: str) -> bool:
    """True of ``index_add_`` and ``__setitem__``, not of ``__getitem__``, nor of the operators ``and_`` and ``or_``."""
    is_word = name in ("and_", "or_", "not_")
    return name.strip("_") == "setitem" or (name.endswith("_") and not name.endswith("__") and not is_word)


def is_shaped_by_values(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the shape of a result depends on values: a tensor indexed by a mask is as long as that has ones."""
    if name in SHAPED_BY_VALUES or (name == "where" and len(args) + len(kwargs) == 1):
        return True
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(each, Tensor) and each.dtype in _MASKS for each in index)


def _encoder(m: Any, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = None) -> Any:
    goes_nested = mask is None and src_key_padding_mask is not None and _goes_nested(m, src)
    for layer in m.layers:
        src = layer(src, src_mask=mask, src_key_padding_mask=src_key_padding_mask)
    if goes_nested:
        is_read = src_key_padding_mask.logical_not()
        is_left_aligned = (is_read.long().cumprod(1) == is_read).all()
        src = src.masked_fill((is_left_aligned & ~is_read).unsqueeze(-1), 0.0)
    return src if m.norm is None else m.norm(src)


def _goes_nested(m: nn.TransformerEncoder, src: Tensor) -> bool:
    """True where torch, for padding at the end of sequences, computes without it, and gives zeros there."""
    is_fast = getattr(m, "use_nested_tensor", False) and torch.backends.mha.get_fastpath_enabled()
    if not is_fast or m.layers[0].training or src.dim() != 3 or torch.is_autocast_enabled():
        return False
    with torch._C.DisableTorchFunction():
        trains = src.requires_grad or any(parameter.requires_grad for parameter in m.layers[0].parameters())
    return not (trains and torch.is_grad_enabled())


def _decoder(m: Any, tgt: Any, memory: Any, **masks: Any) -> Any:
    for layer in m.layers:
        tgt = layer(tgt, memory, **masks)
    return tgt if m.norm is None else m.norm(tgt)


def _transformer(m: Any, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None, **masks: Any) -> Any:
    masks = {name: mask for name, mask in masks.items() if not name.endswith("is_causal")}
    memory = m.encoder(src, mask=src_mask, src_key_padding_mask=masks.pop("src_key_padding_mask", None))
    return m.decoder(tgt, memory, tgt_mask=tgt_mask, **masks)


def _recurrent(m: Any, input: Any, hx: Any = None) -> Any:
    if isinstance(input, PackedSequence) and hx is None and m.mode != "LSTM":  # torch's own look at how many they are
        data, sizes, order, back = input
        m.check_input(data, sizes)
        rows = m.num_layers * (2 if m.bidirectional else 1)
        hx = torch.zeros(rows, sizes[0], m.hidden_size, dtype=data.dtype, device=data.device)  # type: ignore[call-overload]
        flags = (m.bias, m.num_layers, m.dropout, m.training, m.bidirectional)
        data, last = getattr(torch._VF, m.mode.lower())(data, sizes, hx, m._flat_weights, *flags)
        return PackedSequence(data, sizes, order, back), m.permute_hidden(last, back)
    if not isinstance(input, Tensor) or input.dim() != 3:
        return type(m).forward(m, input, hx)
    if hx is None:
        zero = torch.zeros_like(input.select(1 if m.batch_first else 0, 0).narrow(-1, 0, 1))  # (N, 1)
        rows = m.num_layers * (2 if m.bidirectional else 1)
        hx = zero.expand(rows, -1, m.proj_size or m.hidden_size).contiguous()
        hx = (hx, zero.expand(rows, -1, m.hidden_size).contiguous()) if m.mode == "LSTM" else hx
    options = (m.bias, m.num_layers, m.dropout, m.training, m.bidirectional, m.batch_first)
    out, *last = getattr(torch._VF, m.mode.lower())(input, hx, m._flat_weights, *options)
    return out, tuple(last) if m.mode == "LSTM" else last[0]


def _instance_norm(m: Any, input: Any) -> Any:
    if input.dim() == m._get_no_batch_dim():
        return type(m).forward(m, input)
    m._check_input_dim(input)
    by_input = m.training or not m.track_running_stats
    state = (m.running_mean, m.running_var, m.weight, m.bias)
    return nn.functional.instance_norm(input, *state, by_input, m.momentum or 0.0, m.eps)


def _cell(m: Any, input: Any, hx: Any = None) -> Any:
    if hx is None and input.dim() == 2:
        zero = torch.zeros_like(input.narrow(-1, 0, 1)).expand(-1, m.hidden_size).contiguous()
        hx = (zero, zero) if isinstance(m, nn.LSTMCell) else zero
    return type(m).forward(m, input, hx)


TRACEABLE_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.TransformerEncoder: _encoder,
    nn.TransformerDecoder: _decoder,
    nn.Transformer: _transformer,
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.RNN), _recurrent),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _instance_norm),
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell, nn.RNNCell), _cell),
}


STRIDED = frozenset(("as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter"))


def memory(tensor: Tensor) -> tuple[int, int] | None:
    """The storage of a tensor and the place in it, or None if it has none."""
    if not torch._C._has_storage(tensor):
        return None
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def version(tensor: Tensor) -> int:
    """The number of writes into a tensor so far, or 0 where they are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def strides(
    size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None, **_: Any
) -> tuple[Sequence[int], Sequence[int], int | None]:
    """The arguments of an op of `STRIDED` behind its tensors."""
    return size, stride, storage_offset


def unlike_alone(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], in_common: Set[Any]) -> bool:
    """True if an op of `STRIDED` may reach elements outside of a contiguous tensor.

    One that counts from the beginning of a memory `in_common` with other models is refused.
    """
    tensor = args[0]
    size, stride, first = strides(*args[1 + (name == "as_strided_scatter" and "src" not in kwargs) :], **kwargs)
    found = memory(tensor)
    begin = 0 if found is None else found[1]
    if found is not None and begin > 0 and first not in (None, begin) and found[0] in in_common:
        raise InputError(
            f"{name}: storage_offset: counts from the beginning of a memory that fused models have in common; clone "
            "the tensor before, or leave it out"
        )
    last = (first or 0) + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    is_counted = first is None or begin == 0
    return name == "as_strided_" or not (is_counted and tensor.is_contiguous() and last < tensor.numel())
