"""The tables of holders, and the decorators that add to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Made = tuple[Callable[[], Any], Callable[[Any], None]]
HOLDERS: dict[str, Callable[[Any], Made]] = {}
NUMBERS: dict[str, Callable[[Any], Made]] = {}
KEPT: list[Any] = []  # what has to outlive a loop


def holder(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    HOLDERS[make.__name__] = make
    return make


def number(make: Callable[[Any], Made]) -> Callable[[Any], Made]:
    NUMBERS[make.__name__] = make
    return make


def kept(value: Any) -> Any:
    """The value, which outlives the loop."""
    KEPT.append(value)
    return value


def place(
    make: Callable[[Any], Any], read: Callable[[Any], Any], write: Callable[[Any, Any], Any]
) -> Callable[[Any], Made]:
    """A place in what `make` makes of the first value, by functions that read it and write to it."""

    def of(first: Any) -> Made:
        held = make(first)
        return lambda: read(held), lambda value: write(held, value)

    return of


def reached(make: Callable[[Any], Any], find: Callable[[Any], Any] = lambda held: held) -> Callable[[Any], Made]:
    """The attribute `value` of an object that `find` gets from what `make` makes of the first value."""

    def write(held: Any, value: Any) -> None:
        find(held).value = value

    return place(make, lambda held: find(held).value, write)


# Where a counter, or a random generator, keeps the step eager; an iterator does everywhere.
REFUSED_DRAWS = frozenset(
    {
        *("item of globals", "context", "simple_queue", "generator", "coroutine", "future"),
        *("referent_of_a_weak_reference", "weak_proxy", "element_of_xml", "text_of_xml", "callback_of_a_finalizer"),
        "attribute of a cached function",
    }
)
REFUSED_COUNTERS = REFUSED_DRAWS | {
    *("item of a deque", "item of a ring", "item of an array of objects", "defaults", "partials_state"),
    *("arguments_of_an_exception", "cause_of_an_exception", "context_variable", "mapping_proxy"),
    *("waiting_queue", "priority_queue", "registry_of_dispatch", "buffer_of_a_layer", "array", "bytearray"),
    *("memory view", "memory view of an array", "array of numpy", "array of numpy, of no axes"),
    *("array of ctypes", "pointer", "mapped memory", "tensor", "structure of ctypes", "number of ctypes"),
    "property_of_a_list",
    *("state_of_numbers_of_its_own", "identifier", "fraction", "text", "length_of_a_list", "length_of_a_set"),
    *("length_of_a_dict", "length_of_an_array", "position_in_a_raw_stream", "position_in_a_text_stream"),
    *("shared_memory", "position_in_a_file", "length_of_a_raw_stream", "order_of_a_dict"),
    *("rotation_of_a_deque", "recursion_limit", "threshold_of_the_collector", "precision_of_decimals"),
    *("environment", "level_of_a_logger", "semaphore", "database", "hash_that_grows", "decompressor"),
    *("writer_of_lines", "parsed_configuration", "cache_of_a_function", "packed_bytes", "iterator_of_numbers"),
}
