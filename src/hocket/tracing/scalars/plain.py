"""Plain numbers in place of live ones: in what a step returned, and wherever it has put them."""

from __future__ import annotations

import collections
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_flatten, tree_map_only

from hocket.arguments import is_size
from hocket.pystate.layout import instance_dict, slot_value, slots_of
from hocket.pystate.places import is_a
from hocket.tracing.scalars.live import Late, Live, plain_of

_WRITABLE = (list, dict, collections.OrderedDict, collections.defaultdict)


def plain_result(result: Any, is_leaf: Callable[[Any], bool]) -> Any:
    """The user's own result, with plain numbers in place of live ones. What `is_leaf` is true of stays as it is."""
    flat, _ = tree_flatten(result, is_leaf)
    if not any(isinstance(leaf, (Live, Late)) for leaf in flat):
        return result
    return tree_map_only((Live, Late), plain_of, result, is_leaf)


def settled_result(result: Any) -> Any:
    """The result of a step that is over, with plain numbers in place of live ones, in the same lists and dicts."""
    if type(result) in _WRITABLE:
        for key, value in list(result.items() if isinstance(result, dict) else enumerate(result)):
            if (plain := settled_result(value)) is not value:
                result[key] = plain
        return result
    if type(result) is tuple:
        elements = tuple(map(settled_result, result))
        return result if all(map(operator.is_, elements, result)) else elements
    return plain_result(result, is_size)


def replace_by_plain(
    handed_out: Sequence[weakref.ref[Any]], plain_one: Callable[[Any], Any] = plain_of
) -> list[tuple[Any, list[Any]]]:
    """Put the plain values where the user's containers and objects hold one of these.

    Returns these containers, each with the values of which it has one now.
    """
    found: list[tuple[Any, list[Any]]] = []
    left = {id(number): number for number in (reference() for reference in handed_out) if number is not None}
    known: set[int] = {id(left)}
    while left:
        plain = {address: _plain_of(value, plain_one) for address, value in left.items()}
        further: dict[int, Any] = {}
        asked = tuple(left.values())  # which Python 3.13 finds, too
        for holder in gc.get_referrers(*asked):
            if holder is asked or id(holder) in known or is_a(holder, types.FrameType):
                continue
            if is_a(holder, tuple):
                known.add(id(holder))
                further[id(holder)] = holder
            else:
                _put(holder, plain)
                found.append((holder, list(plain.values())))
        known |= {id(plain), id(further)}
        # A tuple is made anew, and so is what holds it.
        left = dict(further)
        known.add(id(left))
    return found


def _key_of_call(key: Any) -> Any:
    """The key of a call in `functools.lru_cache`: one plain argument by itself, several as a tuple."""
    return key[0] if type(key) is tuple and len(key) == 1 and type(key[0]) is int else key


def _plain_of(value: Any, plain_one: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        elements = [_plain_of(element, plain_one) for element in value]
        return value._make(elements) if hasattr(value, "_make") else tuple(elements)
    return plain_one(value)


def _put(holder: Any, plain: dict[int, Any]) -> None:
    """Exchange in one object the values whose addresses are keys of `plain`."""
    if is_a(holder, list):
        for position, value in enumerate(list.__iter__(holder)):
            if id(value) in plain:
                list.__setitem__(holder, position, plain[id(value)])
    elif is_a(holder, dict):
        if any(id(key) in plain for key in dict.keys(holder)):
            is_cache = any(type(each) is functools._lru_cache_wrapper for each in gc.get_referrers(holder))
            keys = {address: _key_of_call(key) if is_cache else key for address, key in plain.items()}
            items = [(keys.get(id(key), key), value) for key, value in dict.items(holder)]
            dict.clear(holder)
            dict.update(holder, items)
        for key, value in list(dict.items(holder)):
            if id(value) in plain:
                dict.__setitem__(holder, key, plain[id(value)])
    elif is_a(holder, collections.deque):
        for position, value in enumerate(list(holder)):
            if id(value) in plain:
                holder[position] = plain[id(value)]
    elif is_a(holder, set):
        for value in [value for value in holder if id(value) in plain]:
            holder.discard(value)
            holder.add(plain[id(value)])
    elif is_a(holder, types.CellType):
        holder.cell_contents = plain[id(holder.cell_contents)]
    elif type(holder) is functools._lru_cache_wrapper and holder.cache_parameters()["maxsize"] is not None:
        holder.cache_clear()  # an entry of a bounded cache is out of reach
    else:
        if (table := instance_dict(holder)) is not None:
            _put(table, plain)
        for slot in slots_of(type(holder)):
            for value in slot_value(holder, slot):
                if id(value) in plain:
                    setattr(holder, slot, plain[id(value)])
