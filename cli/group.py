"""The group of all commands. A command's module is imported when the command is asked for."""

from __future__ import annotations

import importlib
import os
from typing import Any

import click

from teraio import __version__
from teraio.errors import MissingDependencyError, TeraioError

# torch's profiler, which measures scratch memory, would announce itself on stderr. It reads this
# when torch is imported, which some commands do.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

COMMANDS = {
    "demo": ("teraio.cli.demo:demo", "Profile, plan, simulate and execute a small model."),
    "profile": ("teraio.cli.profile:profile", "Record a trace of a training script or model."),
    "trace": ("teraio.cli.trace:trace", "Trace a model of any size without a GPU."),
    "time": ("teraio.cli.time:time", "Time a trace's distinct kernels on a real GPU."),
    "import": ("teraio.cli.import_trace:import_trace", "Make a trace of another tool's files."),
    "show": ("teraio.cli.show:show", "What a trace holds: memory, sizes, inactive periods."),
    "probe": ("teraio.cli.probe:probe", "Measure this machine and write its hardware file."),
    "plan": ("teraio.cli.plan:plan", "Decide what moves when, and predict the iteration."),
    "verify": ("teraio.cli.verify:verify", "Check a plan with code that no planner shares."),
    "simulate": ("teraio.cli.simulate:simulate", "Play a plan, or no plan, through the simulator."),
    "replay": ("teraio.cli.replay:replay", "Play a plan with real transfers, without the model."),
    "compare": ("teraio.cli.compare:compare", "Several planners side by side: table and picture."),
    "run": ("teraio.cli.run:run", "Execute a plan in an unmodified training script."),
}
"""Name: where the command is defined, and its line in ``teraio --help``."""


class LazyGroup(click.Group):
    """Lists commands without importing them, and turns errors of teraio into one line each."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which one meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in ``teraio --help``, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of teraio becomes one line and its exit code."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = 'this command needs PyTorch: pip install "teraio[torch]"'
            return _exit_with(ctx, MissingDependencyError(message))
        except TeraioError as error:
            return _exit_with(ctx, error)


def _exit_with(ctx: click.Context, error: TeraioError) -> None:
    where = "".join(
        f" ({note.removeprefix('teraio: ')})" for note in getattr(error, "__notes__", ())
    )
    click.echo(f"teraio: error: {' '.join(str(error).split())}{where}", err=True)
    ctx.exit(error.exit_code)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="teraio")
def main() -> None:
    """Train models bigger than your GPU's memory at nearly the speed of one that holds them.

    The usual way: profile a training script (or import a trace), plan for a machine, look at the
    prediction, then run the script under the plan. "teraio COMMAND --help" shows an example each.

    Exit codes: 0 done; 1 the answer is no (infeasible, invalid); 2 bad usage or input.
    """
