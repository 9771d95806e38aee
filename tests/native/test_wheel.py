"""A wheel of `make wheels` needs no compiler and no cache: native lanes and the partition search come with it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from hocket.cache_folder import seal
from hocket.native import build
from hocket.planning.partition import compiled

ROOT = Path(__file__).parents[2]

NATIVE = """
import sys, time
begun = time.perf_counter()
import hocket
assert "torch" not in sys.modules, "the package imports torch"
import torch
assert "site-packages" in hocket.__file__, hocket.__file__
from hocket.native import available
from hocket.planning.partition.compiled import why_not
assert available(), available().why
assert not why_not(), why_not()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(batch):
    optimizer.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss

fast = hocket.schedule(step, model, optimizer)
for _ in range(250):
    fast(torch.randn(4, 8))
print(fast.verdict, "because", fast.why)
"""


@pytest.mark.slow
def test_a_wheel_needs_no_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist", "results", "tests"))
    makes = "import hocket.native.build as a, hocket.planning.partition.compiled as b; a.prebuild(); b.prebuild()"
    inside = {**os.environ, "PYTHONPATH": str(source / "src")}
    subprocess.run([sys.executable, "-c", makes], cwd=source, env=inside, check=True)
    options = ["--no-deps", "--no-build-isolation", "--config-settings=--build-option=--plat-name=linux_x86_64"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", "dist", "."], cwd=source, check=True)
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    (wheel,) = (source / "dist").glob("*.whl")
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (installed,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (installed / "zz_torch.pth").write_text(sysconfig.get_path("purelib"))  # torch and the like, behind the wheel
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [python, "-c", NATIVE],
        cwd=home,
        env={"PATH": str(python.parent), "HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(("planned because", "eager because"))
    assert not list(home.rglob("*.so"))


def test_a_core_of_the_package_comes_before_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both cores are looked for in the package, and one whose checksum is wrong is not loaded."""
    monkeypatch.setattr(compiled, "PREBUILT", tmp_path)
    shared = compiled.library()._name  # compiled once for all tests
    monkeypatch.setattr(compiled, "_cached", lambda: pytest.fail("the cache was asked"))
    monkeypatch.setattr(compiled, "_build", lambda built: (shutil.copyfile(shared, built), seal(built)))
    compiled.prebuild()
    assert compiled.library.__wrapped__().hocket_search
    (library,) = tmp_path.glob("*.so")
    damaged = library.read_bytes() + b"x"
    library.unlink()  # this process has the file mapped, and would run what is written into it
    library.write_bytes(damaged)
    with pytest.raises(pytest.fail.Exception):
        compiled.library.__wrapped__()
    assert build.PREBUILT.parent == Path(build.__file__).parent
