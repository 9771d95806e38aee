"""cuBLAS reads when it is first called whether its results have to be the same in each run."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
