"""The compiling process: a request in, a listing and a library of kernels out. ``python -m`` this, with a folder.

It is a process of its own, so that Inductor's seconds of Python leave the training's interpreter alone, and nothing
that it does to torch stays. Products, convolutions and random numbers are left to torch; buffers are neither used
again nor written in place, so that kernels wait for each other only where data flows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.errors import CaptureError
from hocket.tracing.compiling.building import build
from hocket.tracing.compiling.functional import functional_graph
from hocket.tracing.compiling.listing import FORMAT
from hocket.tracing.compiling.wrapper import Recorded, WrittenKernel, kernels_of, recorded

__all__ = ["compiled_to", "main"]

_OPTIONS: dict[str, Any] = {
    "allow_buffer_reuse": False,
    "compile_threads": 1,
    "cpp_wrapper": False,
    "fallback_random": True,
    "fx_graph_cache": False,
    "graph_partition": False,
    "inplace_buffers": False,
    "layout_optimization": False,
    "max_autotune": False,
    "memory_planning": False,
    "reorder_for_peak_memory": False,
    "size_asserts": False,
}


def compiled_to(folder: Path, document: dict[str, Any]) -> None:
    """Compile a request; write ``listing.json`` and the library of its kernels.

    Raises:
        CaptureError: the step cannot be compiled; says why.
        Exception: whatever Inductor or the compiler raise.
    """
    listings: dict[str, Any] = {}
    kernels: list[dict[str, WrittenKernel]] = []
    for wide in (False, True):
        source, given = _written(document, wide)
        prefix = "wide_" if wide else ""
        kernels.append({prefix + name: kernel for name, kernel in kernels_of(source).items()})
        with FakeTensorMode():
            # The wrapper's tensors are of another mode than those of the graph.
            own = [torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for each in given]
            listings["wide" if wide else "own"] = _listed(recorded(source, own), prefix)
    library = build(folder, kernels, document["threads"])
    found = {"format": FORMAT, "torch": torch.__version__, "library": library, **listings}
    (folder / "listing.json").write_text(json.dumps(found))


def _written(document: dict[str, Any], wide: bool) -> tuple[str, list[torch.Tensor]]:
    """The wrapper that Inductor writes, and fake tensors for its arguments. Nothing is compiled yet."""
    from torch._inductor import compile_fx, config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    options = {**_OPTIONS, "cpp.threads": document["threads"]}
    sources: list[str] = []
    with config.patch({name: value for name, value in options.items() if _has(config, name)}):
        module, given = functional_graph(document, select_decomp_table(), wide=wide)
        _mark_outputs(module)
        unbuilt = _patched(AsyncCompile, "cpp_pybinding", lambda *_, **__: None)
        kept = _patched(GraphLowering, "save_output_code", staticmethod(sources.append))
        with unbuilt, kept, torch.no_grad():
            compile_fx.compile_fx_inner(module, given)
    if len(sources) != 1:
        raise CaptureError(f"Inductor wrote {len(sources)} wrappers")
    return sources[0], given


def _has(config: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(config, part):
            return False
        config = getattr(config, part)
    return True


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _mark_outputs(module: fx.GraphModule) -> None:
    """Have each output in the layout that it has in the graph."""
    from torch._inductor.compile_fx import record_original_output_strides

    output = module.graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    record_original_output_strides(module)


def _listed(notes: Recorded, prefix: str) -> dict[str, Any]:
    """The events as they are kept: allocations are left to the op that fills the buffer first, where it fills all."""
    roots = [notes.root(value) for value in range(len(notes.values))]
    first: dict[int, int] = {}
    for at, event in enumerate(notes.events):
        for value in event["given"]:
            first.setdefault(roots[value], at)
    allocated: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for at, event in enumerate(notes.events):
        if event.get("op") == "aten.empty_strided.default":
            buffer = event["outs"][0][1]
            if _fills(notes.events[first[buffer]] if buffer in first else {}, buffer, notes.values, roots):
                allocated[buffer] = event
                continue
        fresh = [value for value in event["given"] if value in allocated and first[value] == at]
        events.append(
            _with_allocations(event, fresh) | ({"kernel": prefix + event["kernel"]} if "kernel" in event else {})
        )
    layouts = [[list(v.shape), list(v.stride()), str(v.dtype).removeprefix("torch.")] for v in notes.values]
    return {"values": layouts, "roots": roots, "events": events, "outputs": notes.outputs}


def _fills(event: dict[str, Any], buffer: int, values: Sequence[torch.Tensor], roots: Sequence[int]) -> bool:
    """Whether this event, the first one to touch a buffer, makes all of it."""
    if [value for value in event.get("given", ()) if roots[value] == buffer] != [buffer]:
        return False
    if "kernel" in event:
        return buffer in event["written"]
    return event["op"].endswith(".out") and event["written"] == [buffer] and values[buffer].is_contiguous()


def _with_allocations(event: dict[str, Any], fresh: list[int]) -> dict[str, Any]:
    """The event, which makes these buffers itself."""
    if "kernel" in event:
        given = [value for value in dict.fromkeys(event["given"]) if value not in fresh]
        places = {value: n for n, value in enumerate(given)} | {value: -1 - n for n, value in enumerate(fresh)}
        written = [value for value in event["written"] if value not in fresh]
        outs = [[n, value] for n, value in enumerate(fresh)]
        order = [places[value] for value in event["given"]]
        return {"kernel": event["kernel"], "given": given, "order": order, "written": written, "outs": outs}
    if not fresh:
        return event
    kwargs = {key: text for key, text in event["kwargs"].items() if key != "out"}
    given = [value for value in event["given"] if value not in fresh]
    op = event["op"].removesuffix("out") + "default"
    return {"op": op, "args": event["args"], "kwargs": kwargs, "outs": [[-1, fresh[0]]], "given": given, "written": []}


def _end_with(parent: int) -> None:
    """End this process and its compilers when the training that asked for it has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Compile the ``request.json`` of a folder into it; what fails is one line in its file ``failure``."""
    (folder,) = map(Path, arguments)
    os.nice(19)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        compiled_to(folder, json.loads((folder / "request.json").read_text()))
    except Exception as error:  # noqa: BLE001  # whatever it is, the step keeps its plain form
        first = (str(error).strip().splitlines() or [""])[0]
        (folder / "failure").write_text(f"{type(error).__name__}: {first}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
