"""Ops that may raise for what is in their tensors: a label that does not exist, an index beyond the end.

A user may catch such an error and go on with the next batch. Then the state has to be what eager leaves: all that was
written before the op, and nothing that is written after it. So these ops, writes of what outlives the step, and random
numbers keep program order (`hocket.tracing.lowering.dependencies.around_raises`). The names are those of torch 2.13's
ATen kernels for the CPU that check values. Shapes and dtypes cannot be wrong in a step that was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# The error of an op that raises because a step takes another branch (see `hocket.tracing.recording.outcomes`).
OTHER_BRANCH = "the step branches on data, otherwise than when it was recorded,"

_NAMES = """
    _assert_async _assert_scalar
    nll_loss nll_loss_forward nll_loss2d nll_loss2d_forward nll_loss_nd cross_entropy_loss
    multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward binary_cross_entropy
    ctc_loss _ctc_loss
    embedding embedding_bag _embedding_bag _embedding_bag_forward_only embedding_renorm one_hot
    index index_put index_put_impl _index_put_impl index_select index_add index_copy index_fill index_reduce
    _unsafe_index _unsafe_index_put
    gather scatter scatter_add scatter_reduce take take_along_dim put masked_scatter repeat_interleave bincount
    bernoulli multinomial normal poisson binomial
    histc histogram quantile nanquantile max_unpool2d max_unpool3d
    cholesky cholesky_inverse cholesky_solve inverse logdet slogdet det lu_unpack
"""
_CHECK_VALUES = frozenset(_NAMES.split())
# Ops of linalg that take any values: each clipping computes norms.
_NEVER_RAISE = frozenset(("linalg_vector_norm", "linalg_cross"))


_TORCHS_OWN = frozenset(("aten", "prim", "prims", "inductor", "mkldnn", "mkl", "quantized", "c10d", "hocket"))


def is_foreign(func: Any) -> bool:
    """Return True for an op of a library's or the user's own, which may raise, and have effects that are not known."""
    return getattr(func, "namespace", "aten") not in _TORCHS_OWN


def is_other_branch(args: Sequence[Any]) -> bool:
    """Return True for arguments of an op that raises where the step takes another branch, or of such an error."""
    return any(isinstance(arg, str) and OTHER_BRANCH in arg for arg in args)


def may_raise(kernel: str) -> bool:
    """Return whether an op may raise for its values, by the last part of its name.

    Example:
        >>> may_raise("nll_loss_forward"), may_raise("index_put_"), may_raise("linalg_cholesky_ex"), may_raise("addmm")
        (True, True, True, False)
        >>> may_raise("linalg_vector_norm")
        False
    """
    if kernel in _NEVER_RAISE:
        return False
    return kernel.rstrip("_") in _CHECK_VALUES or kernel.startswith(("linalg_", "_linalg_"))
