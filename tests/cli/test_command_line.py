"""What all commands share: help, errors, exit codes, JSON, outputs, starting fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from teraio.cli.command import Command, Reporter, ScriptCommand, command
from teraio.cli.group import COMMANDS, main
from teraio.cli.result import Result as CommandResult
from teraio.cli.result import json_text
from teraio.errors import InfeasibleError, OffloadWarning

SOURCE = Path(__file__).resolve().parents[2] / "src"


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def _echo_command(
    action: Callable[[], None] = lambda: None, *, exit_code: int = 0
) -> click.Command:
    @command("echo", example="teraio echo")
    def echo(reporter: Reporter) -> CommandResult:
        action()
        return CommandResult({"a": 1}, lambda console: console.print("for people"), exit_code)

    return echo


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_every_command_shows_an_example_and_the_shared_options(
    name: str, teraio: Callable[..., Result]
) -> None:
    result = teraio(name, "--help")
    assert result.exit_code == 0
    assert f"Example:\n  teraio {name} " in result.output
    assert "--json" in result.output
    assert "-q, --quiet" in result.output


@pytest.mark.parametrize("name", list(COMMANDS))
def test_example_in_the_help_is_accepted_by_the_parser(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every example line parses: its options exist and its values can be read."""
    monkeypatch.chdir(tmp_path)
    found = main.get_command(click.Context(main), name)
    assert isinstance(found, Command)
    for line in found.example.splitlines():
        all_words = line.split()
        _, shown_name, *words = all_words[all_words.index("teraio") :]
        for index, word in enumerate(words):
            if word == "--directory":
                words[index + 1] = str(tmp_path)
        shown = main.get_command(click.Context(main), shown_name)
        assert shown is not None
        shown.make_context(shown_name, words)


def test_group_lists_every_command_without_importing_any() -> None:
    """``teraio --help`` must not pay for numpy, let alone torch or numba."""
    script = (
        "import sys; from teraio.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pandas', 'torch', 'numba', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = _python("-c", script)
    assert result.returncode == 0, result.stderr
    assert all(f"  {name} " in result.stdout for name in COMMANDS)


def test_help_starts_fast() -> None:
    """Under 0.4 s of a core, best of three, process start included."""
    seconds = []
    for _ in range(3):
        begin = _seconds_of_children()
        assert _python("-m", "teraio", "--help").returncode == 0
        seconds.append(_seconds_of_children() - begin)
    assert 0 < min(seconds) < 0.4


def _seconds_of_children() -> float:
    """Time of a core that processes started here have taken, those that have ended."""
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_of_a_command_imports_neither_torch_nor_numba(name: str) -> None:
    script = (
        "import sys; from teraio.cli import main\n"
        f"try: main([{name!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numba', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = _python("-c", script)
    assert result.returncode == 0, result.stderr


def test_unknown_command_is_bad_usage(teraio: Callable[..., Result]) -> None:
    result = teraio("plant")
    assert result.exit_code == 2
    assert "No such command 'plant'" in result.stderr


def test_input_error_is_one_line_and_exit_code_2(
    teraio: Callable[..., Result], tmp_path: Path
) -> None:
    result = teraio("show", str(tmp_path / "none.trace"))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"teraio: error: {tmp_path}/none.trace: no such trace directory\n"


def test_error_with_json_is_an_object_on_stdout_too(teraio_json: Callable[..., Any]) -> None:
    assert teraio_json("show", "none.trace", exit_code=2) == {
        "error": "none.trace: no such trace directory"
    }


def _raise(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def _invoke_in_group(action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Result:
    monkeypatch.setattr(main, "get_command", lambda ctx, name: _echo_command(action))
    return CliRunner().invoke(main, ["echo"], prog_name="teraio")


def test_infeasible_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _invoke_in_group(_raise(InfeasibleError("kernel 3\nneeds more")), monkeypatch)
    assert (result.exit_code, result.stderr) == (1, "teraio: error: kernel 3 needs more\n")


def test_missing_torch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModuleNotFoundError("No module named 'torch'", name="torch")
    result = _invoke_in_group(_raise(error), monkeypatch)
    assert result.exit_code == 2
    assert 'pip install "teraio[torch]"' in result.stderr


@pytest.mark.parametrize("error", [ModuleNotFoundError(name="else"), KeyError("bug")])
def test_an_unexpected_exception_is_not_hidden(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _invoke_in_group(_raise(error), monkeypatch).exception is error


def test_result_is_shown_to_people_or_as_json_or_not_at_all() -> None:
    runner, echo = CliRunner(), _echo_command(exit_code=1)
    for words, expected in ([], "for people\n"), (["--json"], '{"a": 1}\n'), (["-q"], ""):
        result = runner.invoke(echo, words)
        assert (result.exit_code, result.stdout) == (1, expected)


def test_with_json_nothing_else_reaches_stdout() -> None:
    """Neither what Python prints nor what child processes write."""
    script = (
        "import os, subprocess, sys\n"
        "from teraio.cli.command import command\n"
        "from teraio.cli.result import Result\n"
        "@command('noisy', example='teraio noisy')\n"
        "def noisy(reporter):\n"
        "    print('from python'); os.write(1, b'from the descriptor\\n')\n"
        "    subprocess.run(['echo', 'from a child'])\n"
        "    return Result({'a': float('nan')}, lambda console: None)\n"
        "noisy(['--json'])\n"
    )
    result = _python("-c", script)
    assert result.stdout == '{"a": null}\n'
    for text in ("from python", "from the descriptor", "from a child"):
        assert text in result.stderr


def test_warnings_of_teraio_are_one_line_and_others_are_left_alone() -> None:
    def warn() -> None:
        warnings.simplefilter("always")
        warnings.warn("no GDS here;\nusing a bounce buffer", OffloadWarning, stacklevel=2)

    result = CliRunner().invoke(_echo_command(warn))
    assert result.stderr == "teraio: warning: no GDS here; using a bounce buffer\n"


def test_json_text_turns_what_commands_return_into_plain_json() -> None:
    frame = pd.DataFrame({"x": [1.0, np.nan], "n": pd.array([1, None], dtype="Int64")})
    data = {"table": frame, "path": Path("a"), "rate": np.float64(np.inf), "n": np.int64(3)}
    assert json.loads(json_text({**data, "pair": (np.array([1, 2]), None)})) == {
        "table": {"rows": [{"x": 1.0, "n": 1}, {"x": None, "n": None}]},
        "path": "a",
        "rate": None,
        "n": 3,
        "pair": [[1, 2], None],
    }


def test_sizes_are_read_and_refused_by_name(teraio: Callable[..., Result]) -> None:
    result = teraio("plan", "a.trace", "--hardware", "g10", "--gpu-memory", "many")
    assert result.exit_code == 2
    assert "'--gpu-memory': cannot read 'many'; write it as 94GB or 80GiB" in result.stderr


def test_output_that_is_not_ours_is_refused_before_any_work(
    folder: Path, teraio: Callable[..., Result]
) -> None:
    """The trace does not even exist: the output is looked at first."""
    (folder / "notes.txt").write_text("mine")
    result = teraio("plan", "none.trace", "--hardware", "g10", "-o", "notes.txt")
    assert result.exit_code == 2
    assert "notes.txt: exists and was not written by teraio" in result.stderr
    assert (folder / "notes.txt").read_text() == "mine"


def test_output_in_a_folder_that_does_not_exist_is_refused(teraio: Callable[..., Result]) -> None:
    result = teraio("show", "none.trace", "--plot", "nowhere/memory.png")
    assert "the folder nowhere does not exist" in result.stderr


def test_picture_of_unknown_kind_is_refused(teraio: Callable[..., Result]) -> None:
    result = teraio("show", "none.trace", "--plot", "memory.gif")
    assert result.exit_code == 2
    assert "must end in .png or .svg or .pdf" in result.stderr


def test_an_input_is_never_overwritten_by_the_output(
    folder: Path, teraio: Callable[..., Result]
) -> None:
    result = teraio(
        "plan", "small.trace", "--hardware", "g10", "-o", f"../{folder.name}/small.trace"
    )
    assert result.exit_code == 2
    assert "is both an input and an output" in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("p.plan s.py -x --json a", ["p.plan", "s.py", "-x", "--json", "a"]),
        ("-o out p.plan s.py -o mine", ["p.plan", "s.py", "-o", "mine"]),
        ("p.plan -o out s.py", ["p.plan", "s.py"]),
        ("p.plan --output=out s.py --help", ["p.plan", "s.py", "--help"]),
        ("-oout p.plan s.py -- -q", ["p.plan", "s.py", "--", "-q"]),
        ("-q p.plan --flag s.py -q", ["p.plan", "s.py", "-q"]),
    ],
)
def test_what_follows_the_script_is_left_to_the_script(words: str, expected: list[str]) -> None:
    found: list[str] = []

    @command("go", cls=ScriptCommand, leading=1, example="teraio go")
    @click.option("-o", "--output")
    @click.option("--flag", is_flag=True)
    @click.argument("rest", nargs=-1, type=click.UNPROCESSED)
    def go(reporter: Reporter, rest: tuple[str, ...], **options: Any) -> CommandResult:
        found.extend(rest)
        return CommandResult({}, lambda console: None)

    result = CliRunner().invoke(go, words.split())
    assert result.exit_code == 0, result.output
    assert found == expected


def test_forgotten_option_before_the_script_is_explained(teraio: Callable[..., Result]) -> None:
    result = teraio("profile", "train.py", "-o", "t.trace")
    assert result.exit_code == 2
    assert "Missing option '-o'" in result.stderr
    assert "Options of teraio stand before SCRIPT" in result.stderr


def test_reporter_shows_no_progress_where_nobody_looks() -> None:
    for is_silent in (True, False):
        with Reporter(is_silent=is_silent).progress("Planning") as progress:
            assert progress is None
