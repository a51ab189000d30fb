"""The `rltt` command: its subcommands, and what a user sees when one of them fails."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rltt import __version__
from rltt.cli.check_data import check_data
from rltt.cli.convert import convert
from rltt.cli.dashboard import dashboard
from rltt.cli.diagnose import diagnose
from rltt.cli.doctor import doctor
from rltt.cli.evaluate import evaluate
from rltt.cli.pretrain import pretrain
from rltt.cli.probe import probe
from rltt.cli.report import report
from rltt.cli.reward import reward
from rltt.cli.serve import serve
from rltt.cli.train import train
from rltt.cli.verdict import verdict
from rltt.cli.watch import watch
from rltt.errors import UserError
from rltt.launch import errors_left, leave_error


class _Commands(TyperGroup):
    """Turns what a user can mend into a message and an exit status; any other exception keeps its traceback.

    Ctrl-C is left to typer, which ends with status 130.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with errors_left():
                return super().invoke(ctx)
        except UserError as error:
            message = str(error).replace("\n", "\n       ")  # one problem a line, under one another
            leave_error(f"error: {message}", 2)
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands,
    help="RL post-training for looped language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # they print the values of local variables: whole tensors here
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rltt {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `rltt` itself."""


for command in (train, probe, doctor, diagnose, verdict, watch, dashboard, report, pretrain, convert):
    app.command()(command)
app.command(context_settings={"ignore_unknown_options": True})(serve)
app.command("eval")(evaluate)
app.command("check-data")(check_data)
app.add_typer(reward, name="reward")
