"""No value of a tensor gets into a captured step unseen: each op that torch has is refused, guarded, or proven not to.

The table of `hocket.tracing.recording.data_reads` is held against torch itself: all ops that torch takes apart in C++,
where no mode sees them, are captured with some values and replayed with others. What cannot be tried so has a reason
below.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from equivalence.test_steps import mlp
from hocket.errors import CaptureError
from hocket.tracing import capture
from hocket.tracing.recording.data_reads import _READERS, UNSEEN_WRITES, reads_value, shaped_by_values
from support.refusals import fails
from tracing.op_samples import composite_ops, op_db, ops_called_by, outcomes, samples_by_schema, samples_of
from tracing.op_table import REASONS, SAMPLES

# Results of these follow from the shape, type, device or place in the autograd graph of a tensor.
ABOUT_THE_TENSOR = {
    *("_dimI", "_dimV", "_fused_sdp_choice", "_has_same_storage_numel", "_nested_get_ragged_idx", "dense_dim"),
    *("is_coalesced", "is_pinned", "is_same_size", "is_set_to", "q_per_channel_axis", "qscheme", "sparse_dim"),
    # Sizes, beside the results.
    *("_cudnn_attention_forward", "_efficient_attention_forward", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_fused_attention_overrideable"),
    "_cslt_sparse_mm_search",  # the fastest of several algorithms, found by timing
}


def all_ops():
    for full in torch._C._dispatch_get_all_op_names():
        if full.startswith("aten::"):
            name, _, overload = full.partition("::")[2].partition(".")
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
            yield name, getattr(getattr(torch.ops.aten, name), overload or "default"), composite


def test_every_op_that_returns_a_python_value_is_known():
    unknown = []
    for name, op, composite in all_ops():
        takes = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
        gives = any("Tensor" not in str(result.type) for result in op._schema.returns)
        if takes and gives and not composite and not reads_value(op) and name not in ABOUT_THE_TENSOR:
            unknown.append(str(op))
    assert not unknown


def test_what_torch_tags_is_refused_or_guarded():
    for name, op, _ in all_ops():
        if torch.Tag.data_dependent_output in op.tags:
            assert reads_value(op), op
        if torch.Tag.dynamic_output_shape in op.tags and name not in ("index", "repeat_interleave"):
            assert shaped_by_values(op, (), {}), op


@pytest.mark.parametrize("name", [*_READERS, *sorted(UNSEEN_WRITES)])
def test_the_names_in_the_table_are_torchs(name):
    assert hasattr(torch._C._VariableFunctions, name) or hasattr(torch.Tensor, name)


def recurrent(kind):
    network = kind(3, 2)
    return lambda at: network(nn.utils.rnn.PackedSequence(torch.ones(6, 3), at))[0].data


READERS = {
    "tensor_split": lambda at: torch.tensor_split(torch.ones(6), at)[0],
    "tensor_split, a method": lambda at: torch.ones(6).tensor_split(at)[0],
    "tensor_split, by name": lambda at: torch.ones(6).tensor_split(tensor_indices_or_sections=at)[0],
    "tensor_split, into parts": lambda at: torch.tensor_split(torch.ones(6), at[0])[0],
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "rnn_tanh": recurrent(nn.RNN),
    "rnn_relu": recurrent(lambda *sizes: nn.RNN(*sizes, nonlinearity="relu")),
    "_pad_packed_sequence": lambda at: nn.utils.rnn.pad_packed_sequence(
        nn.utils.rnn.PackedSequence(torch.ones(6, 3), at)
    )[0],
    "_reshape_from_tensor": lambda at: torch._reshape_from_tensor(torch.ones(3, 2), at),
    "choose_qparams_optimized": lambda at: torch.choose_qparams_optimized(at.float(), 3, 3, 0.1, 8)[0],
    "_saturate_weight_to_fp16": lambda at: torch._saturate_weight_to_fp16(at.float().reshape(1, 3)),
    "_rowwise_prune": lambda at: torch._rowwise_prune(torch.ones(3, 2), at > 2, torch.int64)[0],
}


@pytest.mark.parametrize("name", READERS)
def test_a_function_that_reads_in_c_is_refused(name):
    model = mlp()
    model.register_buffer("at", torch.tensor([3, 2, 1]))
    function = READERS[name]
    expected = function(model.at)

    def step(batch):
        return function(model.at)

    fails(CaptureError, r"test_data_reads\.py:\d+ depends on values", capture, step, model, None, [])
    # For the batch they are guards.
    captured = capture(lambda batch: function(batch[0]), None, None, [model.at])
    assert captured.holds([torch.tensor([3, 2, 1])])
    assert not captured.holds([torch.tensor([2, 2, 1])])
    assert expected is not None


def test_a_number_of_a_sequence_that_is_kept_in_python_is_refused():
    engine = torch.quasirandom.SobolEngine(2)
    with pytest.raises(CaptureError, match="test_data_reads"):
        capture(lambda batch: engine.draw(3) + batch[0], None, None, [torch.ones(2)])


# --- Every op ---

CHUNKS = 24
# They return memory that was never written.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# They do not check their indices: one beyond the data reads memory that holds something else each time.
UNCHECKED = {"_segment_reduce_offsets"}


def within(sample):
    """The sample without values of which an index lies beyond those that it was drawn with."""
    bounds = [None if value.is_floating_point() else int(value.max()) for value in sample.values]

    def is_within(values):
        pairs = zip(values, bounds, strict=True)
        return all(most is None or (int(value.min()) >= 0 and int(value.max()) <= most) for value, most in pairs)

    return replace(sample, others=tuple(filter(is_within, sample.others)))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_no_op_of_torchs_own_tests_bakes_a_value_in(chunk):
    problems = {}
    for info in op_db()[chunk::CHUNKS]:
        for sample in samples_of(info, most=4):
            if sample.name in UNCHECKED:
                sample = within(sample)
            bad = outcomes(sample) - {"refused", "guarded", "follows", "same"}
            if bad and info.name not in UNWRITTEN:
                problems[sample.name] = bad
    assert not problems


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_no_op_that_torchs_tests_leave_out_bakes_a_value_in(sample):
    found = outcomes(sample)
    assert found
    assert not found - {"refused", "guarded", "follows", "same"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_op_that_torch_takes_apart_is_tried_or_has_a_reason():
    tried = {sample.name for sample in SAMPLES} | {name for names in REASONS.values() for name in names}
    for info in op_db():
        for sample in samples_of(info, most=8):
            tried |= ops_called_by(sample)
    missing, problems = set(), {}
    for name, ops in composite_ops().items():
        for op in ops if name not in tried else ():
            found = set().union(*(outcomes(sample) for sample in samples_by_schema(op)))
            if not found:
                missing.add(str(op))
            elif found - {"refused", "guarded", "follows", "same"}:
                problems[str(op)] = found
    assert not missing, "neither tried nor in REASONS"
    assert not problems
