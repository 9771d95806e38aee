"""cuBLAS reads when it is first called whether its results have to be the same in each run."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
