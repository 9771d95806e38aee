"""Places that are neither an attribute nor an item: defaults, contexts, queues, generators, references."""

from __future__ import annotations

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

from loops.holders.objects import Plain, Record, attribute
from loops.holders.registry import HOLDERS, KEPT, holder


@holder
def defaults(first):
    def held(value=first):
        return value

    def write(value):
        held.__defaults__ = (value,)

    return held, write


@holder
def keyword_defaults(first):
    def held(*, value=first):
        return value

    def write(value):
        held.__kwdefaults__["value"] = value

    return held, write


@holder
def item_of_a_default(first):
    def held(value=[first]):  # noqa: B006  # that is the point
        return value

    def write(value):
        held()[0] = value

    return lambda: held()[0], write


@holder
def bound_method(first):
    held = Plain()
    held.value = first
    method = types.MethodType(lambda self: self, held)

    def write(value):
        method().value = value

    return lambda: method().value, write


@holder
def partials_argument(first):
    held = functools.partial(operator.getitem, [first], 0)

    def write(value):
        held.args[0][0] = value

    return held, write


@holder
def partials_keyword(first):
    held = functools.partial(dict, value=first)

    def write(value):
        held.keywords["value"] = value

    return lambda: held()["value"], write


@holder
def partials_state(first):
    held = functools.partial(operator.getitem, [first], 0)

    def write(value):
        held.__setstate__((operator.getitem, ([value], 0), {}, {}))

    return held, write


@holder
def arguments_of_an_exception(first):
    held = ValueError(first)

    def write(value):
        held.args = (value,)

    return lambda: held.args[0], write


@holder
def cause_of_an_exception(first):
    held = ValueError()
    held.__cause__ = KeyError(first)

    def write(value):
        held.__cause__ = KeyError(value)

    return lambda: held.__cause__.args[0], write


@holder
def context_variable(first):
    held = contextvars.ContextVar("held")
    KEPT.append(held)
    held.set(first)
    return held.get, held.set


@holder
def context(first):
    held, variable = contextvars.copy_context(), contextvars.ContextVar("held")
    held.run(variable.set, first)
    return lambda: held[variable], lambda value: held.run(variable.set, value)


@holder
def mapping_proxy(first):
    table = {"n": first}
    held = types.MappingProxyType(table)
    return lambda: held["n"], functools.partial(operator.setitem, table, "n")


@holder
def descriptor(first):
    class Kept:
        def __init__(self):
            self.table = weakref.WeakKeyDictionary()

        def __get__(self, owner, kind):
            return self.table[owner]

        def __set__(self, owner, value):
            self.table[owner] = value

    class Owner:
        value = Kept()

    return attribute(Owner)(first)


@holder
def property_of_a_list(first):
    values = [first]

    class Owner:
        @property
        def value(self):
            return values[-1]

        @value.setter
        def value(self, new):
            values.append(new)

    return attribute(Owner)(first)


@holder
def dynamic_attribute(first):
    class Owner:
        def __init__(self):
            object.__setattr__(self, "table", {})

        def __getattr__(self, name):
            return self.table[name]

        def __setattr__(self, name, value):
            self.table[name] = value

    return attribute(Owner)(first)


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

    held = run()
    held.send(None)
    KEPT.append(held)

    def read():
        box = [None]
        held.send(box)
        return box[0]

    return read, lambda value: held.send([value])


@holder
def future(first):
    held = [asyncio.Future(loop=asyncio.new_event_loop())]
    KEPT.append(held[0].get_loop())
    held[0].set_result(first)

    def write(value):
        new = asyncio.Future(loop=held[0].get_loop())
        new.set_result(value)
        held[0] = new

    return lambda: held[0].result(), write


@holder
def referent_of_a_weak_reference(first):
    owner = Plain()
    owner.value = first
    KEPT.append(owner)
    held = weakref.ref(owner)

    def write(value):
        held().value = value

    return lambda: held().value, write


@holder
def weak_proxy(first):
    owner = Plain()
    owner.value = first
    KEPT.append(owner)
    held = weakref.proxy(owner)

    def write(value):
        held.value = value

    return lambda: held.value, write


@holder
def element_of_xml(first):
    held = ElementTree.Element("held")
    held.attrib["value"] = first
    return lambda: held.get("value"), functools.partial(held.set, "value")


@holder
def text_of_xml(first):
    held = ElementTree.Element("held")
    held.text = first

    def write(value):
        held.text = value

    return lambda: held.text, write


@holder
def module_table(first):
    sys.modules["a_module_that_holds"] = types.SimpleNamespace(value=first)

    def write(value):
        sys.modules["a_module_that_holds"].value = value

    return lambda: sys.modules["a_module_that_holds"].value, write


@holder
def referents(first):
    """Found by the collector, and by no name."""
    held = (Record(first),)

    def find():
        return next(each for each in gc.get_referents(held) if isinstance(each, Record))

    def write(value):
        find().value = value

    return lambda: find().value, write


@holder
def copied(first):
    held = Record(first)

    def write(value):
        new = copy.copy(held)
        new.value = value
        held.__dict__.update(vars(new))

    return lambda: held.value, write


@holder
def named_by_computing(first):
    held = Plain()
    setattr(held, "val" + "ue", first)
    return lambda: getattr(held, "v" + "alue"), lambda value: setattr(held, "valu" + "e", value)


@holder
def callback_of_a_finalizer(first):
    owner, table = Plain(), [first]
    KEPT.append(owner)
    held = weakref.finalize(owner, table.append, None)

    def read():
        return held.peek()[1].__self__[0]

    def write(value):
        held.peek()[1].__self__[0] = value

    return read, write


@holder
def registry_of_dispatch(first):
    @functools.singledispatch
    def held(value):
        return None

    held.register(int, lambda _: first)

    def write(value):
        held.register(int, lambda _: value)

    return lambda: held.dispatch(int)(0), write
