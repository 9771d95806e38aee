"""Units: ops that assistants move as one, because separately they would transfer more than moving them saves.

Units follow the paths of modules. The forward, the backward and the update of a layer read and write its parameters,
which are sent once if all of them move, and in each step if some stay. And the tensors between the layers of a block
would cross twice if one layer moved alone. Three rules, in this order:

    ops that have to share a device     one unit
    ops of one module                   one unit: the outermost module that is not large, or the layer itself, unless
                                        the first rule joined some of them with other layers
    a unit of next to no time           goes with the unit with which it exchanges most, until that has enough of them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from hocket.ir import DisjointSets, Graph

# Parts of the whole time: a unit below the first follows a neighbour, which takes no more of them than the second; and
# no module above the second is one unit, unless it is a layer.
CHEAP = 0.01
LARGE = 0.05


def units_of(
    graph: Graph, takes_us: Mapping[str, float], together: Iterable[Sequence[str]] = ()
) -> tuple[tuple[str, ...], ...]:
    """Divide the ops of a step into units.

    `together` are groups of ops that have to share a device.
    """
    sets = DisjointSets(graph.by_name)
    for names in together:
        for name in names[1:]:
            sets.join(names[0], name)
    layers: dict[str, set[str]] = {}
    for op in graph.ops:
        layers.setdefault(sets.first_of(op.name), set()).add(op.layer)
    of_one_layer = [op for op in graph.ops if op.layer and layers[sets.first_of(op.name)] == {op.layer}]
    modules = _modules([(op.layer, takes_us[op.name]) for op in of_one_layer], sum(takes_us.values()))
    begins: dict[str, str] = {}
    for op in of_one_layer:
        sets.join(begins.setdefault(modules[op.layer], op.name), op.name)
    _join_cheap(graph, takes_us, sets)
    return tuple(map(tuple, sets.groups()))


def _modules(ops: Sequence[tuple[str, float]], whole_us: float) -> dict[str, str]:
    """Map each layer to the outermost module around it that is not large, or to itself.

    `ops` has the layer and the duration of each op.
    """
    module_us: dict[str, float] = {}
    around: dict[str, list[str]] = {}
    for layer, op_us in ops:
        names = layer.split(".")
        around[layer] = [".".join(names[: depth + 1]) for depth in range(len(names))]
        for module in around[layer]:
            module_us[module] = module_us.get(module, 0.0) + op_us
    return {
        layer: next((module for module in modules if module_us[module] <= LARGE * whole_us), layer)
        for layer, modules in around.items()
    }


def _join_cheap(graph: Graph, takes_us: Mapping[str, float], sets: DisjointSets[str]) -> None:
    whole_us = sum(takes_us[name] for name in graph.by_name)
    unit_us = dict.fromkeys((sets.first_of(name) for name in graph.by_name), 0.0)
    joined_us = dict.fromkeys(unit_us, 0.0)
    exchanged: dict[str, dict[str, float]] = {unit: {} for unit in unit_us}
    for name in graph.by_name:
        unit_us[sets.first_of(name)] += takes_us[name]
    for edge in graph.edges:
        one, other = sets.first_of(edge.src), sets.first_of(edge.dst)
        if one != other and edge.size_bytes:
            for near, far in ((one, other), (other, one)):
                exchanged[near][far] = exchanged[near].get(far, 0.0) + edge.size_bytes
    for unit, neighbours in exchanged.items():
        near = sets.first_of(unit)
        bytes_to: dict[str, float] = {}
        for other, size_bytes in neighbours.items():
            far = sets.first_of(other)
            if far != near and joined_us[far] + unit_us[near] <= LARGE * whole_us:
                bytes_to[far] = bytes_to.get(far, 0.0) + size_bytes
        if bytes_to and unit_us[near] < CHEAP * whole_us:
            far = max(bytes_to, key=bytes_to.__getitem__)
            sets.join(far, near)
            joined_us[far] += unit_us[near]
            unit_us[far] += unit_us[near]
