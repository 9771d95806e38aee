"""Ops that torch takes apart in C++ and that its own tests leave out: how to call them, or why they need no try."""

import torch

from hocket.tracing.recording.data_reads import _READERS, UNSEEN_WRITES
from tracing.op_samples import sample_with


def floats(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) + 0.1


def network(kind, *, gates, hidden, packed):
    """A call of torch's own recurrent network, of one layer."""
    weights = [floats(2 * gates, 3), floats(2 * gates, 2), floats(2 * gates), floats(2 * gates)]
    function = getattr(torch, kind)

    def call(data, sizes, *rest):
        state = tuple(rest[:hidden]) if kind == "lstm" else rest[0]
        if packed:
            return function(data, sizes, state, list(rest[hidden:]), True, 1, 0.0, True, False)
        return function(data, state, list(rest[hidden:]), True, 1, 0.0, True, False, False)

    data = floats(6, 3) if packed else floats(3, 3, 3)
    return sample_with(kind, call, data, torch.tensor([3, 2, 1]), *[floats(1, 3, 2)] * hidden, *weights)


A = torch.ops.aten
INDICES = torch.tensor([0, 2, 1])
MATRIX = torch.tensor([[0, 1, 2], [2, 1, 0], [1, 1, 1]])
SAMPLES = [
    *(network(k, gates=g, hidden=h, packed=p) for k, g, h in (("lstm", 4, 2), ("gru", 3, 1)) for p in (True, False)),
    *(network(k, gates=1, hidden=1, packed=p) for k in ("rnn_tanh", "rnn_relu") for p in (True, False)),
    sample_with(
        "affine_grid_generator_backward",
        lambda g: A.affine_grid_generator_backward(g, [2, 1, 3, 3], False),
        floats(2, 3, 3, 2),
    ),
    sample_with("chain_matmul", lambda a, b: A.chain_matmul([a, b]), floats(2, 3), floats(3, 2)),
    sample_with("clip_", lambda a: torch.clip_(a, 0.2, 0.5), floats(3, 3)),
    sample_with("clip_", lambda a, b: a.clip_(b), floats(3, 3), floats(3, 3)),
    sample_with(
        "conv_tbc_backward",
        lambda g, x, w, b: A.conv_tbc_backward(g, x, w, b, 0),
        floats(2, 2, 4),
        floats(3, 2, 3),
        floats(2, 3, 4),
        floats(4),
    ),
    sample_with(
        "cummaxmin_backward", lambda g, x, i: A.cummaxmin_backward(g, x, i, 0), floats(3, 3), floats(3, 3), MATRIX
    ),
    sample_with("cumprod_backward", lambda g, x: A.cumprod_backward(g, x, 0, x.cumprod(0)), floats(3, 3), floats(3, 3)),
    sample_with("divide_", lambda a, b: a.divide_(b, rounding_mode="floor"), floats(3), floats(3)),
    sample_with(
        "embedding_backward", lambda g, i: A.embedding_backward(g, i, 4, -1, False, False), floats(3, 2), INDICES
    ),
    sample_with(
        "fake_quantize_per_channel_affine",
        lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, 0, 0, 255),
        floats(3, 3),
        floats(3),
        INDICES.int(),
    ),
    sample_with(
        "fake_quantize_per_tensor_affine",
        lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, 0, 255),
        floats(3, 3),
        floats(1),
        torch.tensor([3], dtype=torch.int32),
    ),
    sample_with("float_power_", lambda a, b: a.double().float_power_(b), floats(3), floats(3)),
    sample_with(
        "fused_moving_avg_obs_fake_quant",
        lambda x, o, f, a, b, s, z: torch.fused_moving_avg_obs_fake_quant(x, o, f, a, b, s, z, 0.01, 0, 255, 0),
        floats(3, 3),
        torch.ones(1, dtype=torch.int64),
        torch.ones(1, dtype=torch.int64),
        floats(1),
        floats(1) + 2,
        floats(1),
        torch.zeros(1, dtype=torch.int32),
    ),
    sample_with(
        "gather_backward", lambda g, x, i: A.gather_backward(g, x, 0, i, False), floats(3, 3), floats(3, 3), MATRIX
    ),
    sample_with("gru_cell", lambda *v: torch.gru_cell(*v), floats(2, 3), floats(2, 2), floats(6, 3), floats(6, 2)),
    sample_with("index_select_backward", lambda g, i: A.index_select_backward(g, [4, 2], 0, i), floats(3, 2), INDICES),
    sample_with(
        "lstm_cell",
        lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u),
        floats(2, 3),
        floats(2, 2),
        floats(2, 2),
        floats(8, 3),
        floats(8, 2),
    ),
    sample_with("nuclear_norm", lambda a: torch.nuclear_norm(a, (0, 1)), floats(3, 3)),
    sample_with("orgqr", lambda a, t: torch.orgqr(a, t), floats(3, 3), floats(2)),
    sample_with("trace_backward", lambda g: A.trace_backward(g, [3, 3]), floats(1).squeeze()),
    sample_with("unflatten_dense_tensors", lambda f, a: A.unflatten_dense_tensors(f, [a, a]), floats(18), floats(3, 3)),
    sample_with(
        "upsample_nearest3d", lambda x: A.upsample_nearest3d.vec(x, None, [2.0, 2.0, 2.0]), floats(1, 1, 2, 2, 2)
    ),
    sample_with(
        "value_selecting_reduction_backward",
        lambda g, i: A.value_selecting_reduction_backward(g, 0, i, [3, 3], False),
        floats(3),
        INDICES,
    ),
    sample_with("_weight_norm", lambda v, g: torch._weight_norm(v, g, 0), floats(3, 3), floats(3, 1)),
    sample_with("_choose_qparams_per_tensor", lambda x: torch._choose_qparams_per_tensor(x), floats(3, 3)),
]


# Ops that neither torch's samples nor plain arguments reach, and why no tensor bypasses the modes there.
REASONS = {
    "makes or takes a sparse, nested or oneDNN tensor, which is refused": (
        *("coalesce", "embedding_sparse_backward", "nested_to_padded_tensor", "smm", "sspaddmm", "to_sparse_bsc"),
        *("to_sparse_bsr", "sparse_bsc_tensor", "sparse_bsr_tensor", "_sparse_mm", "_sparse_softmax", "_sparse_sum"),
        *("_sparse_log_softmax", "_sparse_coo_tensor_unsafe", "_sparse_compressed_tensor_unsafe"),
        *(f"_sparse_{kind}_tensor_unsafe" for kind in ("csr", "csc", "bsr", "bsc")),
        *(f"_validate_sparse_{kind}_tensor_args" for kind in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
        *("_embedding_bag_sparse_backward", "_gather_sparse_backward"),
    ),
    "tells or sets what is known of the tensor, not what is in it": (
        *("data", "is_leaf", "output_nr", "pin_memory", "retain_grad", "retains_grad", "is_contiguous", "_version"),
        *("_has_compatible_shallow_copy_type", "_is_zerotensor", "_debug_has_internal_overlap", "_shape_as_tensor"),
        *("_dim_arange", "_pad_enum", "_backward", "_unpack_dual", "_propagate_xla_data"),
    ),
    "converts to another type or device by one op": (
        *(f"_cast_{kind}" for kind in ("Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double")),
        *("_autocast_to_full_precision", "_autocast_to_reduced_precision", "_to_cpu"),
    ),
    "in the table of functions that read, or of those that write unseen": (*_READERS, *UNSEEN_WRITES),
    "takes weights that only functions of these tables can pack": (
        *("quantized_gru_cell", "quantized_lstm_cell", "quantized_rnn_relu_cell", "quantized_rnn_tanh_cell"),
    ),
    "a part of functorch, which no user calls": ("_add_batch_dim", "_remove_batch_dim"),
    "a part of a test of torch's dispatcher": (
        *("_test_check_tensor", "_test_serialization_subcmul", "_test_ambiguous_defaults", "_test_string_default"),
        "_test_autograd_multiple_dispatch",
    ),
    "arithmetic of a backward, on whole tensors (FunctionsManual.cpp, RNN.cpp, Convolution.cpp, PackedSequence.cpp)": (
        *("_convolution_double_backward", "_batch_norm_impl_index_backward", "_weight_norm_differentiable_backward"),
        *("_thnn_differentiable_lstm_cell_backward", "_thnn_differentiable_gru_cell_backward"),
        "_thnn_fused_lstm_cell_backward",
        "_pack_padded_sequence_backward",  # batch sizes come from an op that is refused
    ),
    "one op with another way to say the size": (
        *("_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa", "_upsample_nearest_exact3d"),
    ),
}
