"""What is built from the tree: every package once, whatever the links in src/teraio say."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules_in_tree() -> set[str]:
    """Paths that a wheel must hold, e.g. ``teraio/planner/verifier.py``."""
    folders = SETTINGS["tool"]["setuptools"]["package-dir"]
    found = set()
    for package in SETTINGS["tool"]["setuptools"]["packages"]:
        parts = package.split(".")
        mapped = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in folders)
        folder = ROOT.joinpath(folders[".".join(parts[:mapped])], *parts[mapped:])
        found |= {"/".join([*parts, file.name]) for file in folder.glob("*.py")}
    return found


def test_the_version_is_a_literal() -> None:
    """So that it is known without an installation, and read without an import."""
    tree = ast.parse((ROOT / "src" / "teraio" / "__init__.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    ]
    assert len(values) == 1
    assert isinstance(values[0], ast.Constant)
    assert SETTINGS["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "teraio.__version__"}


def test_types_are_announced() -> None:
    assert (ROOT / "src" / "teraio" / "py.typed").is_file()
    assert "py.typed" in SETTINGS["tool"]["setuptools"]["package-data"]["teraio"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built, without network, from a copy of the tracked layout."""
    pytest.importorskip("setuptools", reason="building a wheel needs setuptools")
    source = tmp_path_factory.mktemp("source")
    output = tmp_path_factory.mktemp("wheel")
    for name in ("src", "cli", "executor", "planner", "profiler", "simulator", "traces"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, source / name)
        else:
            (source / name).write_text("")
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    environment = {**os.environ, "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", build, str(output)],
        cwd=source,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return zipfile.ZipFile(next(output.glob("*.whl")))


def test_the_wheel_holds_every_module_once(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert len(names) == len(set(names))
    assert {name for name in names if name.endswith(".py")} == modules_in_tree()


def test_the_wheel_exposes_teraio_alone(wheel: zipfile.ZipFile) -> None:
    version = next(n for n in wheel.namelist() if n.endswith("/METADATA")).split("/")[0]
    assert {name.split("/")[0] for name in wheel.namelist()} == {"teraio", version}
    assert "teraio/py.typed" in wheel.namelist()


def test_the_wheel_works_without_the_tree(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    code = (
        "import teraio; print(teraio.__file__, teraio.Hardware.preset('paper').name);"
        "import importlib.util as u; print([u.find_spec(n) for n in ('planner', 'traces')])"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, 'installed'); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "installed" in done.stdout
    assert "paper" in done.stdout


def test_the_entry_point_is_the_command_line(wheel: zipfile.ZipFile) -> None:
    entry = next(n for n in wheel.namelist() if n.endswith("/entry_points.txt"))
    assert "teraio = teraio.cli:main" in wheel.read(entry).decode()
