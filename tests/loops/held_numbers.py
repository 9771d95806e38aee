"""Numbers that a forward reads in objects: kinds of objects, and the places that hold them."""

from __future__ import annotations

from dataclasses import dataclass

from loops.looks import Piece


@dataclass(frozen=True)
class Holder:
    """An object that holds a number `x`: how it is made, read and, unless it is immutable, changed in place."""

    name: str
    made: str
    read: str
    mutate: str = ""
    top: str = ""
    copied: bool = True


def _nested(depth: int) -> Holder:
    keys = "['a']" * depth
    made = "{'a': " * depth + "{x}" + "}" * depth
    return Holder(f"dict {depth} deep", made, "{c}" + keys, "{c}" + keys + " = {new}")


def _class(*members: str) -> str:
    """A class of one attribute, with more members."""
    init = "def __init__(self, x):\n    self.x = x"
    return "class T{k}:\n" + "\n".join("    " + line for each in (init, *members) for line in each.splitlines())


HOLDERS = (
    Holder("number", "{x}", "{c}"),
    Holder("text", "str({x})", "float({c})"),
    Holder("flag", "{x} > 1.2", "(0.5 + {c})"),
    Holder("namespace", "types.SimpleNamespace(x={x})", "{c}.x", "{c}.x = {new}"),
    Holder("dataclass", "T{k}({x})", "{c}.x", "{c}.x = {new}", "@dataclasses.dataclass\nclass T{k}:\n    x: float"),
    Holder("frozen dataclass", "T{k}({x})", "{c}.x", "",
        "@dataclasses.dataclass(frozen=True)\nclass T{k}:\n    x: float"),
    Holder("slots", "T{k}({x})", "{c}.x", "{c}.x = {new}", _class("__slots__ = ('x',)")),
    Holder("namedtuple", "T{k}({x}, 1)", "{c}.x", "", "T{k} = collections.namedtuple('T{k}', 'x y')"),
    Holder("enum", "T{k}({x} > 1.2)", "(0.5 + {c}.value)", "",
        "class T{k}(enum.Enum):\n    LOW = False\n    HIGH = True"),
    Holder("intenum", "T{k}({x} > 1.2)", "(0.5 + {c})", "", "class T{k}(enum.IntEnum):\n    LOW = 0\n    HIGH = 1"),
    Holder("tuple", "(1, ({x},))", "{c}[1][0]"),
    Holder("growing list", "[{x}]", "(sum({c}) / len({c}))", "{c}.append({new})"),
    Holder("list item", "[0, {x}]", "{c}[1]", "{c}[1] = {new}"),
    Holder("set", "{1, {x}}", "sum({c}) / 2", "{c}.add({new})"),
    Holder("set membership", "{'a', {x}}", "(0.5 + (1.5 in {c}))", "({c}.discard if n % 2 else {c}.add)(1.5)"),
    Holder("frozenset", "frozenset([{x}])", "max({c})"),
    *(_nested(depth) for depth in range(1, 7)),
    Holder("dict key", "{'a': 1.0}", "(0.5 + ('b' in {c}))", "{c}['b'] = {new}"),
    Holder("array of numpy", "np.array([{x}])", "float({c}[0])", "{c}[0] = {new}"),
    Holder("array in a list", "[np.array([{x}, 1.0])]", "float({c}[0][0])", "{c}[0] *= 0.8"),
    Holder("scalar of numpy", "np.float64({x})", "float({c})"),
    Holder("tensor", "torch.tensor([{x}])", "{c}", "{c}.fill_({new})"),
    Holder("tensor in a dict", "{'t': torch.tensor([{x}])}", "{c}['t']", "{c}['t'] = torch.tensor([{new}])"),
    Holder("item of tensor", "torch.tensor([{x}])", "{c}.item()", "{c}.data = torch.tensor([{new}])"),
    Holder("function", "T{k}({x})", "{c}()", "{c}.x = {new}",
        "def T{k}(x):\n    def f():\n        return f.x\n    f.x = x\n    return f"),
    Holder("lambda", "(lambda v: lambda: v)({x})", "{c}()"),
    Holder("defaults", "T{k}({x})", "{c}()", "{c}.__defaults__ = ({new},)",
        "def T{k}(x):\n    def f(v=x):\n        return v\n    return f"),
    Holder("keyword defaults", "T{k}({x})", "{c}()", "{c}.__kwdefaults__['v'] = {new}",
        "def T{k}(x):\n    def f(*, v=x):\n        return v\n    return f"),
    Holder("cell", "T{k}({x})", "{c}()", "{c}.put({new})",
        "def T{k}(x):\n    def f():\n        return x\n    def put(v):\n        nonlocal x\n        x = v\n"
        "    f.put = put\n    return f", copied=False),
    Holder("code", "T{k}({x})", "{c}()", "{c}.__code__ = (lambda: 0.75).__code__",
        "def T{k}(x):\n    def f():\n        return 1.5\n    return f", copied=False),
    Holder("partial", "functools.partial(operator.mul, {x})", "{c}(1.0)"),
    Holder("keywords of a partial", "functools.partial(dict, x={x})", "{c}()['x']", "{c}.keywords['x'] = {new}"),
    Holder("property", "T{k}({x})", "{c}.y", "{c}.x = {new}",
        _class("y = property(lambda self: self.x)")),
    Holder("getattr", "T{k}({x})", "{c}.y", "{c}.x = {new}",
        _class("def __getattr__(self, name):\n    if name != 'y':\n        raise AttributeError(name)\n"
               "    return self.x")),
    Holder("getitem", "T{k}({x})", "{c}[0]", "{c}.x = {new}",
        _class("def __getitem__(self, key):\n    return self.x")),
    Holder("callable", "T{k}({x})", "{c}(0.5)", "{c}.x = {new}",
        _class("def __call__(self, v):\n    return v + self.x")),
    Holder("bound method", "T{k}({x}).get", "{c}()", "{c}.__self__.x = {new}",
        _class("def get(self):\n    return self.x")),
    Holder("descriptor", "T{k}({x})", "{c}.y", "{c}.x = {new}",
        "class D{k}:\n    def __get__(self, owner, kind):\n        return owner.x\n" +
        _class("y = D{k}()")),
    Holder("cached property", "T{k}({x})", "{c}.y", "vars({c}).pop('y', None)\n{c}.x = {new}",
        _class("@functools.cached_property\ndef y(self):\n    return self.x")),
    Holder("attribute of its class", "type('T{k}', (), {'x': {x}})()", "{c}.x", "type({c}).x = {new}", copied=False),
    Holder("deque", "collections.deque([{x}], maxlen=2)", "max({c})", "{c}.append({new})"),
    Holder("counter", "collections.Counter(a={x})", "{c}['a']", "{c}['a'] = {new}"),
    Holder("default dict", "collections.defaultdict(float, a={x})", "{c}['a']", "{c}['a'] = {new}"),
    Holder("chain map", "collections.ChainMap({}, {'a': {x}})", "{c}['a']", "{c}.maps[1]['a'] = {new}"),
    Holder("user dict", "collections.UserDict(a={x})", "{c}['a']", "{c}['a'] = {new}"),
    Holder("machine array", "array.array('d', [{x}])", "{c}[0]", "{c}[0] = {new}"),
    Holder("bytearray", "bytearray([int(2 * {x})])", "{c}[0] / 2", "{c}[0] = int(2 * {new})"),
    Holder("fraction", "fractions.Fraction({x})", "float({c})"),
    Holder("decimal", "decimal.Decimal({x})", "float({c})"),
    Holder("duration", "datetime.timedelta(seconds={x})", "{c}.total_seconds()"),
    Holder("range", "range(int(2 * {x}))", "len({c}) / 2"),
    Holder("order of a dict", "dict.fromkeys(['a', 'b'], {x})", "(0.5 + (list({c})[0] == 'b'))",
        "{c}['a'] = {c}.pop('a')"),
    Holder("mixed", "[types.SimpleNamespace(x={'a': ({x}, [{x}])})]", "{c}[0].x['a'][1][0]",
        "{c}[0].x['a'][1][0] = {new}"),
    Holder("context variable", "contextvars.ContextVar('v', default={x})", "{c}.get()", "{c}.set({new})", copied=False),
    Holder("module", "types.ModuleType('settings')", "getattr({c}, 'x', 1.5)", "{c}.x = {new}", copied=False),
)  # fmt: skip

# Where the object is: place, lines at the top level, lines of __init__, the change (a mutation unless it makes anew).
PLACEMENTS: dict[str, tuple[str, str, str, str, str]] = {
    "attribute, mutated": ("self.c{k}", "", "self.c{k} = {made}", "for m in models:\n    {mutate}", "m.c{k}"),
    "attribute, replaced": ("self.c{k}", "", "self.c{k} = {made}", "for m in models:\n    m.c{k} = {anew}", ""),
    "attribute, of a layer": ("self.a.c{k}", "", "self.a.c{k} = {made}", "for m in models:\n    m.a.c{k} = {anew}", ""),
    "shared": (
        "self.c{k}",
        "",
        "self.c{k} = vars(held)['c{k}'] = vars(held).get('c{k}', {made})",
        "{mutate}",
        "held.c{k}",
    ),
    "global": ("C{k}", "C{k} = {made}", "", "{mutate}", "C{k}"),
    "global, rebound": ("C{k}", "C{k} = {made}", "", "global C{k}\nC{k} = {anew}", ""),
    "class": ("Model.c{k}", "", "Model.c{k} = {made} if i == 0 else Model.c{k}", "Model.c{k} = {anew}", ""),
}


def held_number(holder: Holder, placement: str) -> Piece | None:
    """A number that a forward reads, in an object at a place; None where it cannot be there, or cannot change."""
    read, top, init, change, target = PLACEMENTS[placement]
    uncopied = not holder.copied and "self" in read
    if uncopied or ("{mutate}" in change and not holder.mutate) or ("{anew}" in change and "{x}" not in holder.made):
        return None
    first = "1.5 + 0.25 * i" if "self" in read and placement != "shared" else "1.5"
    mutate = holder.mutate.replace("{c}", target).replace("\n", "\n    " if "for" in change else "\n")
    made, anew = (holder.made.replace("{x}", f"({value})") for value in (first, "{new}"))
    change = change.replace("{mutate}", mutate).replace("{anew}", anew)
    top = "\n".join(filter(None, (holder.top, top.replace("{made}", made))))
    name = f"{holder.name}, {placement}"
    group = placement.split(",")[0].replace("global", "outside").replace("class", "outside")
    return Piece(
        name,
        group,
        number=holder.read.replace("{c}", read),
        top=top,
        init=init.replace("{made}", made),
        change=change,
    )
