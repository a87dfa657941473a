"""Commands about runs that exist: `rl runs`, `label`, `show`, `view`, `stacks`, `replay` and `chaos`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_launch.cli.failure import reported
from rl_launch.cli.options import AsJson, argument, keys, option, write_json

if TYPE_CHECKING:
    from rl_launch.run_session.directory.run_folder import RunFolder
    from rl_launch.show.images import Line
    from rl_launch.show.selection import Selection


def replay(
    step: Annotated[str, argument("RUN:STEP", "Step of a run that was trained with logger.replay_enabled=true.")],
    overrides: Annotated[list[str] | None, keys("Config keys to change, for a what-if beside the real step.")] = None,
    stops: Annotated[
        list[str] | None,
        option(
            "--break",
            "Stop after a stage, in a debugger with the variables of the loop, or call FILE.py:FUNCTION with the step "
            "and the variables. May be repeated.",
            "STAGE[=FUNCTION]",
        ),
    ] = None,
    row: Annotated[
        int | None, option("--row", "Train the step on this rollout alone, by its line in rollouts/step_N.jsonl.", "N")
    ] = None,
    is_profiled: Annotated[bool, option("--profile", "Profile the workers during the step.")] = False,
    as_json: AsJson = False,
) -> None:
    """Make a step of a run again, and show the first stage that differs: rollouts, rewards, advantages, logprobs, loss,
    gradient, update.

    It begins with the newest checkpoint before the step, takes the recorded completions instead of sampling, and does
    all else again. On the CPU nothing differs; with changed keys the stages show what they change.

    The exit code is 1 if something differs and no key was changed.

    With --json: {"schema": 1, "run", "step", "checkpoint", "folder", "missing", "changed", "stages": [{"name",
    "step", "num_compared", "differences": [{"what", "recorded", "replayed"}, ...]}, ...], "first": such a stage|null,
    "profiles": [FILE, ...]}.
    """
    with reported(shows_logs=True):
        from rl_launch.commands.replay import replay as make

        stages = dict(each.partition("=")[::2] for each in stops or ())
        report = make(step, overrides or (), stops=stages, row=row, is_profiled=is_profiled)
        if as_json:
            write_json({"schema": 1, **asdict(report)})
        else:
            for stage in report.stages:
                count = f"{len(stage.differences)} of {stage.num_compared} values differ"
                sys.stdout.write(
                    f"{stage.name}: {count if stage.differences else f'{stage.num_compared} values equal'}\n"
                )
            if report.missing:
                sys.stdout.write(f"{report.missing} groups were not recorded and have been sampled\n")
            if report.first is not None:
                first = report.first
                sys.stdout.write(f"first difference, in {first.name} of step {first.step}: {first.differences[0]}\n")
            sys.stdout.write("".join(f"{each}\n" for each in (report.folder, *report.profiles)))
        if report.first is not None and not report.changed:
            raise typer.Exit(1)


def runs(
    folder: Annotated[Path, argument("[DIR]", "A folder with runs.")] = Path("runs"),
    keys: Annotated[
        str,
        option(
            "--keys",
            "Columns: keys of the config (sft.seed), metrics (val/loss, val/loss:best), or name, group, tags, "
            "notes, algorithm, model.",
            "KEY,...",
        ),
    ] = "",
    sort: Annotated[
        str, option("--sort", "Sort by this key (default: the most recently changed run first).", "KEY")
    ] = "",
    conditions: Annotated[
        list[str] | None,
        option(
            "--filter",
            "List runs that match a condition: state=finished, tag=NAME, sft.seed<3, name=ablation-*. May be repeated.",
            "KEY=VALUE",
        ),
    ] = None,
    is_reversed: Annotated[bool, option("--reverse", "Reverse the order.")] = False,
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

        chosen = listing.Listing(
            keys=[key.strip() for key in keys.split(",") if key.strip()],
            sort=sort.strip(),
            conditions=[listing.condition(text) for text in conditions or ()],
            is_reversed=is_reversed,
        )
        found = listing.list_runs(folder.expanduser(), chosen)
        if as_json:
            write_json(listing.as_json(found))
        else:
            from rich.console import Console

            listing.show(found, folder, Console(), now=datetime.now().astimezone(), listing=chosen)


def label(
    paths: Annotated[list[Path], argument("RUN...", "Run directories. Use rl runs to list them.")],
    name: Annotated[str | None, option("--name", "Name in trackers; '' removes it.")] = None,
    group: Annotated[str | None, option("--group", "Group of the runs; '' removes it.")] = None,
    tags: Annotated[list[str] | None, option("--tag", "Add a tag. May be repeated.", "TAG")] = None,
    removed: Annotated[list[str] | None, option("--untag", "Remove a tag. May be repeated.", "TAG")] = None,
    notes: Annotated[str | None, option("--notes", "Replace the notes; '' removes them.")] = None,
) -> None:
    """Show or change the labels of runs. The config does not change. Trackers are updated when a run is resumed."""
    with reported():
        from dataclasses import replace

        from rl_core.config import tree_to_yaml
        from rl_launch.run_session.directory.run_folder import DESCRIPTION, RunFolder
        from rl_launch.run_session.directory.run_state import write_labels

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
        argument("RUN...", "A run directory, or several to compare; or an evaluation. Use rl runs to list runs."),
    ],
    step: Annotated[
        int | None,
        option("--step", "Show the rollouts of this step, and metrics up to it. For a single run only.", "N"),
    ] = None,
    of_validation: Annotated[bool, option("--val", "Show validation rollouts.")] = False,
    conditions: Annotated[
        list[str] | None,
        option(
            "--where",
            "Show rollouts that match a condition: reward=0, format>0, response=*tea*. May be repeated.",
            "KEY=VALUE",
        ),
    ] = None,
    sort: Annotated[
        str, option("--sort", "Sort rollouts by a key: num_sampled, or -reward for descending order.", "KEY")
    ] = "",
    limit: Annotated[int, option("--limit", "Maximum number of rollouts for --where and --sort.", min=1)] = 10,
    as_json: AsJson = False,
    lists_all: Annotated[bool, option("--all", "List all metrics instead of the most important ones.")] = False,
    png: Annotated[Path | None, option("--png", "Also write plots of all metrics to this folder.", "DIR")] = None,
) -> None:
    """Show a run: plots and a table of metrics, time by phase, samples of rollouts, and advice. For several runs, show
    the keys in which they differ, their curves in one plot, and their last and best values. Runs that differ only in
    seeds are one line, with mean and standard deviation. With --val, --where or --sort, show only rollouts, of the
    newest step or of --step. An evaluation is shown with its estimates and rollouts.

    With --json: {"schema": 1, "path", "description", "state", "summaries": [{"name", "first", "best", "best_step",
    "last", "last_step"}, ...], "timings": {PHASE: SECONDS}, "rollouts": {"step", "num_rollouts", "best", "worst",
    "failures": {REASON: COUNT}}|null, "advice": [{"found", "remedy", "metrics", "where"}, ...]}. For several runs:
    {"schema": 1, "keys": [KEY, ...], "seeds": [KEY, ...], "groups": [{"name", "values": {KEY: VALUE}, "runs": [PATH,
    ...], "metrics": {METRIC: {"last": {"mean", "std", "num_runs"}, "best": {...}|null}}}, ...]}. For an evaluation:
    {"schema": 1, "path", "result": contents of eval.json|null, "rollouts"}.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.evaluation.folder import is_evaluation
        from rl_launch.run_session.directory.checkpoint_name import CheckpointName
        from rl_launch.run_session.directory.run_folder import RunFolder
        from rl_launch.show.images import check_matplotlib, write_images
        from rl_launch.show.selection import Condition, Selection

        if png is not None:
            check_matplotlib()
        asked = None
        if of_validation or conditions or sort:
            holding = [Condition.parse(text, "--where", "reward=0 or status=failed") for text in conditions or ()]
            asked = Selection("val" if of_validation else "step", holding, sort, limit)
        if len(paths) == 1 and is_evaluation(paths[0].expanduser()):
            if given := [name for name, value in (("--step", step), ("--val", of_validation), ("--png", png)) if value]:
                raise ConfigError(f"{given[0]} is for runs, and {paths[0]} is an evaluation")
            _show_evaluation(paths[0].expanduser(), asked, as_json=as_json)
            return
        named = [CheckpointName.parse(path) for path in paths]
        found = [RunFolder(each.run if each else path) for path, each in zip(paths, named, strict=True)]
        if step is None and (one := next((each for each in named if each and each.which), None)):
            step = int(one.checkpoint().name.removeprefix("step_")) if one.step is None else one.step
        if len(found) == 1:
            lines = _show_one(found[0], step, asked, as_json=as_json, lists_all=lists_all)
        elif asked is not None:
            raise ConfigError(f"--val, --where and --sort need a single run, got {len(found)} runs")
        elif step is not None:
            raise ConfigError(f"--step needs a single run, got {len(found)} runs")
        else:
            lines = _show_several(found, as_json=as_json)
        for path in write_images(lines, png.expanduser()) if png is not None else ():
            sys.stderr.write(f"{path}\n")


def _show_one(
    run: RunFolder, step: int | None, asked: Selection | None, *, as_json: bool, lists_all: bool
) -> list[Line]:
    """Show a run; returns its line in plots."""
    from rl_launch import show as showing
    from rl_launch.show.images import Line

    report = showing.report_of(run, step, asked)
    if as_json:
        write_json(report.as_json())
    else:
        from rich.console import Console

        showing.show(report, Console(), lists_all=lists_all)
    return [Line("", report.series)]


def _show_evaluation(folder: Path, asked: Selection | None, *, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.console import Console

    from rl_launch import show as showing
    from rl_launch.evaluation.folder import RESULT, rollouts_in
    from rl_launch.evaluation.result import EvaluationResult, show_result
    from rl_launch.show.selection import Selection

    result = EvaluationResult.read(folder) if (folder / RESULT).is_file() else None
    rollouts = showing.rollouts_of(rollouts_in(folder), asked or Selection())
    if as_json:
        found = None if result is None else result.as_json()
        write_json({"schema": 1, "path": str(folder), "result": found, "rollouts": asdict(rollouts)})
        return
    console = Console()
    if result is None:
        console.print(f"{folder} is not finished; continue it with rl eval {folder}", soft_wrap=True, markup=False)
    elif asked is None:
        show_result(result, console)
    showing.show_rollouts(rollouts, console)


def _show_several(runs: list[RunFolder], *, as_json: bool) -> list[Line]:
    """Show a comparison of runs; returns their lines in plots."""
    from rl_launch.show.comparison import comparison_of, letter, show_comparison
    from rl_launch.show.images import Line

    comparison = comparison_of(runs)
    if as_json:
        write_json(comparison.as_json())
    else:
        from rich.console import Console

        show_comparison(comparison, Console())
    groups = enumerate(comparison.groups)
    return [Line(f"{letter(index)}: {group.name}", group.series, group.members) for index, group in groups]


def view(
    paths: Annotated[
        list[Path] | None,
        argument("[DIR]...", "Runs, evaluations, files of rollouts, or folders that contain them (default: runs)."),
    ] = None,
    port: Annotated[int, option("--port", "Port; 0 for a free one.", min=0, max=65535)] = 0,
    opens_browser: Annotated[bool, option("--open", "Open the page in a browser.")] = False,
    folder: Annotated[
        Path | None, option("--export", "Write the page as static files to this folder and exit.", "DIR")
    ] = None,
    steps: Annotated[int, option("--steps", "With --export: number of steps of each run with rollouts.", min=0)] = 8,
    rollouts: Annotated[
        int, option("--rollouts", "With --export: number of rollouts of each step.", min=1, max=500)
    ] = 64,
) -> None:
    """Show runs, rollouts and evaluations in a browser: metrics, rollouts, times, advice, configs, logs, checkpoints.

    Serves a read-only page on 127.0.0.1 and prints its address, which contains a token. Runs in progress are followed.
    Reads files only, so a copied folder of a run works too. Ends with Ctrl-C.

    With --export: static files that open from file://, without a server.
    """
    with reported():
        from rl_launch.run_session.directory.run_folder import RUNS
        from rl_launch.view.catalog import PageCatalog
        from rl_launch.view.export import export
        from rl_launch.view.index import cache_folder
        from rl_launch.view.server import serve

        catalog = PageCatalog(paths or [Path(RUNS)], cache_folder())
        if folder is not None:
            count = export(catalog, folder.expanduser(), steps=steps, rollouts=rollouts)
            sys.stdout.write(f"{folder / 'index.html'} ({count} rollouts)\n")
            return

        def say(url: str) -> None:
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()

        serve(catalog, port, say, opens_browser=opens_browser)


def stacks(
    path: Annotated[Path, argument("RUN", "Directory of a run in progress.")],
    is_native: Annotated[bool, option("--native", "Show native frames as well. Requires py-spy.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the stacks of every process of a run in progress: driver, ranks, rollout workers, engines, environments.

    Run it on the machine of the driver. Processes on other nodes are shown if RAY_ADDRESS is set as for the run. The
    stacks are written by C code in each process, so one that hangs in native code is shown too. With py-spy installed
    (rl-launch[profiling]), they also show which thread holds the GIL.

    With --json: {"schema": 1, "processes": [{"name", "pid", "host", "state", "text"}, ...], "missing": [TEXT, ...]}.
    """
    with reported():
        from rl_launch.commands.stacks import stacks_of

        found = stacks_of(path.expanduser(), is_native=is_native)
        if as_json:
            write_json(found.as_json())
        else:
            sys.stdout.write(f"{found.as_text()}\n")


def chaos(
    path: Annotated[Path, argument("RUN", "Directory of a run in progress.")],
    faults: Annotated[
        str,
        option(
            "--faults",
            "rank, rollout-worker, engine, environment, environment-process, node, raylet, gcs, keeper, driver, disk; "
            "stop-rank etc. stop a process and continue it (default: those that the run survives).",
            "NAME,...",
        ),
    ] = "",
    every: Annotated[str, option("--every", "Mean time from a checkpoint to the next fault.", "TIME")] = "30s",
    duration: Annotated[str, option("--for", "Time after which no further fault is done.", "TIME")] = "10m",
    stopped: Annotated[str, option("--stop", "Time that a process is stopped, or the disk is full.", "TIME")] = "20s",
    seed: Annotated[int, option("--seed", "Seed of the order, the moments and the processes.")] = 0,
    resumes: Annotated[
        bool, option("--resume", "Resume the run if a fault ended it, and begin with that if it is not in progress.")
    ] = False,
    is_agreed: Annotated[bool, option("--yes", "Do it to a run that is not a rehearsal.")] = False,
) -> None:
    """Kill and stop processes of a run on a schedule, as exercises, and prove that nothing was lost.

    Only processes of the run itself are touched, by its own records. What was done when is in chaos.jsonl of the run
    directory, with the run's own warnings. Each fault waits until the run has saved a checkpoint after the last one.
    When the run has ended, the proof of rl doctor run is printed.

    The exit code is 1 if the account of prompts or rows does not hold.
    """
    with reported(shows_logs=True):
        from rl_launch.commands.chaos import Schedule, seconds_of
        from rl_launch.commands.chaos import chaos as exercise
        from rl_launch.run_session.directory.exactly_once import described, prove
        from rl_launch.run_session.directory.lock import holder
        from rl_launch.run_session.directory.run_folder import RunFolder

        chosen = tuple(name.strip() for name in faults.split(",") if name.strip())
        times = [seconds_of(each) for each in (every, duration, stopped)]
        schedule = Schedule(chosen, times[0], times[1], seed, times[2])
        number = exercise(path.expanduser(), schedule, resumes=resumes, is_agreed=is_agreed)
        sys.stdout.write(f"{number} faults\n")
        if holder(path.expanduser()) is not None:
            sys.stderr.write(f"next, when the run has ended: rl doctor run {path}\n")
            return
        proof = prove(RunFolder(path.expanduser()))
        sys.stdout.write("".join(f"{line}\n" for line in described(proof)))
        if not proof.holds:
            raise typer.Exit(1)
