from __future__ import annotations

import subprocess
import sys


def test_importing_the_package_loads_neither_rich_nor_torch() -> None:
    code = "import sys, hocket.reporting; print([m for m in ('rich', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
