"""Values that a step can reach, grouped by the object that holds them.

A `Group` is what one owner holds: the named entries of a dict (an instance's, a module's, a class's), the items of a
list, the content of a closure cell, the kind of a tensor. A `Place` is one value of a group, which can be read and
written: what a step rebinds, and numbers that change between steps, become inputs and outputs of its graph that way.
"""

from __future__ import annotations

import enum
import functools
import operator
import struct
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


class _Absent:
    """Stands for the value of a place where there is none: a name that was deleted, an empty cell."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

# A path is a link to the path of the owner and how to get on from there; the text is put together when it is asked for.
Path = tuple[Any, str, Any]

# Immutable values that type and equality identify; classes derived from Python's own may hold more.
_EXACT = frozenset(
    (
        int, float, complex, str, bytes, bool, type(None), type(Ellipsis), type(NotImplemented), range, slice,
        np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    )
)  # fmt: skip
EMPTY_KINDS = frozenset((list, dict, OrderedDict, defaultdict))
_VALUES = (np.generic, np.dtype, enum.Enum)
_CONTAINERS = (dict, list, tuple)

_SHOWN_CHARACTERS = 60
_SHOWN_BYTES = 16
_SIZE_OF_DOUBLE = 8


class Followed:
    """Base of numbers and text that stand for those of later steps while a step is recorded."""


def is_a(value: Any, kinds: Any) -> bool:
    """As `isinstance`, which asks the value for its ``__class__`` besides: that runs code of the user's."""
    return issubclass(type(value), kinds)


def is_plain(value: Any) -> bool:
    """Return whether `value` is immutable all through, so that type and equality identify it."""
    kind = type(value)
    if kind is tuple:
        return all(is_plain(element) for element in value)
    return kind in _EXACT or issubclass(kind, _VALUES) or value is ABSENT


def is_immutable(value: Any) -> bool:
    """True if `value` is plain and cannot have attributes either (a member of an enum can)."""
    return is_plain(value) and not issubclass(type(value), enum.Enum)


def items_of(value: Any) -> list[Any]:
    """The items of one of Python's containers (the values of a dict), without code of a class derived from it."""
    base: Any = next(each for each in (*_CONTAINERS, set, frozenset, deque) if is_a(value, each))
    return list(dict.values(value) if base is dict else base.__iter__(value))


def containers_in(value: Any) -> Iterator[Any]:
    """The tuple, list or dict that the value is, and those in it, the outer ones first."""
    if is_a(value, _CONTAINERS):
        yield value
        for each in items_of(value):
            yield from containers_in(each)


def is_empty(value: Any) -> bool:
    """Return whether `value` is an empty list or dict of one of Python's own classes. A step may make it anew."""
    return type(value) in EMPTY_KINDS and not value


def as_it_stands(value: Any, made: dict[int, Any] | None = None) -> Any:
    """The value, or a copy of an empty list or dict, which a step may fill before it makes another.

    `made` has the copies of other places so far, by the address of the original: what is one object stays one.
    """
    if not is_empty(value):
        return value
    return copy(value) if made is None else made.setdefault(id(value), copy(value))


def is_number(value: Any) -> bool:
    """Return whether `value` is a plain int or float, or numpy's own float (a bool chooses code, and is none)."""
    return type(value) in (int, float, np.float64)


def same(first: Any, second: Any) -> bool:
    """Return whether two values are indistinguishable to code that reads them. Objects are compared by identity."""
    if first is second:
        return True
    if type(first) is not type(second) or not is_plain(first):
        return False
    if type(first) is tuple:
        return len(first) == len(second) and all(map(same, first, second))
    return not is_a(first, enum.Enum) and bool(exact(first) == exact(second))  # of a member there is one


def exact(value: Any) -> Any:
    """Return what equals that of another plain value of this type only if no code can tell the two apart.

    Numbers count by their bits: -0.0 is not 0.0, and NaN is the same NaN.
    """
    kind = type(value)
    if issubclass(kind, float):
        return struct.pack("d", value)
    if issubclass(kind, complex):
        return struct.pack("2d", value.real, value.imag)
    if issubclass(kind, np.generic) and value.itemsize <= _SIZE_OF_DOUBLE:  # larger ones have bits without a meaning
        return value.tobytes()
    if kind is slice:
        value = (value.start, value.stop, value.step)
    elif kind is not tuple:
        return value
    return tuple([(type(each), exact(each)) for each in value])


def keeps_graph(tensor: torch.Tensor, place: Place | None) -> bool:
    """Return True if a backward could go on behind a tensor that a step puts here, in a graph that none has used up.

    False for a pruned or normed weight, which a hook makes anew before it is read.
    """
    if place is None or not tensor.requires_grad or (tensor.grad_fn is not None and is_spent(tensor.grad_fn)):
        return False
    return place.kind != "dict" or not place.owner.get("_forward_pre_hooks")


def is_spent(node: Any) -> bool:
    """Return True if a backward through this graph raises, since an earlier one has freed its values."""
    waiting, seen = [node], {node}
    while waiting:
        node = waiting.pop()
        kind: Any = type(node)
        for name in _saved(kind):
            try:
                getattr(node, name)
            except RuntimeError:
                return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


@functools.cache
def _saved(kind: type) -> tuple[str, ...]:
    """The attributes that hold what a node of this kind needs for its backward."""
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


KIND_NAMES = ("dtype", "device", "shape", "layout", "requires_grad", "is_conj", "is_neg", "is_inference")


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a recorded step relies on in a tensor, besides its strides, in the order of `KIND_NAMES`."""
    flags = (tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())
    return (tensor.dtype, tensor.device, tensor.shape, tensor.layout, *flags)


def are_like(first: Any, second: Any, *, numbers: bool = False, spent: bool = True) -> bool:
    """Return whether two values are tensors of one kind, or tuples, lists and dicts of such in the same order.

    Of anything else in these they hold the same. Of `numbers`, if that is set, the type counts alone. Without `spent`,
    it does not count whether a tensor has an autograd graph that a backward has used up.
    """
    if numbers and is_number(first):
        return type(first) is type(second)
    if is_a(first, torch.Tensor) and is_a(second, torch.Tensor):
        one, other = (each if spent else _without_spent(each) for each in (first, second))
        if kind_of(one) != kind_of(other) or isinstance(second, torch.nn.Parameter):
            return False
        return first.layout is not torch.strided or first.stride() == second.stride()
    if type(first) is not type(second):
        return False
    if type(first) is defaultdict and first.default_factory is not second.default_factory:
        return False
    if not is_a(first, _CONTAINERS) or type(first) is torch.Size:
        return same(first, second)
    parts, others = items_of(first), items_of(second)
    if len(parts) != len(others) or (is_a(first, dict) and not all(map(same, dict.keys(first), dict.keys(second)))):
        return False
    return all(map(functools.partial(are_like, numbers=numbers, spent=spent), parts, others))


def _without_spent(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.grad_fn is not None and is_spent(tensor.grad_fn) else tensor


def members_of(values: Iterable[Any]) -> frozenset[Any]:
    """Return the members of a set: plain values with their types, objects by identity."""
    return frozenset((type(each), each) if is_immutable(each) else id(each) for each in values)


def describe(path: Path) -> str:
    """``trainer.ema['weight']``, ``closure of step: count``."""
    owner, form, key = path
    before = describe(owner) if owner else ""
    if form == "":
        return str(key)
    if form == ".":
        return f"{before}.{key}"
    if form == "[]" and type(key) is str and key.startswith("_hocket_"):
        return "what it calls"  # by a part of it (see `hocket.pystate.inner_calls`)
    if form == "[]":
        text = _text(key)
        return f"{before}[{text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + '...'}]"
    return form.format(before, key)


def shown(value: Any) -> str:
    """A value in a message: as it is if it is plain, else its type."""
    if is_a(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = _text(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _text(value: Any) -> str:
    """`value` as Python spells it, without running code of its class."""
    kind = type(value)
    if is_a(value, enum.Enum):
        return f"{kind.__name__}.{vars(value).get('_name_', '?')}"
    if kind is tuple:
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    if kind is bytes and len(value) > _SHOWN_BYTES:
        return f"{len(value):,} bytes"  # of an array, say
    return repr(value) if is_plain(value) else f"a {kind.__name__}"


@dataclass(slots=True, eq=False)
class Group:
    """The values that one owner holds."""

    # ``dict``, ``class``, ``type`` (the class of an object, and of a class its bases), ``cell``, ``list``,
    # ``sequence``, ``slots``, ``readonly``, ``function``, ``tensor``, ``buffer``, ``set``, ``context``, ``setting``
    # (what the function that is its key returns), ``state`` (of a generator or an iterator, compared but never guarded:
    # reading advances it)
    kind: str
    owner: Any
    path: Path  # how the step reaches it
    keys: Any  # in step with `values`
    values: Any
    form: str = ""  # how a message spells a key: ``.``, ``[]``, or not at all
    # which tensor stands here may change (buffers: a captured step reads and writes them anew)
    rebindable: bool = False
    counts: Callable[[str], bool] | None = None  # which keys matter, where not all do
    is_passing: bool = False  # the next step may put another object in the place of the owner

    @property
    def entries(self) -> Any:
        """The table of a dict or a class."""
        return vars(self.owner) if self.kind == "class" else self.owner

    @property
    def whole(self) -> bool:
        """True if further keys matter, and their order."""
        return self.counts is None

    def place(self, position: int) -> Place:
        return Place(self.kind, self.owner, self.keys[position], self.path_of(self.keys[position]))

    def path_of(self, key: Any) -> Path:
        return (self.path, self.form, key) if self.form else self.path


@dataclass(frozen=True, eq=False)
class Place:
    """One value that can be read and written.

    Args:
        kind: of the group it belongs to. See `is_writable`.
        owner: the dict, cell, list, object or class.
        key: where in it.
        path: how the step reaches it.
        is_whole: the value counts as a whole, also where it is a tuple of numbers.
    """

    kind: str
    owner: Any
    key: Any
    path: Path
    is_whole: bool = False

    @property
    def name(self) -> str:
        return describe(self.path)

    @property
    def identity(self) -> tuple[str, int, Any]:
        return (self.kind, id(self.owner), self.key)

    @property
    def is_writable(self) -> bool:
        """True if a value can be put there, as the user's code does."""
        if self.kind == "tensor":
            return self.key == "requires_grad" and is_a(self.owner, torch.nn.Parameter) and self.owner.is_leaf
        return self.kind in ("dict", "cell", "list", "slots", "class", "context")

    def get(self) -> Any:
        """Return the value at this place, or `ABSENT` (a name was deleted, a cell is empty, a list is shorter)."""
        read, _, _ = _ACCESS.get(self.kind, _ITEM)
        try:
            return read(self.owner, self.key)
        except (LookupError, AttributeError, ValueError):
            return ABSENT

    def set(self, value: Any) -> None:
        """Set the value at this place, or delete it if the new value is `ABSENT`."""
        _, write, delete = _ACCESS.get(self.kind, _ITEM)
        if value is not ABSENT:
            write(self.owner, self.key, value)
        elif self.get() is not ABSENT:
            delete(self.owner, self.key)


# By the kind of a place how it is read, written and emptied.
_ITEM = (operator.getitem, operator.setitem, operator.delitem)
_ACCESS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "slots": (object.__getattribute__, setattr, delattr),
    "tensor": (getattr, setattr, delattr),
    "class": (lambda kind, name: vars(kind)[name], type.__setattr__, type.__delattr__),
    "cell": (
        lambda cell, _: cell.cell_contents,
        lambda cell, _, value: setattr(cell, "cell_contents", value),
        lambda cell, _: delattr(cell, "cell_contents"),
    ),
    "context": (lambda variable, _: variable.get(), lambda variable, _, value: variable.set(value), lambda *_: None),
}
