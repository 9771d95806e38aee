"""`torch.compile(model, backend="hocket")`: the graphs that Dynamo and AOTAutograd give are planned as regions.

Installed, the backend is found by its name (an entry point of ``torch_dynamo_backends``). Importing this package
names it too, for a checkout that was not installed anew; torch loads it when it is first asked for.
"""

from importlib.metadata import EntryPoint

from torch._dynamo.backends.registry import _BACKENDS

from hocket.dynamo.backend import hocket
from hocket.dynamo.region import Region, regions

__all__ = ["Region", "hocket", "regions"]

_BACKENDS.setdefault("hocket", EntryPoint("hocket", "hocket.dynamo.backend:hocket", "torch_dynamo_backends"))
