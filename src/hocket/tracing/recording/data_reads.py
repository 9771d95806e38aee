"""Reads of the values *in* a tensor, which decide in Python or C++ how a step goes on.

A captured step is a fixed list of ops. A kernel may look at its arguments, since it runs again in every step. A graph
cannot hold a value that leaves the tensors and decides which ops run, with which numbers, on which shapes. Torch does
that in four places:

1. ops that return a Python value (`item`, `equal`). Torch tags most of them, `_VALUES` has the others.
2. ops whose result has a shape that depends on values (`nonzero`). They are tagged, or in `_SHAPES`.
3. functions that read in C++ before any op is dispatched (`tensor_split` with a tensor of indices), in `_READERS`.
4. methods that give the memory away (`numpy`), and functions that write it without a dispatched op, in `EXITS` and
   `UNSEEN_WRITES`.

All other ops that torch takes apart in C++ were tried: captured with some values, replayed with others, and compared
(`tests/tracing/recording/test_data_reads.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

# Ops that return a Python value that depends on data, and do not say so.
_VALUES = frozenset(
    (
        "aten::is_nonzero", "aten::q_scale", "aten::q_zero_point", "aten::_nnz", "aten::_use_cudnn_ctc_loss",
        "aten::_use_miopen_ctc_loss", "aten::_nested_tensor_from_mask_left_aligned",
    )
)  # fmt: skip

# Ops with a bool as their result, and the tensor that it is in.
QUESTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.allclose.default: lambda *args, **kwargs: torch.isclose(*args, **kwargs).all(),
    torch.ops.aten.equal.default: lambda one, other: (
        torch.eq(one, other).all() if one.shape == other.shape else torch.zeros((), dtype=torch.bool)
    ),
    torch.ops.aten.is_nonzero.default: lambda tensor: tensor,
}

# Ops whose results have shapes that depend on data, and that do not say so.
_SHAPES = frozenset({"aten::_pack_padded_sequence", "aten::_nested_tensor_from_mask", "aten::_nested_from_padded"})

# Where these take the mask that selects.
_MASKS = {"aten::nonzero": 0, "aten::masked_select": 1}

# Functions that read an argument in C++: its position and its names.
_READERS: dict[str, tuple[int, tuple[str, ...]]] = {
    # ATen/native/TensorShape.cpp: splits at the indices in the tensor, or into as many parts as it says
    "tensor_split": (1, ("tensor_indices_or_sections", "indices_or_sections")),
    # ATen/native/PackedSequence.cpp and RNN.cpp: cut the data into steps by the sizes in the tensor
    "_pad_packed_sequence": (1, ("batch_sizes",)),
    "lstm": (1, ("batch_sizes",)),
    "gru": (1, ("batch_sizes",)),
    "rnn_tanh": (1, ("batch_sizes",)),
    "rnn_relu": (1, ("batch_sizes",)),
    # ATen/native/TensorConversions.cpp: the shape is what is in the tensor
    "_reshape_from_tensor": (1, ("shape",)),
    # ATen/native/QuantizedLinear.cpp, quantized/QTensor.cpp: read the weights to pack them or to choose a scale
    "choose_qparams_optimized": (0, ("input",)),
    "fbgemm_linear_quantize_weight": (0, ("input",)),
    "fbgemm_pack_gemm_matrix_fp16": (0, ("input",)),
    "fbgemm_pack_quantized_matrix": (0, ("input",)),
    "_saturate_weight_to_fp16": (0, ("weight",)),
    "_rowwise_prune": (1, ("mask",)),
}
_PACKED = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})

# Functions that write tensors in C++ where no mode sees it: the state of a Sobol sequence, weights in another form.
UNSEEN_WRITES = frozenset(
    {
        *("_sobol_engine_draw", "_sobol_engine_ff_", "_sobol_engine_scramble_", "_sobol_engine_initialize_state_"),
        *("fbgemm_linear_int8_weight", "fbgemm_linear_int8_weight_fp32_activation", "fbgemm_linear_fp16_weight"),
        *(
            "fbgemm_linear_fp16_weight_fp32_activation",
            "_wrapped_linear_prepack",
            "_wrapped_quantized_linear_prepacked",
        ),
    }
)

# Ops whose numbers, and not only their sizes, decide on a shape.
NUMBERS_THAT_SHAPE = frozenset({"aten::arange", "aten::range"})

# Functions that choose their ops in C++ by a number: a norm of order 2 is not computed as one of order 3.
CHOOSERS = frozenset(
    {
        *("cdist", "norm", "linalg_norm", "linalg_vector_norm", "linalg_matrix_norm", "pairwise_distance", "renorm"),
        *("dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"),
        *("feature_alpha_dropout", "feature_alpha_dropout_", "scaled_dot_product_attention", "float_power"),
    }
)

# Functions that look for subclasses, and at which orders (None: in any case).
_SINGULAR = (2, -2, "nuc")
_OTHERWISE: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(("prod", "linalg_svdvals", "linalg_eigvalsh", "linalg_matrix_rank")),
    **dict.fromkeys(("linalg_matrix_norm", "linalg_norm"), _SINGULAR),
    "linalg_cond": (*_SINGULAR, None),
}

_NUM_OF_CROSS_ENTROPY = 6  # arguments

# Methods of a tensor that hand its memory to code that does not go through torch.
EXITS: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("numpy", "data_ptr", "untyped_storage", "apply_", "map_", "map2_")
)

# Functions that make a tensor of Python data, and where they are given it.
MAKERS: dict[Any, int] = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1}


def computes_otherwise(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for a call whose C++ computes with other ops while a mode looks on, as for tensors of a subclass.

    The gradient of a product does not ask for zeros then, singular values come with their vectors, and the weights of
    labels that are left out are added up as zeros.
    """
    name = getattr(func, "__name__", "")
    if name == "cross_entropy_loss" and len(args) == _NUM_OF_CROSS_ENTROPY:
        _, target, weight, reduction, _, smoothing = args
        is_mean = reduction == torch.nn._reduction.get_enum("mean")
        return weight is not None and is_mean and not target.is_floating_point() and bool(smoothing > 0)
    if name not in _OTHERWISE or not args or not isinstance(args[0], torch.Tensor):
        return False
    trains = args[0].requires_grad and torch.is_grad_enabled()
    if name == "prod" or trains:
        return name == "prod" and trains
    order = kwargs.get("ord", kwargs.get("p", args[1] if len(args) > 1 else None))
    dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
    if name == "linalg_norm" and not (isinstance(dim, (tuple, list)) or (dim is None and args[0].dim() == 2)):
        return False  # of vectors
    orders = _OTHERWISE[name]
    return orders is None or (type(order) in (int, float, str, type(None)) and order in orders)


def reads_value(func: Any) -> bool:
    """Return True if the op returns a Python value that depends on values in its arguments."""
    return torch.Tag.data_dependent_output in func.tags or func._schema.name in _VALUES


def shaped_by_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if the shape of the op's result depends on values in its arguments."""
    name = func._schema.name
    if name == "aten::index":
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is not None:
        return False
    return torch.Tag.dynamic_output_shape in func.tags or name in _SHAPES


def shape_reads(func: Any, args: Any, kwargs: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...], Any]]:
    """Calls that read all that the shape of the op's result depends on, beside shapes and numbers."""
    name = func._schema.name
    if name in _MASKS:
        return [(_num_selected, (args[_MASKS[name]],), {})]
    if name == "aten::index":
        masks = [each for each in args[1] if isinstance(each, torch.Tensor)]
        if not any(mask.dtype is torch.uint8 for mask in masks):
            return [(_num_selected, (mask,), {}) for mask in masks if mask.dtype is torch.bool]
    if name == "aten::_ctc_loss" and isinstance(args[3], torch.Tensor):
        return [(_longest, (args[3],), {})]
    return [(partial(_shapes, func), args, kwargs)]


def _num_selected(mask: torch.Tensor) -> int:
    return int(torch.count_nonzero(mask))


def _longest(lengths: torch.Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0


def _shapes(func: Any, *args: Any, **kwargs: Any) -> list[Any]:
    found = [value for value in tree_leaves(func(*args, **kwargs)) if isinstance(value, torch.Tensor)]
    return [value._nested_tensor_size().tolist() if value.is_nested else value.shape for value in found]


def tensors_read(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Tensors whose content the torch function looks at before it reaches an op."""
    name = getattr(func, "__name__", "")
    if name not in _READERS:
        return
    position, names = _READERS[name]
    found = [args[position]] if position < len(args) else [kwargs[n] for n in names if n in kwargs]
    for value in found:
        # The networks' other forms have the hidden state in that place.
        if isinstance(value, torch.Tensor) and (name not in _PACKED or value.dtype is torch.int64):
            yield value


def with_numbers(func: Any, args: Any, read: Callable[[torch.Tensor], Any]) -> Any:
    """The arguments, with the number in place of each tensor inside a list that a tensor is made of.

    ``torch.tensor([loss, 1.0])`` reads the loss where no mode is asked.
    """
    position = MAKERS.get(func)
    if position is None or len(args) <= position or isinstance(args[position], torch.Tensor):
        return args
    data = tree_map_only(torch.Tensor, read, args[position])
    return (*args[:position], data, *args[position + 1 :])
