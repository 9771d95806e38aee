"""A page in Chromium, which runs without a window and prints the page after its scripts.

A probe at the end of the page writes what it sees into an element. For axe-core, ``AXE_CORE`` names its
``axe.min.js``.
"""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
AXE = Path(os.environ.get("AXE_CORE", Path(__file__).parents[2] / "node_modules/axe-core/axe.min.js"))

needs_axe = pytest.mark.skipif(
    not AXE.exists(), reason="needs axe-core: npm install axe-core, or AXE_CORE=.../axe.min.js"
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs chromium")

# Without a window no frames are drawn.
FRAMES = "<script>window.requestAnimationFrame = (draw) => setTimeout(() => draw(performance.now()), 1);</script>"

CHECK = """axe.run(document, { resultTypes: ["violations"] }).then((found) => found.violations.map(
  (each) => `${each.id}: ${each.help}: ${each.nodes.map((node) => node.target.join(" ")).join(", ")}`))"""


def visit(html: str, folder: Path, probe: str, *, width: int, dark: bool = False, before: str = "") -> tuple[Any, str]:
    """Return what the probe found on the page, and the errors of the console."""
    script = (
        f"{before}<script>Promise.resolve().then(() => {probe}).catch((error) => [String(error)])"
        ".then((found) => parent.postMessage(JSON.stringify(found), '*'));</script>"
    )
    (folder / "page.html").write_text(
        html.replace("<head>", f"<head>{FRAMES}").replace("</body>", f"{script}</body>"), encoding="utf-8"
    )
    # A window is at least 500 pixels wide, a frame in it is not.
    outer = folder / "outer.html"
    outer.write_text(
        "<!doctype html><script>addEventListener('message', ({ data }) => {"
        " document.getElementById('found').textContent = data; });</script><pre id='found'></pre>"
        f"<iframe src='page.html' style='width: {width}px; height: 3000px; border: 0'></iframe>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"),
            *("--enable-logging=stderr", "--virtual-time-budget=8000", "--window-size=1400,3100", "--dump-dom"),
            *(f"--blink-settings=preferredColorScheme={0 if dark else 1}", outer.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr
    return json.loads(unescape(found[1])), "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def axe_finds(html: str, folder: Path, *, width: int, dark: bool) -> tuple[Any, str]:
    """Return the violations that axe-core sees, and the errors of the console."""
    html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    return visit(html, folder, CHECK, width=width, dark=dark, before=f'<script src="{AXE.as_uri()}"></script>')
