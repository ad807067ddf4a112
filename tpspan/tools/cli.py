"""The command ``tpspan``. Starts without torch: a command imports what it needs when it runs.

``COMMANDS`` lists the commands that live in files of their own. Such a file offers
``main(argv: Sequence[str]) -> int``, which gets all that follows the command's name, ``--help``
too, and returns the exit code.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Annotated, Literal

import typer


@dataclass(frozen=True)
class Command:
    """A command of its own file, under the name and with the line that ``tpspan --help`` shows."""

    name: str
    module: str
    help: str


COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "tpspan.tools.demo",
        "Let a language model answer on every rank from one shared copy of its weights.",
    ),
    Command(
        "bench",
        "tpspan.tools.bench.command",
        "Measure what spans cost and give on this machine: tpspan bench span --ranks 4.",
    ),
    Command(
        "publish",
        "tpspan.tools.publish",
        "Publish a safetensors file: tpspan publish model.safetensors --name base --device cuda:0.",
    ),
    Command("ls", "tpspan.tools.listing", "Show what is published, and who reads it."),
    Command("rm", "tpspan.tools.remove", "Remove published names."),
    Command("keeper", "tpspan.tools.keeper", "Hold published memory in the foreground."),
)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="tpspan",
    help="Tensors that the ranks of a PyTorch job hold once between them and read all of.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    pass


@app.command(
    context_settings={**PASS_ON, "allow_interspersed_args": False},
    options_metavar="[OPTIONS] SCRIPT [ARGUMENTS]...",
)
def run(
    context: typer.Context,
    num_ranks: Annotated[int, typer.Option("-n", "--num-ranks", min=1, help="How many ranks.")],
    launcher: Annotated[
        Literal["mpirun", "torchrun"], typer.Option(help="What starts the ranks.")
    ] = "mpirun",
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module: tpspan run -n 4 -m pack.train.")
    ] = False,
) -> None:
    """Run a script on N ranks of this machine: tpspan run -n 4 train.py --its --options.

    The exit code is the job's. If a rank fails all end; in a world of tpspan.init() its traceback
    is printed last.
    """
    from tpspan.errors import LaunchError
    from tpspan.launch.run import run as start

    try:
        code = start(num_ranks, context.args, launcher=launcher, module=module)
    except (LaunchError, ValueError) as error:
        typer.echo(f"tpspan run: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def _add(command: Command) -> None:
    @app.command(
        command.name,
        help=command.help,
        context_settings={**PASS_ON, "help_option_names": []},
    )
    def forward(context: typer.Context) -> None:
        raise typer.Exit(importlib.import_module(command.module).main(context.args))


for _command in COMMANDS:
    _add(_command)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
