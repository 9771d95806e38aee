"""Batches of any shape: objects that hold tensors are unfolded into what they hold.

Torch's pytree knows lists, tuples, dicts and what was registered with it. Anything else is a leaf to it. A batch is as
often a dataclass, an `argparse.Namespace`, a `collections.UserDict`, a dict of a class of its own or the
``BatchEncoding`` of a tokenizer. All that such an object holds is in its ``__dict__``, its slots, and the items of the
list, tuple or dict that its class is derived from::

    Batch(x=tensor, meta=Namespace(ids=tensor))   ->   leaves tensor, tensor and tree (Batch, x, (Namespace, ids))

An array of numpy is unfolded into the tensor that shares its memory. `unfolded` gives such a batch as an `Unfolded`,
which is registered with torch's pytree. The step gets its own object.
"""

from __future__ import annotations

import enum
import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from hocket.arguments import Arguments, Unfolded
from hocket.pystate.layout import foreign_base, instance_dict, slot_value, slots_of
from hocket.pystate.places import is_plain, items_of, same, shown

# Beyond these an object is no batch: it is left as one leaf, which cannot be seen.
MAX_DEPTH, MAX_LEAVES = 12, 2000

_CONTAINERS = (dict, list, tuple)
_USUAL_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MADE_BY = (dict, list, types.SimpleNamespace)
# Objects that are more than what they hold.
_NEVER = (
    torch.nn.Module, torch.optim.Optimizer, torch.Generator, type, enum.Enum, np.ndarray, np.generic, BaseException,
    types.ModuleType, types.FunctionType, types.MethodType, types.GeneratorType,
)  # fmt: skip
# Attributes that hold objects of C beside what a step reads, by class and name.
_OUT_OF_SIGHT = (("BatchEncoding", "_encodings"),)
# Methods of these classes that read no values. Indexing by a number does read them, and is among these.
_INNOCENT = frozenset(
    (
        "__init__", "__getitem__", "__getattr__", "__contains__", "__len__", "__iter__", "keys", "values", "items",
        "to", "get", "copy", "convert_to_tensors", "__setitem__", "__repr__",
    )
)  # fmt: skip


@dataclass(frozen=True)
class _Tree:
    """The shape of an unfolded value."""

    kind: type | None = None  # the type of the object. None for a leaf.
    keys: tuple[Any, ...] = ()  # names of its attributes, then the keys of its items
    spec: Any = None  # of a node that torch's pytree knows, with leaves in it
    parts: tuple[_Tree, ...] = ()  # a tree for each child
    unseen: dict[str, Any] = field(default_factory=dict, compare=False)  # attributes that are left out

    def kinds(self) -> Iterator[type]:
        if self.kind is not None and self.spec is None:
            yield self.kind
        for part in self.parts:
            yield from part.kinds()

    def arrays(self, leaves: Iterator[Any]) -> dict[int, torch.Tensor]:
        """By the address of each array its tensor."""
        if not self.parts and self.spec is None and self.kind in (None, np.ndarray):
            leaf = next(leaves)
            return {} if self.kind is None else {id(self.unseen[""]): leaf}
        return {address: leaf for part in self.parts for address, leaf in part.arrays(leaves).items()}


_LEAF = _Tree()


class _TooLargeError(Exception):
    """The value is no batch: it refers to itself, or has very many parts."""


def unfolded(batch: Any) -> Any:
    """`batch`, as an `Unfolded` if there is an object in it that has to be unfolded to see all tensors."""
    return batch if _is_usual(batch) else _unfolded(batch, {})


def unfolded_again(batch: Any) -> Any:
    """The result of `unfolded`, as it is now. An array has the same tensor as before."""
    return _unfolded(batch.value, batch.tree.arrays(iter(batch.leaves))) if type(batch) is Unfolded else batch


@dataclass(frozen=True)
class Held:
    """A tensor of a batch without its elements."""

    version: int | None  # how often it was written to. None where torch does not count that.
    attributes: dict[str, Any]  # of its own
    has_gradient: bool  # a gradient was there already


def held_by(leaf: Any) -> Held | None:
    """A leaf of a batch as it is now, if it is a tensor."""
    if not isinstance(leaf, torch.Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():  # no code of its class
        has_gradient = (leaf.is_leaf or leaf.retains_grad) and leaf.grad is not None
        version = None if leaf.is_inference() else leaf._version
    return Held(version, dict(instance_dict(leaf) or {}), has_gradient)


def _findings_of(tensor: str, leaf: torch.Tensor, held: Held) -> Iterator[str]:
    if type(leaf) not in _USUAL_TENSORS:
        yield f"{tensor} is a {type(leaf).__name__}, whose class sees all ops: pass it by as_subclass(torch.Tensor)"
    if held.version is not None and leaf._version != held.version:
        yield f"it writes into {tensor}: write into a copy"
    for name, value in held.attributes.items():
        if not is_plain(value):
            yield f"{tensor} has an attribute of its own, {name}: {shown(value)}: pass that beside it"
    now = instance_dict(leaf) or {}
    if now.keys() != held.attributes.keys() or not all(same(now[name], each) for name, each in held.attributes.items()):
        yield f"it sets attributes of {tensor}: return what they hold"
    if held.has_gradient:
        yield f"{tensor} has a gradient already: set it to None, or pass it beside the tensor"


def batch_findings(
    batch: Any, leaves: list[Any], spec: Any, held: Sequence[Held | None], refuses_arrays: str
) -> Iterator[str]:
    """Findings about what a step did to its batch, of these leaves, and what tensors held before the step.

    What `refuses_arrays` says of the step, if anything, keeps arrays from being followed.
    """
    if refuses_arrays and holds_arrays(batch):
        cure = "ask by isinstance, or pass" if "types" in refuses_arrays else "pass"
        yield f"{refuses_arrays}, and its batch holds a numpy array: {cure} the tensor"
    again, spec_now = pytree.tree_flatten(unfolded_again(batch))
    if spec_now != spec or any(a is not b and not same(a, b) for a, b in zip(leaves, again, strict=True)):
        yield "it puts other values into its batch: put them into a copy"
        return
    for place, (leaf, each) in enumerate(zip(leaves, held, strict=True)):
        found = () if each is None else tuple(_findings_of(f"tensor {place} of its batch", leaf, each))
        if found:
            yield found[0]
            return


def _unfolded(batch: Any, arrays: dict[int, torch.Tensor]) -> Any:
    leaves: list[Any] = []
    try:
        tree = _tree_of(batch, leaves, arrays, 0)
    except _TooLargeError:
        return batch
    return Unfolded(batch, tuple(leaves), tree) if any(True for _ in tree.kinds()) else batch


def holds_arrays(batch: Any) -> bool:
    """True if there are arrays of numpy in an unfolded batch."""
    return np.ndarray in kinds_in(batch)


def kinds_in(batch: Any) -> set[type]:
    """The classes of all objects that were unfolded, whose code the step may run."""
    return set(batch.tree.kinds()) if type(batch) is Unfolded else set()


def reads_out_of_sight(batch: Any, codes: Iterable[types.CodeType]) -> str:
    """A method that ran and may read what is not seen of the batch, as ``BatchEncoding.word_ids``, if any."""
    kinds = {owner for owner, _ in _OUT_OF_SIGHT} & {kind.__name__ for kind in kinds_in(batch)}
    for code in codes if kinds else ():
        owner, _, name = code.co_qualname.rpartition(".")
        if owner in kinds and name not in _INNOCENT:
            return code.co_qualname
    return ""


def _is_usual(value: Any) -> bool:
    """True if torch's pytree sees all there is. The answer does not come from the pytree."""
    kind = type(value)
    if kind is list or kind is tuple:
        return all(map(_is_usual, value))
    if kind is torch.Tensor or (is_plain(value) and kind is not torch.Size):
        return True
    if kind is dict:
        return all(map(_is_usual, value.values()))
    return kind is Arguments and _is_usual(value.args) and _is_usual(value.kwargs)


def _tree_of(value: Any, leaves: list[Any], arrays: dict[int, torch.Tensor], depth: int) -> _Tree:
    if depth > MAX_DEPTH or len(leaves) > MAX_LEAVES:
        raise _TooLargeError
    kind = type(value)
    if isinstance(value, torch.Tensor) or (is_plain(value) and not isinstance(value, tuple)):  # a pytree has leaves
        leaves.append(value)
        return _LEAF
    if kind is np.ndarray and (tensor := arrays.get(id(value), _tensor_of(value))) is not None:
        arrays[id(value)] = tensor  # in all places of the batch
        leaves.append(tensor)
        return _Tree(kind, unseen={"": value})
    children, spec = pytree.tree_flatten(value, is_leaf=lambda each: each is not value)
    if kind is torch.Size:  # torch's pytree would make a plain tuple of it
        return _Tree(kind, ((), ()), None, tuple(_tree_of(child, leaves, arrays, depth + 1) for child in children))
    if not (len(children) == 1 and children[0] is value):
        return _Tree(kind, (), spec, tuple(_tree_of(child, leaves, arrays, depth + 1) for child in children))
    if not _is_seen_through(kind):  # type: ignore[arg-type]
        leaves.append(value)
        return _LEAF
    keys, children, unseen = _content(value, kind)
    return _Tree(kind, keys, None, tuple(_tree_of(child, leaves, arrays, depth + 1) for child in children), unseen)


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """The tensor that shares the memory of an array. None for texts, objects and the like, and reversed ones."""
    if array.dtype.kind not in "biufc" or any(stride < 0 for stride in array.strides):
        return None
    try:
        with warnings.catch_warnings():
            if not array.flags.writeable:
                warnings.simplefilter("ignore")  # torch warns of memory that must not be written to
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


@functools.cache
def _is_seen_through(kind: type) -> bool:
    """True if all that an instance holds is in its attributes and items."""
    if issubclass(kind, _NEVER) or kind.__flags__ & 1 << 9 == 0:  # types of C, but for one
        return kind is types.SimpleNamespace
    base = foreign_base(kind)
    return base is None or base in (*_CONTAINERS, types.SimpleNamespace)


def _content(value: Any, kind: type) -> tuple[tuple[Any, ...], list[Any], dict[str, Any]]:
    """The keys and values of an object's attributes and items, and what is left out of them."""
    attributes = dict(instance_dict(value) or {})
    attributes |= {name: found for name in slots_of(kind) for found in slot_value(value, name)}
    unseen = {name: attributes[name] for name in attributes if (kind.__name__, name) in _OUT_OF_SIGHT}
    attributes |= {name: hidden is None for name, hidden in unseen.items()}
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(dict.items(value))
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(items_of(value)))
    if not all(is_plain(key) for key, _ in items):
        raise _TooLargeError
    keys = (tuple(attributes), tuple((type(key), key) for key, _ in items))
    return keys, [*attributes.values(), *(each for _, each in items)], unseen


def folded(tree: _Tree, leaves: Iterator[Any], array: Callable[[Any, Any], Any] = lambda own, _: own) -> Any:
    """The value of a tree with these leaves. `array` makes what stands for an array of it and its tensor."""
    if tree.kind is None:
        return next(leaves)
    if tree.kind is np.ndarray:
        return array(tree.unseen[""], next(leaves))
    children = [folded(part, leaves, array) for part in tree.parts]
    if tree.spec is not None:
        return pytree.tree_unflatten(children, tree.spec)
    kind: Any = tree.kind
    names, items = tree.keys
    found = children[len(names) :]
    if kind is torch.Size:
        return torch.Size(found)
    if issubclass(kind, tuple):
        made = tuple.__new__(kind, found)
    else:
        made = next(base for base in (*_MADE_BY, object) if issubclass(kind, base)).__new__(kind)
        if issubclass(kind, dict):
            dict.update(made, zip((key for _, key in items), found, strict=True))
        elif issubclass(kind, list):
            list.extend(made, found)
    table = instance_dict(made)
    for name, each in zip(names, children, strict=False):
        each = tree.unseen.get(name, each)
        if table is not None and name not in slots_of(kind):
            table[name] = each
        else:
            object.__setattr__(made, name, each)
    return made


def _unflatten(leaves: Any, tree: Any) -> Unfolded:
    found = tuple(leaves)
    return Unfolded(folded(tree, iter(found)), found, tree)


pytree.register_pytree_node(
    Unfolded,
    lambda batch: (list(batch.leaves), batch.tree),
    _unflatten,
    serialized_type_name="hocket.arguments.Unfolded",
)
