"""`rl doctor`: checks that this machine can run a recipe, that a model family trains correctly, that a run lost no
prompt, and why policy and generator disagree.
"""

from __future__ import annotations

from typing import Annotated

import typer
from typer.core import TyperGroup

from rl_core.errors import ConfigError
from rl_launch.cli.failure import reported
from rl_launch.cli.options import AsJson, Overrides, argument, named, option, write_json

_STYLES = {"exact": "green", "off": "bold red", "refused": "dim"}


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
        str, named("RECIPE|FILE.yaml", "The recipe to check (default: the smallest GRPO recipe).")
    ] = "grpo-arithmetic",
    overrides: Overrides = None,
    cluster: Annotated[
        bool,
        option(
            "--cluster",
            "Check the nodes of the Ray cluster that the recipe would use, and measure their network, instead of "
            "checking this machine.",
        ),
    ] = False,
    timeout: Annotated[
        float | None, option("--timeout", "With --cluster: limit of each probe in seconds (default: 60).", min=1)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a recipe can run on this machine, or with --cluster on the nodes at RAY_ADDRESS. The exit code is 1
    if it cannot. `rl doctor RECIPE` is the same.

    With --json: {"schema": 1, "recipe", "device": "cpu"|"cuda"|"rehearsal", "can_run": bool, "checks": [{"name",
    "status": "ok"|"warning"|"missing", "found", "remedy"}, ...]}. With --cluster also {"nodes": [{"name", "address",
    "hostname", "num_devices", "problem", "clock": {"offset_s", "uncertainty_s"}|null, "readings": {...}|null}, ...],
    "transfers": [{"sender", "receiver", "bytes_per_s", "problem"}, ...], "all_reduce": {"num_ranks", "num_nodes",
    "num_bytes", "seconds", "bus_bytes_per_s", "problems", "skipped", ...}}.
    """
    with reported():
        if "=" in recipe:
            recipe, overrides = "grpo-arithmetic", [recipe, *(overrides or ())]
        if timeout is not None and not cluster:
            raise ConfigError("--timeout limits the probes of --cluster. Add --cluster, or remove it.")
        from rich.console import Console

        if cluster:
            from rl_launch.doctor.cluster.examination import TIMEOUT_S, examine_cluster

            examined = examine_cluster(recipe, overrides or (), timeout_s=timeout or TIMEOUT_S)
            report, found = examined.report, examined.as_json()
        else:
            from rl_launch.commands.diagnosis import diagnose

            with Console(stderr=True).status("checking this machine and the start of the run"):
                report = diagnose(recipe, overrides or ())
            found = report.as_json()
        if as_json:
            write_json(found)
        else:
            from rl_launch.doctor.show import show

            show(report, Console())
        if not report.can_run:
            raise typer.Exit(1)


@app.command()
def model(
    name: Annotated[str, argument("DIR|NAME", "A folder with the config.json of a model, or a hub name.")],
    backend: Annotated[str, option("--backend", "The training backend to check.")] = "dtensor",
    as_json: AsJson = False,
) -> None:
    """Train a tiny model of the family on every mesh and compare it with a single process. The exit code is 1 if a mesh
    differs. Takes several minutes.

    With --json: {"schema": 1, "model", "backend", "is_right": bool, "cases": [{"mesh", "layout", "verdict":
    "exact"|"off"|"refused", "differences": {NAME: NUMBER|null}, "names": [TENSOR, ...], "reason"}, ...]}.
    """
    with reported(shows_logs=True):
        from rich.console import Console

        from rl_launch.doctor import family

        console, found = Console(), []
        for case in family.check_model(name, backend):
            found.append(case)
            if not as_json:
                console.print(family.described(case), style=_STYLES[case.verdict], soft_wrap=True, markup=False)
        report = family.as_json(name, backend, found)
        if as_json:
            write_json(report)
        elif report["is_right"]:
            console.print(f"{name} trains correctly on every supported mesh.", highlight=False, soft_wrap=True)
        else:
            num_off = sum(case.verdict == "off" for case in found)
            console.print(f"{name} differs in {num_off} of {len(found)} cases.", highlight=False, soft_wrap=True)
        if not report["is_right"]:
            raise typer.Exit(1)


@app.command()
def run(folder: Annotated[str, argument("DIR", "A run directory.")], as_json: AsJson = False) -> None:
    """Verify from a run directory that every prompt was trained once, dropped for a reason, or is pending. The exit
    code is 1 if there are contradictions.

    With --json: {"schema": 1, "run", "holds": bool, "step", "num_drawn", "num_trained", "dropped": {REASON: NUMBER},
    "num_pending", "num_compared", "contradictions": [SENTENCE, ...], "gaps": [SENTENCE, ...]}.
    """
    with reported():
        from rich.console import Console

        from rl_launch.run_session.directory.exactly_once import described, prove
        from rl_launch.run_session.directory.run_folder import RunFolder

        proof = prove(RunFolder(folder))
        if as_json:
            write_json(proof.as_json(folder))
        else:
            console = Console()
            for line in described(proof):
                console.print(line, highlight=False, soft_wrap=True, markup=False)
        if not proof.holds:
            raise typer.Exit(1)


@app.command()
def mismatch(
    source: Annotated[str, named("RUN|RECIPE|FILE.yaml", "A run directory, or a recipe whose first steps are made.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find out why policy and generator compute other logprobs: score rollouts with one change at a time, and rank the
    causes by how much of the gap each closes. The exit code is 1 if there is a gap.

    With --json: {"schema": 1, "run", "step", "weight_version", "num_rows", "num_tried", "is_large": bool, "side":
    "generator"|"policy"|"either", "gap": {"mean", "largest", "rows", "num_tokens", "generator", "policy": NUMBER|null},
    "findings": [{"cause", "title", "detail", "side", "closed", "remedy"}, ...], "first": such a finding|null,
    "remarks": [SENTENCE, ...]}.
    """
    with reported(shows_logs=True):
        from rich.console import Console

        from rl_launch.commands.mismatch import described, examine_mismatch

        report = examine_mismatch(source, overrides or ())
        if as_json:
            write_json(report.as_json())
        else:
            console = Console()
            for line in described(report):
                console.print(line, highlight=False, soft_wrap=True, markup=False)
        if report.is_large:
            raise typer.Exit(1)
