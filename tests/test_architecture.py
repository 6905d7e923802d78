"""The shape of the code: who imports whom, what a plain import loads, what every file keeps to."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("cli", "executor", "planner", "profiler", "simulator", "traces")
FOLDERS = {name: ROOT / name for name in MAPPED} | {
    "contracts": ROOT / "src" / "teraio" / "contracts"
}
GROUND = {"units": ROOT / "src/teraio/units.py", "errors": ROOT / "src/teraio/errors.py"}

ALLOWED = {
    "cli": {"planner", "executor", "simulator", "profiler", "traces", "contracts"},
    "planner": {"simulator", "traces", "contracts"},
    "executor": {"simulator", "profiler", "traces", "contracts"},
    "simulator": {"traces", "contracts"},
    "profiler": {"traces", "contracts"},
    "traces": {"contracts"},
    "contracts": set(),
    "units": set(),
    "errors": set(),
}
"""Who may import whom, besides itself. ``units`` and ``errors`` are open to all."""

LATE = ("torch", "kvikio", "matplotlib", "ortools", "cupy")
"""Heavy or optional: imported inside the functions that need them, on the way to a plan."""

PLANNING_PATH = ("planner", "simulator", "traces", "contracts", "units", "errors")

MAX_LINES = 400
MAX_FUNCTION_LINES = 60


def sources() -> Iterator[tuple[str, Path]]:
    for part, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            yield part, file
    yield from GROUND.items()


SOURCES = list(sources())
VERIFIER = [ROOT / "planner" / "verifier.py", FOLDERS["contracts"] / "violations.py"]
VERIFIER += sorted(FOLDERS["contracts"].glob("plan_*.py"))


def name_in_repository(value: object) -> str | None:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


every_file = pytest.mark.parametrize("file", [file for _, file in SOURCES], ids=name_in_repository)


def imports_of(tree: ast.AST, *, top_level: bool) -> Iterator[str]:
    """Modules imported; with ``top_level`` only those that a plain import of the file loads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from imported_from(node)
        elif top_level and (is_function(node) or is_for_type_checkers(node)):
            continue
        else:
            yield from imports_of(node, top_level=top_level)


def imported_from(node: ast.ImportFrom) -> Iterator[str]:
    assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
    assert node.module is not None
    if node.module == "teraio":
        yield from (f"teraio.{alias.name}" for alias in node.names)
    else:
        yield node.module


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


@pytest.mark.parametrize(("part", "file"), SOURCES, ids=name_in_repository)
def test_imports_run_one_way(part: str, file: Path) -> None:
    allowed = ALLOWED[part] | {part, "units", "errors"}
    for module in imports_of(parse(file), top_level=False):
        names = module.split(".")
        assert names[0] not in MAPPED, f"{module}: the package is teraio.{names[0]}"
        if names[0] == "teraio" and len(names) > 1 and names[1] in ALLOWED:
            assert names[1] in allowed, f"{part} must not import {module}"


@pytest.mark.parametrize("part", ["profiler", "executor"])
def test_the_planner_is_not_needed_for_profiling_or_running(part: str) -> None:
    assert "planner" not in ALLOWED[part]


@pytest.mark.parametrize(
    "file", [file for part, file in SOURCES if part in PLANNING_PATH], ids=name_in_repository
)
def test_the_planning_path_imports_nothing_heavy_at_the_top(file: Path) -> None:
    top = {module.split(".")[0] for module in imports_of(parse(file), top_level=True)}
    assert not top & set(LATE)


@pytest.mark.parametrize("file", VERIFIER, ids=name_in_repository)
def test_the_verifier_shares_no_code_with_planners_or_simulator(file: Path) -> None:
    imported = set(imports_of(parse(file), top_level=False))
    shared = {m for m in imported if m.startswith(("teraio.planner", "teraio.simulator"))}
    assert not shared
    assert "teraio.traces.lifetimes" not in imported, "lifetimes are worked out anew"


@every_file
def test_files_are_short(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= MAX_LINES


def public_functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods of public classes, by qualified name; special methods left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node, f"{prefix}{node.name}.")


@cache
def documented_methods() -> set[str]:
    """Names of methods that some class documents: an override need not say it again."""
    return {
        method.name
        for _, file in SOURCES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


def needs_no_docstring(name: str, node: ast.FunctionDef) -> bool:
    """Overrides, and members of a protocol, whose body is an ellipsis."""
    is_override = "." in name and node.name in documented_methods()
    return is_override or ast.unparse(node.body[0]) == "..."


@every_file
def test_public_functions_say_what_they_do_and_with_which_types(file: Path) -> None:
    tree = parse(file)
    assert ast.get_docstring(tree), "the module has no docstring"
    for name, node in public_functions(tree):
        has_text = ast.get_docstring(node) or needs_no_docstring(name, node)
        assert has_text, f"{name} has no docstring"
        assert node.returns is not None, f"{name} has no return type"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        arguments += [a for a in (node.args.vararg, node.args.kwarg) if a is not None]
        untyped = {a.arg for a in arguments if a.annotation is None}
        assert untyped <= {"self", "cls"}, f"{name}: {untyped} have no type"


@every_file
def test_public_classes_say_what_they_are(file: Path) -> None:
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@every_file
def test_functions_fit_on_a_screen(file: Path) -> None:
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.FunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@every_file
def test_nothing_is_left_to_do(file: Path) -> None:
    text = file.read_text()
    for mark in ("TODO", "FIXME", "XXX", "raise NotImplementedError", "breakpoint("):
        assert mark not in text


def public_names_of(package: Path) -> set[str]:
    """What a package offers: names in ``__all__`` and in the table of lazy names."""
    names: set[str] = set()
    for node in parse(package / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= set(ast.literal_eval(node.value))
    return names


PACKAGES = sorted({file.parent for _, file in SOURCES if file.name == "__init__.py"})


@pytest.mark.parametrize(
    "package",
    [ROOT / "src" / "teraio", *PACKAGES],
    ids=name_in_repository,
)
def test_no_module_bears_the_name_of_a_public_name(package: Path) -> None:
    """Importing ``teraio.planner.compare`` would replace the function of that name."""
    modules = {file.stem for file in package.glob("*.py")} | {
        folder.name for folder in package.iterdir() if (folder / "__init__.py").is_file()
    }
    assert not modules & public_names_of(package)


@pytest.mark.parametrize("name", MAPPED)
def test_links_for_tools_lead_to_the_folders(name: str) -> None:
    link = ROOT / "src" / "teraio" / name
    assert link.is_symlink()
    assert not Path(os.readlink(link)).is_absolute()
    assert link.resolve() == ROOT / name


def test_packages_are_listed_as_they_stand_in_the_tree() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    in_tree = {"teraio"}
    for name, folder in FOLDERS.items():
        for init in folder.rglob("__init__.py"):
            path = init.parent.relative_to(folder)
            in_tree.add(".".join(["teraio", name, *path.parts]))
    assert set(settings["packages"]) == in_tree
    assert settings["packages"] == sorted(settings["packages"])
    mapping = {"teraio": "src/teraio"} | {f"teraio.{name}": name for name in MAPPED}
    assert settings["package-dir"] == mapping


@pytest.mark.parametrize("part", [*MAPPED, "contracts"])
def test_every_folder_with_code_is_a_package(part: str) -> None:
    folders = {file.parent for file in FOLDERS[part].rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


HEAVY = ("torch", "ortools", "matplotlib", "pandas", "numba", "kvikio", "scipy", "pyarrow")


def loaded_after(statement: str) -> tuple[set[str], float]:
    """Heavy modules in a fresh interpreter after ``statement``, and what it took of a core."""
    code = (
        "import sys, time; start = time.process_time()\n"
        f"{statement}\n"
        "print(time.process_time() - start, *sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    seconds, *modules = done.stdout.split()
    return {m for m in modules if m in HEAVY}, float(seconds)


def test_import_teraio_is_quick_and_light() -> None:
    runs = [loaded_after("import teraio") for _ in range(3)]
    assert all(loaded == set() for loaded, _ in runs)
    assert min(seconds for _, seconds in runs) < 0.5


@pytest.mark.parametrize(
    "statement",
    [
        "import teraio; teraio.Trace, teraio.Hardware, teraio.Plan, teraio.Timeline",
        "import teraio; teraio.verify",
        "from teraio.cli import main",
    ],
)
def test_contracts_verifier_and_command_line_load_nothing_heavy(statement: str) -> None:
    loaded, _ = loaded_after(statement)
    assert loaded == set()


@pytest.mark.parametrize("name", ["import_trace", "show", "plan", "verify", "simulate", "compare"])
def test_commands_on_the_way_to_a_plan_load_nothing_heavy(name: str) -> None:
    loaded, _ = loaded_after(f"import teraio.cli.{name}")
    assert loaded == set()


@pytest.mark.parametrize("name", ["plan", "simulate", "compare"])
def test_planning_and_simulating_load_no_torch(name: str) -> None:
    loaded, _ = loaded_after(f"import teraio; teraio.{name}")
    assert not loaded & {"torch", "kvikio", "matplotlib", "ortools"}


def test_every_public_name_of_teraio_exists() -> None:
    loaded_after("import teraio; [getattr(teraio, name) for name in teraio.__all__]")
