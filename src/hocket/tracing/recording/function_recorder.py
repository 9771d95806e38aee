"""Records a step from above: torch functions, with the Python arguments that the user gave.

Ops get plain numbers. Here they are still live ones (see `live`), and the numbers of the recorded ops are tied to the
tape. And here the step is seen to ask for the value of a tensor, which is answered where the answer can be followed: a
step count of the optimizer, a value of the batch, a loss that is only returned.

A torch function that is written in Python hands itself to a mode first, and is then out of its sight with all that it
calls (`Tensor.backward` with every hook in it). `python_functions_open` keeps them from doing so: what they call in C++
comes here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hocket.pystate.origins import user_line
from hocket.pystate.places import is_a
from hocket.tracing.program import leaves_in
from hocket.tracing.recording.array_calls import handed_to_torch
from hocket.tracing.recording.array_tape import ArrayTape
from hocket.tracing.recording.data_reads import (
    CHOOSERS,
    EXITS,
    UNSEEN_WRITES,
    computes_otherwise,
    tensors_read,
    with_numbers,
)
from hocket.tracing.recording.op_arguments import Note
from hocket.tracing.recording.op_recorder import OpRecorder
from hocket.tracing.recording.step_arrays import StepValue
from hocket.tracing.recording.ties import tie
from hocket.tracing.scalars.followed_math import exchanged, wherever_held
from hocket.tracing.scalars.late import LateTape
from hocket.tracing.scalars.live import Late, Live, plain_of, plain_tree
from hocket.tracing.scalars.tape import Tape
from hocket.tracing.sources import Entry, ItemOf

# More values than these are data: a guard on them would not hold for another batch.
MAX_VALUES = 1024
# Numbers that the step computes, of which each is an output of its graph where they are read as lists.
MAX_LATE_VALUES = 64

_VALUE: Any = torch.ops.aten._local_scalar_dense.default
_SET_ITEM: Any = torch.Tensor.__setitem__
_ONE_HOT: Any = torch.nn.functional.one_hot
_DROPOUTS = (torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_)
_CROSS_ENTROPY: Any = torch._C._nn.cross_entropy_loss
# Elementwise ops that compute with a number as with a tensor of no dimensions in the same type.
_ARITHMETIC = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in (
        *("add", "sub", "mul", "div", "true_divide", "rsub", "__add__", "__radd__", "__sub__", "__rsub__"),
        *("__mul__", "__rmul__", "__truediv__", "add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__"),
        *("lt", "le", "gt", "ge", "__lt__", "__le__", "__gt__", "__ge__"),
    )
    if hasattr(owner, name)
)
# In narrower types a kernel takes a number with more bits than a tensor's.
_EXACT = (torch.float32, torch.float64)
_KINDS = ("_unary", "_variadic")  # of functions that ask if a tensor has torch functions of its own
_AS: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.item: lambda value: value,
    torch.Tensor.__float__: float,
    torch.Tensor.__int__: int,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__index__: operator.index,
    torch.Tensor.__complex__: complex,
}


class FunctionRecorder(TorchFunctionMode):
    """Ties scalars of recorded ops to the tape, and answers ``.item()`` where the answer can be followed.

    Args:
        ops: sees the ops below.
        tape: of the live numbers.
        step_count: returns the live number in a tensor of the optimizer's state, or None if it cannot be followed.
        late: of numbers of tensors. Without it, these are not followed.
        arrays: of numpy's that are made of tensors, likewise.
    """

    def __init__(
        self,
        ops: OpRecorder,
        tape: Tape,
        step_count: Callable[[torch.Tensor], Any],
        late: LateTape | None = None,
        arrays: ArrayTape | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.tape = tape
        self.step_count = step_count
        self.late = late or LateTape(tape=tape)
        self.arrays = arrays or ArrayTape(tape.reasons, False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.ops.reasons:
            return func(*plain_tree(args, plain_of), **plain_tree(kwargs, plain_of))
        if func in _AS and args:
            return self._value(args[0], func)
        if func is torch.Tensor.numpy and len(args) == 1 and not kwargs and self.arrays.can_read(args[0]):
            return self.arrays.of_tensor(func(args[0]), args[0])
        if func in _ARITHMETIC and not kwargs and len(args) == 2:
            args = self._with_operand(args)
        func, args, kwargs = handed_to_torch(func, args, kwargs)
        name = getattr(func, "__name__", "data")
        if func == torch.Tensor.data.__set__ and not _is_written(*args):  # type: ignore[attr-defined]
            self.ops.give_memory(*args)
        elif func in EXITS or name in UNSEEN_WRITES:
            self.ops.reasons.add("leaves torch", name)
        elif computes_otherwise(func, args, kwargs):
            self.ops.leave("computes otherwise", name)
        if self.ops.reasons:
            return func(*plain_tree(args, plain_of), **plain_tree(kwargs, plain_of))
        if func is torch.Tensor.tolist:
            return self._late_values(args[0]) if self._is_late(args[0]) else self._values(args[0])
        for tensor in tensors_read(func, args, kwargs):
            self._values(tensor)
        if func is _ONE_HOT and (classes := _num_classes(args, kwargs)):
            # As torch makes it, but the op that fills it checks the values, and not the step.
            made = torch.zeros((*args[0].shape, classes), dtype=torch.int64, device=args[0].device)
            return made.scatter_(-1, args[0].unsqueeze(-1), 1)
        args = with_numbers(func, args, lambda tensor: self._value(tensor, torch.Tensor.item))
        kwargs = {key: self._scalar(name, key, each) for key, each in kwargs.items()}
        live = list(_live_in((args, kwargs)))
        return self._with_numbers(func, args, kwargs, live) if live else func(*args, **kwargs)

    def _value(self, tensor: torch.Tensor, func: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.numel() != 1 or tensor.layout is not torch.strided:
            return func(tensor)  # which says what is wrong
        of_batch = self.ops.batch.knows([self.ops.root(tensor)])
        known = self.step_count(tensor)
        if known is None and of_batch and func is torch.Tensor.item and not (_is_bool(tensor) or tensor.is_complex()):
            known = self.tape.leaf(*self.ops.number(_VALUE, tensor))
        if known is None and of_batch:
            known = self.ops.read(_VALUE, (tensor,))
        if known is not None:
            return _AS[func](known)
        if func is torch.Tensor.__bool__ or (func is torch.Tensor.item and _is_bool(tensor)):
            outcome = self.ops.outcome_of(tensor)
            if outcome is not None:
                return outcome
        is_whole = not (tensor.dtype.is_floating_point or tensor.is_complex() or _is_bool(tensor))
        is_followed = is_whole and self.late.follows and self.late.has_whole
        if func is not torch.Tensor.item or not (tensor.dtype.is_floating_point or is_followed):
            self.ops.reasons.add("reads a value", func.__name__.strip("_"))
            return func(tensor)
        with torch.inference_mode(False), torch.no_grad():
            read = tensor.detach()
            copy = read.clone()  # an op that is dropped, unless the step writes into this memory later
        read_from = copy if read.is_inference() else read, copy, self.ops.writers_of(read)
        with _disable_current_modes():
            return self.late.read(copy.item(), read_from, user_line())

    def _scalar(self, name: str, key: str, value: Any) -> Any:
        """The number in a tensor of the optimizer's that C++ would read, or the argument as it is."""
        is_read = key in ("alpha", "beta") or (key == "value" and name.startswith("addc"))
        is_read = is_read and type(value) is torch.Tensor and value.numel() == 1 and not value.requires_grad
        known = self.step_count(value) if is_read else None
        return value if known is None else known

    def _is_late(self, tensor: torch.Tensor) -> bool:
        is_few = tensor.numel() <= MAX_LATE_VALUES and tensor.dtype.is_floating_point
        return is_few and self.late.follows and not self.ops.batch.knows([self.ops.root(tensor)])

    def _late_values(self, tensor: torch.Tensor) -> Any:
        """The numbers of a tensor in lists, as ``tensor.tolist()``."""
        if tensor.dim() == 0:
            return self._value(tensor, torch.Tensor.item)
        return [self._late_values(part) for part in tensor.detach().unbind()]

    def _values(self, tensor: torch.Tensor) -> Any:
        if tensor.numel() > MAX_VALUES:
            self.ops.reasons.add("reads many values", tensor.numel())
            with _disable_current_modes():
                return tensor.tolist()
        return self.ops.read(torch.Tensor.tolist, (tensor,))

    def _with_operand(self, args: Any) -> Any:
        """The operands of an elementwise op, with a tensor of no dimensions in place of a late number."""
        for place, like in ((0, args[1]), (1, args[0])):
            late = args[place]
            if is_a(late, (Late, StepValue)) and isinstance(like, torch.Tensor) and like.dtype in _EXACT:
                with self:  # so that numbers that change between steps are seen to reach an op
                    operand = late.tape.operand(late)
                if operand is not None:
                    return (operand.to(like.dtype), like) if place == 0 else (like, operand.to(like.dtype))
        return args

    def _with_numbers(self, func: Any, args: Any, kwargs: Any, live: list[Any]) -> Any:
        for value in live:
            if isinstance(value, Late):
                value.tape.settle(value)
                return func(*plain_tree(args, plain_of), **plain_tree(kwargs, plain_of))
        computed = None if kwargs else _computed_with(func, args)
        live = live if computed is None else computed
        if computed is None and getattr(func, "__name__", "") in CHOOSERS:
            args, kwargs = plain_tree(args), plain_tree(kwargs)
        if func in (torch.tensor, torch.as_tensor) and not kwargs.keys() - {"dtype", "device"} and _is_flat(args[0]):
            return self._made_of(args[0], **kwargs)
        start, reads = len(self.ops.order), self.ops.batch.num_reads
        first_made = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if func is _SET_ITEM and isinstance(args[2], Live):
            # A number that is put into a tensor has to be put there again in every step.
            at = plain_tree(args[1])
            result = func(args[0], at, torch.full((), args[2].plain, dtype=args[0].dtype, device=args[0].device))
            live = [args[2]]
        else:
            result = func(*plain_tree(args, plain_of), **plain_tree(kwargs, plain_of))
        nodes = self.ops.order[start:]
        for number in range(first_made, torch.autograd._get_sequence_nr()):  # type: ignore[attr-defined]
            self.ops.numbers_kept[number] = live, computed is not None
        if self.ops.batch.num_reads > reads:
            # The function read a value of the batch, perhaps of what it had computed with the numbers.
            plain_tree(live)
        self._tie(func, live, [(node, self.ops.notes[node]) for node in nodes])
        return result

    def _made_of(self, data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        """The tensor that `torch.tensor` makes of these numbers, by an op for each, which other steps make again."""
        numbers = [data] if isinstance(data, Live) else data
        is_float = any(isinstance(plain_of(each), float) for each in numbers)
        kind = dtype or (torch.get_default_dtype() if is_float else torch.int64)
        kwargs = {"dtype": kind, "device": device}
        made = [
            self._with_numbers(torch.full, ((), each), kwargs, [each] if isinstance(each, Live) else [])
            for each in numbers
        ]
        return made[0] if isinstance(data, Live) else torch.stack(made)

    def _tie(self, func: Any, live: list[Any], nodes: list[tuple[fx.Node, Note]]) -> None:
        tied = {index for node, note in nodes for index in tie(node, note.scalars, live, self.tape)[0]}
        if any(note.scalars for _, note in nodes):
            self.ops.batch.lose([root for _, note in nodes for root in (*note.returns, *note.writes)])
        for value in live:
            if value.entry in tied or value.entry in self.tape.settled:
                continue
            if nodes and self._is_optimizers(value):
                self.ops.reasons.add("computes unseen", getattr(func, "__name__", str(func)))
            self.tape.settle(value)

    def _is_optimizers(self, value: Any) -> bool:
        """Return True if the number comes from an optimizer. A guard on it would fail in every step."""
        sources = [self.tape.leaves[leaf] for leaf in self.tape.leaves_of(value.entry)]
        return any(isinstance(s, ItemOf) or (isinstance(s, Entry) and s.kind in ("group", "state")) for s in sources)


def python_functions_open() -> AbstractContextManager[None]:
    """While this lasts, torch functions written in Python do not hand themselves to a mode."""
    opened: dict[Any, Any] = {vars(torch.overrides)[f"has_torch_function{kind}"]: _overridden for kind in _KINDS}
    opened[torch.overrides.has_torch_function] = lambda tensors: _overridden(*tensors)
    return exchanged(wherever_held(opened))


def _overridden(*values: Any) -> bool:
    """Return True if one of the values is a tensor subclass with torch functions of its own."""
    usual: Any = torch.Tensor.__torch_function__
    known = (None, usual.__func__, torch._C._disabled_torch_function_impl)
    methods = [getattr(kind, "__torch_function__", None) for kind in map(type, values) if kind is not torch.Tensor]
    return any(getattr(method, "__func__", method) not in known for method in methods)


def _is_written(tensor: torch.Tensor, value: Any) -> bool:
    """True if ``tensor.data = value`` changes nothing: ``tensor.data *= x`` has written into its memory before."""
    if type(value) is not torch.Tensor or {tensor.layout, value.layout} != {torch.strided}:
        return False
    one, other = (
        (each.dtype, each.shape, each.stride(), each.is_conj(), each.is_neg(), each.data_ptr())
        for each in (tensor, value)
    )
    return one == other and tensor.untyped_storage()._cdata == value.untyped_storage()._cdata


def _is_bool(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.bool


def _num_classes(args: Any, kwargs: Any) -> int:
    """The number of classes given to `one_hot`, or 0 where it has to look at its tensor."""
    found = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    labels = args[0] if args else None
    is_usual = isinstance(labels, torch.Tensor) and labels.dtype is torch.int64 and labels.numel() > 0
    return found if is_usual and type(found) is int and found > 0 else 0


def _computed_with(func: Any, args: Any) -> list[Any] | None:
    """The live numbers that the ops of a call get, where C++ is known to compute them from the one that it is given.

    Others that it is given are settled. None for all other calls.
    """
    if func is _CROSS_ENTROPY and len(args) == 6 and isinstance(args[5], Live):
        plain_tree(args[:5])
        smoothing: Any = args[5]
        num_classes = args[0].shape[min(1, args[0].dim() - 1)]
        return [1 - smoothing, smoothing / num_classes] if smoothing > 0 else []
    if func is torch.batch_norm:
        return [each for each in args[6:8] if isinstance(each, Live)]  # the momentum and what is added to variances
    if func in _DROPOUTS and len(args) == 3 and isinstance(args[1], Live) and not isinstance(args[2], Live):
        rate: Any = args[1]
        trains = args[2]
        return [1 - rate] if trains and rate != 0 and rate != 1 else []
    return None


def _live_in(value: Any) -> Iterator[Any]:
    for leaf in leaves_in(value):
        if isinstance(leaf, slice):
            yield from _live_in((leaf.start, leaf.stop, leaf.step))
        elif isinstance(leaf, (Live, Late)):
            yield leaf


def _is_flat(data: Any) -> bool:
    return isinstance(data, Live) or all(isinstance(element, (int, float)) for element in data)
