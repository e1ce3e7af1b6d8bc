"""The command line."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console

from shotcast import __version__, extras
from shotcast.cli import bench
from shotcast.cli.doctor import doctor
from shotcast.cli.generate import chat, generate
from shotcast.cli.plan import calibrate, plan
from shotcast.cli.serve import serve
from shotcast.cli.tune import tune
from shotcast.errors import RankFailed, ShotcastError


class _Group(typer.core.TyperGroup):
    """The command group: turns errors of this package and missing extras into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ShotcastError, ImportError) as error:
            text = extras.explain(error) or (_one_line(error) if isinstance(error, ShotcastError) else "")
            if not text or ctx.params.get("show_traceback"):
                raise
            Console(stderr=True, soft_wrap=True).print(f"shotcast: {text}", style="red", markup=False)
            raise typer.Exit(2) from error


def _one_line(error: ShotcastError) -> str:
    if isinstance(error, RankFailed):
        if isinstance(error.__cause__, ShotcastError):
            return _one_line(error.__cause__)
        lines = [line for line in error.detail.splitlines() if line.strip() and not line.startswith("(ranks that")]
        # A traceback ends with the exception; any other text begins with what happened.
        message = lines[-1] if lines[0].startswith("Traceback") else lines[0]
        return f"rank {error.rank} failed: {message} (use --traceback for the details)"
    return " ".join(str(error).split())


app = typer.Typer(
    cls=_Group,
    help="Run language models on the GPUs of a node, or on CPU processes, with fast, deterministic collectives.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
for _command in (generate, chat, serve, tune, plan, calibrate, doctor):
    app.command()(_command)


def main() -> None:
    try:
        app(prog_name="shotcast")  # also for python -m shotcast: completion goes by the name
    except SystemExit as done:
        if not done.code:
            _leave_job()
        raise


def _leave_job() -> None:
    """Leave torch.distributed if this rank joined it, since its threads must not outlive an orderly exit."""
    if "torch.distributed" in sys.modules:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _show_version(shown: bool) -> None:
    if shown:
        typer.echo(f"shotcast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show errors in full.")] = False,
) -> None:
    pass
