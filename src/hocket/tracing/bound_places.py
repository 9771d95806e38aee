"""Places of models and optimizers as the native core reads them, without Python's attribute look-ups between."""

from __future__ import annotations

from typing import Any

from hocket.tracing.sources import Entry, Gradient, GroupOf, StateOf, ValueOf


class BoundPlaces:
    """Adds places to a native table (see ``native/objects.h``), each container once."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._objects: dict[int, int] = {}
        self._items: dict[tuple[int, Any], int] = {}

    def add(self, entry: Entry | Gradient) -> int:
        """The number of an entry's place. One that the native core cannot read is a `TypeError` or a `LookupError`."""
        if not isinstance(entry, Entry):
            raise TypeError(f"{entry.name} is an attribute of a tensor")
        number = self._found(entry.table, entry.key)
        for part in entry.path:
            number = self.item(number, part)
        if self._table.at(number) is not entry.get():
            raise TypeError(f"{entry.name} is not where the native core reads it")
        return number

    def object(self, value: Any) -> int:
        """The number of an object that stays."""
        if id(value) not in self._objects:
            self._objects[id(value)] = self._table.add_object(value)
        return self._objects[id(value)]

    def item(self, parent: int, key: Any) -> int:
        """The number of what stands under `key` in the container at place `parent`."""
        known = (parent, key if isinstance(key, (str, int)) else id(key))
        if known not in self._items:
            self._items[known] = self._table.add_item(parent, key)
        return self._items[known]

    def _found(self, table: Any, key: Any) -> int:
        if type(table) is StateOf:
            states = self.item(self.object(vars(table.optimizer)), "state")
            return self.item(self.item(states, table.parameter), key)
        if type(table) is GroupOf:
            groups = self.item(self.object(vars(table.optimizer)), "param_groups")
            return self.item(self.item(groups, table.position), key)
        if type(table) is ValueOf:
            if table.place.kind == "cell":
                return int(self._table.add_cell(table.place.owner))
            if table.place.kind not in ("dict", "list"):
                raise TypeError(f"a place of kind {table.place.kind}")
            return self.item(self.object(table.place.owner), key)
        return self.item(self.object(table), key)
