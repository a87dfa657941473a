"""`rl doctor`: what this machine can run, and whether a model family trains right."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from rl_launch.cli.failure import reported

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class _MachineByDefault(TyperGroup):
    """`rl doctor RECIPE` is `rl doctor machine RECIPE`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["machine", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_MachineByDefault)


@app.command()
def machine(
    recipe: Annotated[
        str, typer.Argument(metavar="[RECIPE|FILE.yaml]", help="What to run; the smallest GRPO where left out.")
    ] = "grpo-arithmetic",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to set.")] = None,
    as_json: Json = False,
) -> None:
    """Say what this machine has, and exit with 1 where the recipe cannot run here; starts nothing.

    With --json: {"schema": 1, "recipe", "device": "cpu"|"cuda", "can_run": bool, "checks": [{"name", "status":
    "ok"|"warning"|"missing", "found", "remedy"}, ...]}.
    """
    with reported():
        from rl_launch.doctor import CHECKS, ThisMachine, examine, needs_of

        if "=" in recipe:
            recipe, overrides = "grpo-arithmetic", [recipe, *(overrides or ())]
        here = ThisMachine()
        report = examine(here, needs_of(recipe, overrides or (), num_gpus=here.num_gpus), CHECKS)
        if as_json:
            sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
        else:
            from rich.console import Console

            from rl_launch.doctor.show import show

            show(report, Console())
        if not report.can_run:
            raise typer.Exit(1)
