"""Places that are neither an attribute nor an item: defaults, contexts, queues, generators, references."""

import asyncio
import contextvars
import copy
import functools
import gc
import heapq
import operator
import queue
import sys
import types
import weakref
import xml.etree.ElementTree as ElementTree

from loops.holders.objects import Record
from loops.holders.registry import HOLDERS, holder, kept, place, reached


def put(items, key, value):
    items[key] = value


def bind_by_its_keyword(held, value):
    held.__kwdefaults__["value"] = value


def changed_in_a_copy(held, value):
    new = copy.copy(held)
    new.value = value
    held.__dict__.update(vars(new))


def future_of(first):
    made = asyncio.Future(loop=asyncio.new_event_loop())
    made.set_result(first)
    return kept([made, made.get_loop()])


def next_future(held, value):
    new = asyncio.Future(loop=held[1])
    new.set_result(value)
    held[0] = new


def element(first):
    held = ElementTree.Element("held", value=first)
    held.text = first
    return held


def context_with(first):
    held, variable = contextvars.copy_context(), contextvars.ContextVar("held")
    held.run(variable.set, first)
    return held, variable


HOLDERS |= {
    "defaults": place(
        lambda first: lambda value=first: value,
        lambda held: held(),
        lambda held, value: setattr(held, "__defaults__", (value,)),
    ),
    "keyword_defaults": place(lambda first: lambda *, value=first: value, lambda held: held(), bind_by_its_keyword),
    "item_of_a_default": place(
        lambda first: lambda value=[first]: value,  # that is the point
        lambda held: held()[0],
        lambda held, value: put(held(), 0, value),
    ),
    "bound_method": reached(lambda first: types.MethodType(lambda self: self, Record(first)), lambda held: held()),
    "partials_argument": place(
        lambda first: functools.partial(operator.getitem, [first], 0),
        lambda held: held(),
        lambda held, value: put(held.args[0], 0, value),
    ),
    "partials_keyword": place(
        lambda first: functools.partial(dict, value=first),
        lambda held: held()["value"],
        lambda held, value: put(held.keywords, "value", value),
    ),
    "partials_state": place(
        lambda first: functools.partial(operator.getitem, [first], 0),
        lambda held: held(),
        lambda held, value: held.__setstate__((operator.getitem, ([value], 0), {}, {})),
    ),
    "arguments_of_an_exception": place(
        ValueError, lambda held: held.args[0], lambda held, value: setattr(held, "args", (value,))
    ),
    "context": place(context_with, lambda held: held[0][held[1]], lambda held, value: held[0].run(held[1].set, value)),
    "future": place(future_of, lambda held: held[0].result(), next_future),
    "referent_of_a_weak_reference": reached(lambda first: weakref.ref(kept(Record(first))), lambda held: held()),
    "weak_proxy": reached(lambda first: weakref.proxy(kept(Record(first)))),
    "element_of_xml": place(element, lambda held: held.get("value"), lambda held, value: held.set("value", value)),
    "text_of_xml": place(element, lambda held: held.text, lambda held, value: setattr(held, "text", value)),
    "module_table": reached(
        lambda first: sys.modules.update(a_module_that_holds=Record(first)),
        lambda _: sys.modules["a_module_that_holds"],
    ),
    "referents": reached(  # found by the collector, and by no name
        lambda first: (Record(first),),
        lambda held: next(each for each in gc.get_referents(held) if isinstance(each, Record)),
    ),
    "copied": place(Record, lambda held: held.value, changed_in_a_copy),
    "named_by_computing": place(
        Record, lambda held: getattr(held, "v" + "alue"), lambda held, value: setattr(held, "valu" + "e", value)
    ),
    "callback_of_a_finalizer": place(
        lambda first: weakref.finalize(kept(Record()), [first].append, None),
        lambda held: held.peek()[1].__self__[0],
        lambda held, value: put(held.peek()[1].__self__, 0, value),
    ),
}


@holder
def cause_of_an_exception(first):
    held = ValueError()
    held.__cause__ = KeyError(first)

    def write(value):
        held.__cause__ = KeyError(value)

    return lambda: held.__cause__.args[0], write


@holder
def context_variable(first):
    held = kept(contextvars.ContextVar("held"))
    held.set(first)
    return held.get, held.set


@holder
def mapping_proxy(first):
    table = {"n": first}
    held = types.MappingProxyType(table)
    return lambda: held["n"], functools.partial(operator.setitem, table, "n")


class Kept:
    """A descriptor whose values lie in a table of its own."""

    def __init__(self):
        self.table = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind):
        return self.table[owner]

    def __set__(self, owner, value):
        self.table[owner] = value


class Properties:
    def __init__(self, first):
        self.values = [first]

    @property
    def value(self):
        return self.values[-1]

    @value.setter
    def value(self, new):
        self.values.append(new)


class Dynamic:
    def __init__(self, first):
        object.__setattr__(self, "table", {"value": first})

    def __getattr__(self, name):
        return self.table[name]

    def __setattr__(self, name, value):
        self.table[name] = value


def described(first):
    made = type("Owner", (), {"value": Kept()})()
    made.value = first
    return made


HOLDERS |= {
    "descriptor": reached(described),
    "property_of_a_list": reached(Properties),
    "dynamic_attribute": reached(Dynamic),
}


def queued(kind):
    """The one element of a queue: reading takes it out and puts it back."""

    def make(first):
        held = kind()
        held.put(first)

        def read():
            value = held.get()
            held.put(value)
            return value

        def write(value):
            held.get()
            held.put(value)

        return read, write

    return make


HOLDERS |= {"simple_queue": queued(queue.SimpleQueue), "waiting_queue": queued(queue.Queue)}


@holder
def priority_queue(first):
    held = [(0, first)]

    def write(value):
        heapq.heapreplace(held, (0, value)) if isinstance(value, int) else held.__setitem__(0, (0, value))

    return lambda: held[0][1], write


@holder
def generator(first):
    def run():
        value = first
        while True:
            new = yield value
            if new is not None:
                value = new

    held = run()
    next(held)
    return lambda: held.send(None), held.send


@holder
def coroutine(first):
    class Wait:
        def __await__(self):
            return (yield)

    async def run():
        value = first
        while True:
            box = await Wait()
            if box[0] is None:
                box[0] = value
            else:
                value = box[0]

    held = kept(run())
    held.send(None)

    def read():
        box = [None]
        held.send(box)
        return box[0]

    return read, lambda value: held.send([value])


@holder
def registry_of_dispatch(first):
    @functools.singledispatch
    def held(value):
        return None

    held.register(int, lambda _: first)
    return lambda: held.dispatch(int)(0), lambda value: held.register(int, lambda _: value)
