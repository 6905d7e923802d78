"""The class of all commands: ``--json``, ``-q``, the example in the help, warnings in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click

from teraio.cli.options import OutputPath
from teraio.cli.result import Result, console, json_text, stdout_to_stderr
from teraio.errors import InputError, TeraioError

Progress = Callable[[float | str], None]


class Command(click.Command):
    """A command that returns a :class:`Result`, which is printed here and nowhere else."""

    def __init__(self, *args: Any, example: str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.example = example
        self.params += [
            click.Option(["--json", "as_json"], is_flag=True, help="One JSON object on stdout."),
            click.Option(["-q", "--quiet"], is_flag=True, help="Print errors only."),
        ]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The example, as one would type it."""
        with formatter.section("Example"):
            for line in self.example.splitlines():
                formatter.write(f"  {line}\n")

    def invoke(self, ctx: click.Context) -> Any:
        """Run the callback and print its result: as JSON, for people, or not at all."""
        as_json, quiet = ctx.params.pop("as_json"), ctx.params.pop("quiet")
        ctx.obj = Reporter(is_silent=as_json or quiet)
        self._refuse_overwritten_input(ctx)
        with _warnings_in_one_line():
            try:
                with stdout_to_stderr() if as_json else nullcontext():
                    result: Result = super().invoke(ctx)
            except TeraioError as error:
                if as_json:
                    click.echo(json_text({"error": str(error)}))
                raise
        if as_json:
            click.echo(json_text(result.data))
        elif not quiet:
            result.show(console())
        ctx.exit(result.exit_code)

    def _refuse_overwritten_input(self, ctx: click.Context) -> None:
        is_output = {p.name: isinstance(p.type, OutputPath) for p in self.params}
        paths = {name: v for name, v in ctx.params.items() if isinstance(v, Path) and v.exists()}
        for name, path in paths.items():
            for other, input_path in paths.items():
                if is_output[name] and other != name and path.samefile(input_path):
                    raise InputError(f"{path}: is both an input and an output of this command")


class ScriptCommand(Command):
    """A command whose arguments end with SCRIPT [ARGS]: what follows the script is the script's.

    ``leading`` arguments come before the script; options may stand before, between and after them.
    """

    def __init__(self, *args: Any, leading: int = 0, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.leading = leading

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``--`` in front of the script, so that click leaves its options alone."""
        script = self._index_of_script(args)
        if script is None:
            return super().parse_args(ctx, args)
        try:
            return super().parse_args(ctx, [*args[:script], "--", *args[script:]])
        except click.MissingParameter as error:
            message = f"{error.format_message()} Options of teraio stand before SCRIPT."
            raise click.UsageError(message, ctx) from None

    def _index_of_script(self, args: list[str]) -> int | None:
        takes_value = {
            name: not (option.is_flag or option.count)
            for option in self.params
            if isinstance(option, click.Option)
            for name in option.opts
        }
        seen, position = 0, 0
        while position < len(args):
            text = args[position]
            if text == "--":
                return None
            if not text.startswith("-") or text == "-":
                if seen == self.leading:
                    return position
                seen += 1
            position += 2 if takes_value.get(text, False) else 1
        return None


class Reporter:
    """Where a running command reports: a progress bar on stderr, where a person looks at it."""

    def __init__(self, *, is_silent: bool) -> None:
        self.is_silent = is_silent
        self.compilation_seconds = 0.0

    @contextmanager
    def progress_with_compilation(self, description: str) -> Iterator[Progress | None]:
        """As :meth:`progress`, of work that compiles itself on each machine's first time, which is
        said then and counted.
        """
        from teraio.simulator.compilation import CompilationWatch

        with self.progress(description) as report, CompilationWatch(report) as watch:
            yield report
        self.compilation_seconds += watch.seconds

    @contextmanager
    def progress(self, description: str) -> Iterator[Progress | None]:
        """A function that takes what is being done, or the fraction done; None where nobody looks.

        Without a fraction the bar pulses.
        """
        screen = console(error=True)
        if self.is_silent or not screen.is_terminal:
            yield None
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=screen, transient=True) as bar:
            task = bar.add_task(description, total=None)

            def report(news: float | str) -> None:
                if isinstance(news, str):
                    bar.update(task, description=f"{description}: {news}")
                else:
                    bar.update(task, completed=news, total=1.0)

            yield report


def command(
    name: str, *, example: str, cls: type[Command] = Command, **settings: Any
) -> Callable[[Callable[..., Result]], click.Command]:
    """Decorator of a command. Its function takes the :class:`Reporter` first."""

    def decorate(function: Callable[..., Result]) -> click.Command:
        callback = click.pass_obj(function)
        return click.command(name, cls=cls, example=example, **settings)(callback)

    return decorate


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    from teraio.errors import OffloadWarning

    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_in_one_line(message: Any, category: type[Warning], *where: Any) -> None:
            if issubclass(category, OffloadWarning):
                click.echo(f"teraio: warning: {' '.join(str(message).split())}", err=True)
            else:
                show(message, category, *where)

        warnings.showwarning = show_in_one_line  # type: ignore[assignment]
        yield
