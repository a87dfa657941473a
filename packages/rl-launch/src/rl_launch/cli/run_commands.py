"""`rl runs`, `rl label`, `rl show` and `rl sweep`: commands for several runs."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_launch.cli.completion import complete_override, complete_recipe
from rl_launch.cli.failure import explained, reported

if TYPE_CHECKING:
    from rl_launch.session.directory.run_folder import RunFolder
    from rl_launch.show.images import Line
    from rl_launch.show.selection import Selection

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A folder with runs.")] = Path("runs"),
    keys: Annotated[
        str,
        typer.Option(
            "--keys",
            metavar="KEY,...",
            help="Columns: keys of the config (sft.seed), metrics (val/loss, val/loss:best), or name, group, tags, "
            "notes, algorithm, model.",
        ),
    ] = "",
    sort: Annotated[
        str,
        typer.Option("--sort", metavar="KEY", help="Sort by this key (default: the most recently changed run first)."),
    ] = "",
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="KEY=VALUE",
            help="List runs that match a condition: state=finished, tag=NAME, sft.seed<3, name=ablation-*. May be "
            "repeated.",
        ),
    ] = None,
    is_reversed: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs: state, step, best metric, age, and the command that resumes each of them, or the values of keys.

    A metric is sorted with its best value first. val/loss is the last value, val/loss:best the best one.

    With --json: {"schema": 1, "runs": [{"path", "algorithm", "model", "status":
    "running"|"finished"|"interrupted"|"failed", "reason", "step", "max_steps", "best": {"metric", "value",
    "step"}|null, "created", "changed", "go_on", "labels": {"name", "group", "tags", "notes"}, "values": {KEY: VALUE}},
    ...]}.
    """
    with reported():
        from rl_launch.commands import runs as listing
        from rl_launch.commands.run_values import condition

        chosen = listing.Listing(
            keys=[key.strip() for key in keys.split(",") if key.strip()],
            sort=sort.strip(),
            conditions=[condition(text) for text in conditions or ()],
            is_reversed=is_reversed,
        )
        found = listing.list_runs(folder.expanduser(), chosen)
        if as_json:
            sys.stdout.write(json.dumps(listing.as_json(found), indent=2) + "\n")
        else:
            from rich.console import Console

            listing.show(found, folder, Console(), now=datetime.now().astimezone(), listing=chosen)


def label(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories. Use rl runs to list them.")],
    name: Annotated[str | None, typer.Option("--name", help="Name in trackers; '' removes it.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Group of the runs; '' removes it.")] = None,
    tags: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="Add a tag. May be repeated.")] = None,
    removed: Annotated[
        list[str] | None, typer.Option("--untag", metavar="TAG", help="Remove a tag. May be repeated.")
    ] = None,
    notes: Annotated[str | None, typer.Option("--notes", help="Replace the notes; '' removes them.")] = None,
) -> None:
    """Show or change the labels of runs. The config does not change. Trackers are updated when a run is resumed."""
    with reported():
        from dataclasses import replace

        from rl_core.config import tree_to_yaml
        from rl_launch.session.directory.labels import write_labels
        from rl_launch.session.directory.run_folder import DESCRIPTION, RunFolder

        found = [RunFolder(path) for path in paths]
        given = {"name": name, "group": group, "notes": notes}
        changed = {key: value for key, value in given.items() if value is not None}
        for run in found:
            labels = run.description().labels
            kept = [tag for tag in dict.fromkeys([*labels.tags, *(tags or ())]) if tag not in (removed or ())]
            new = replace(labels, **changed, tags=tuple(kept))
            if new != labels:
                write_labels(run.path / DESCRIPTION, new)
            shown = {key: value for key, value in {**new.as_json(), "tags": list(new.tags)}.items() if value}
            sys.stdout.write(tree_to_yaml({str(run.path): shown}))


def show(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="A run directory, or several to compare. Use rl runs to list them."),
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", help="Show the rollouts of this step, and metrics up to it. For a single run only."
        ),
    ] = None,
    of_validation: Annotated[bool, typer.Option("--val", help="Show validation rollouts.")] = False,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            help="Show rollouts that match a condition: reward=0, format>0, response=*tea*. May be repeated.",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="KEY", help="Sort rollouts by a key: num_sampled, or -reward for descending order."
        ),
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="Maximum number of rollouts for --where and --sort.")
    ] = 10,
    as_json: AsJson = False,
    lists_all: Annotated[
        bool, typer.Option("--all", help="List all metrics instead of the most important ones.")
    ] = False,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="DIR", help="Also write plots of all metrics to this folder.")
    ] = None,
) -> None:
    """Show a run: plots and a table of metrics, time by phase, samples of rollouts, and advice. For several runs, show
    the keys in which they differ, their curves in one plot, and their last and best values. Runs that differ only in
    seeds are one line, with mean and standard deviation. With --val, --where or --sort, show only rollouts, of the
    newest step or of --step.

    With --json: {"schema": 1, "path", "description", "state", "summaries": [{"name", "first", "best", "best_step",
    "last", "last_step"}, ...], "timings": {PHASE: SECONDS}, "rollouts": {"step", "num_rollouts", "best", "worst",
    "failures": {REASON: COUNT}}|null, "advice": [{"found", "remedy", "metrics", "where"}, ...]}. For several runs:
    {"schema": 1, "keys": [KEY, ...], "seeds": [KEY, ...], "groups": [{"name", "values": {KEY: VALUE}, "runs": [PATH,
    ...], "metrics": {METRIC: {"last": {"mean", "std", "num_runs"}, "best": {...}|null}}}, ...]}.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.session.directory.checkpoint_name import CheckpointName
        from rl_launch.session.directory.run_folder import RunFolder
        from rl_launch.show.condition import Condition
        from rl_launch.show.images import check_matplotlib
        from rl_launch.show.selection import Selection

        if png is not None:
            check_matplotlib()
        named = [CheckpointName.parse(path) for path in paths]
        found = [RunFolder(each.run if each else path) for path, each in zip(paths, named, strict=True)]
        if step is None and (one := next((each for each in named if each and each.which), None)):
            step = int(one.checkpoint().name.removeprefix("step_")) if one.step is None else one.step
        asked = None
        if of_validation or conditions or sort:
            holding = [Condition.parse(text, "--where", "reward=0 or status=failed") for text in conditions or ()]
            asked = Selection("val" if of_validation else "step", holding, sort, limit)
        if len(found) == 1:
            _show_one(found[0], step, asked, png, as_json=as_json, lists_all=lists_all)
        elif asked is not None:
            raise ConfigError(f"--val, --where and --sort need a single run, got {len(found)} runs")
        else:
            _show_several(found, step, png, as_json=as_json)


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE.yaml|RUN",
            help="Name of a recipe, a YAML file, or a run directory whose config is used.",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=A,B... [run_dir=FOLDER]",
            help="Keys and their values. Quote a value that contains a comma, or put it in brackets, as in YAML.",
            autocompletion=complete_override,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Train once for every combination of values, one run after another on the same Ray cluster, and list the results.

    Each run has its own folder in FOLDER (default: runs/RECIPE-sweep) and is identical to rl train with the same keys.
    Run the same command again to resume: finished runs are skipped and interrupted ones are resumed. If a run fails,
    the others are still trained, and the exit code is 1.
    """
    with reported():
        from rich.console import Console

        from rl_launch.commands import runs as listing
        from rl_launch.commands.sweep import run_sweep, sweep_of
        from rl_launch.session import show_logs

        show_logs(verbose=verbose)
        found = sweep_of(recipe, overrides or ())
        outcome = run_sweep(found, explained)
        columns = found.listing()
        listed = listing.listed(found.folders(), columns)
        if listed:
            listing.show(listed, found.folder, Console(), now=datetime.now().astimezone(), listing=columns)
        for name, message in outcome.failures.items():
            # the log has the whole message, at the time of the failure
            sys.stderr.write(f"error: {name}: {message.splitlines()[0]}\n")
        if outcome.stopped is not None:
            outcome.stopped.exit_if_stopped()
        if outcome.failures:
            raise typer.Exit(1)


def _show_one(
    run: RunFolder, step: int | None, asked: Selection | None, png: Path | None, *, as_json: bool, lists_all: bool
) -> None:
    from rl_launch import show as showing
    from rl_launch.show.images import Line

    report = showing.report_of(run, step, asked)
    if as_json:
        _print_json(report.as_json())
    else:
        from rich.console import Console

        showing.show(report, Console(), lists_all=lists_all)
    _write_images([Line("", report.series)], png)


def _show_several(runs: list[RunFolder], step: int | None, png: Path | None, *, as_json: bool) -> None:
    from rl_core.errors import ConfigError
    from rl_launch.show.comparison import comparison_of
    from rl_launch.show.comparison_text import letter, show_comparison
    from rl_launch.show.images import Line

    if step is not None:
        raise ConfigError(f"--step needs a single run, got {len(runs)} runs")
    comparison = comparison_of(runs)
    if as_json:
        _print_json(comparison.as_json())
    else:
        from rich.console import Console

        show_comparison(comparison, Console())
    lines = [
        Line(f"{letter(index)}: {group.name}", group.series, group.members)
        for index, group in enumerate(comparison.groups)
    ]
    _write_images(lines, png)


def _print_json(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def _write_images(lines: list[Line], folder: Path | None) -> None:
    from rl_launch.show.images import write_images

    for path in write_images(lines, folder.expanduser()) if folder is not None else ():
        sys.stderr.write(f"{path}\n")
