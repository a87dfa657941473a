"""The commands of `rl`. Each command imports its modules when it runs, so that help is fast."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rl_core.imports import collect_seldom
from rl_launch.cli import (
    catalog_commands,
    chat_commands,
    config_commands,
    data_commands,
    doctor_commands,
    environment_commands,
    evaluation_commands,
    run_commands,
    stacks_commands,
    submit_commands,
    view_commands,
)
from rl_launch.cli.completion import complete_override, complete_recipe
from rl_launch.cli.failure import UNFINISHED, quiet_without_reader, reported, resumable
from rl_launch.cli.versions import versions
from rl_launch.cli.worker_env_commands import worker_envs


class _Commands(TyperGroup):
    """All commands. A config key that is written as an option is answered with the override."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's own
        ctx.meta[__name__] = tuple(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # typer's own
        try:
            return super().invoke(ctx)
        except typer.BadParameter.__base__ as error:  # type: ignore[misc]  # the error of a wrong use, which has no public name
            option = vars(error).get("option_name")
            if isinstance(option, str):
                from rl_launch.cli.key_options import advice

                error.message += advice(option, ctx.meta[__name__])
            raise


app = typer.Typer(
    name="rl",
    cls=_Commands,
    epilog="rl recipes lists the recipes, and rl init RECIPE copies one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_commands.app, name="config", help="Inspect configs without running them.")
catalog_commands.environments.command("run")(environment_commands.run)
catalog_commands.environments.command("check")(environment_commands.check)
app.add_typer(
    catalog_commands.environments, name="env", help="List, run and check environments, which score completions."
)
catalog_commands.data.command("show")(data_commands.show)
app.add_typer(
    catalog_commands.data, name="data", help="List and show datasets, which provide prompts and conversations."
)
app.command("recipes")(catalog_commands.recipes)
app.command("init")(catalog_commands.init)
app.add_typer(submit_commands.app, name="submit", help="Run a recipe as a job of a queue, and follow or end the job.")
app.add_typer(doctor_commands.app, name="doctor", help="Check this machine: rl doctor [RECIPE] [KEY=VALUE]...")

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Config keys to set, such as grpo.seed=7 or run_dir=DIR.",
        autocompletion=complete_override,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print more log messages.")]


def _show_versions(asked: bool) -> None:
    if asked:
        found = list(versions())
        width = max(len(name) for name, _ in found)
        sys.stdout.write("".join(f"{name:{width}}  {version}\n" for name, version in found))
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_versions, is_eager=True, help="Print the installed versions.")
    ] = False,
) -> None:
    """Post-training of language models."""


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|FILE.yaml|RUN",
            help="Name of a recipe, a YAML file, or a run directory to resume. Optional with --from.",
            autocompletion=complete_recipe,
        ),
    ] = "",
    overrides: Overrides = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="RUN[:STEP]", help="Branch from a checkpoint of another run (default: its newest one)."
        ),
    ] = "",
    fresh: Annotated[bool, typer.Option("--fresh", help="Fail if run_dir already contains a run.")] = False,
    verbose: Verbose = False,
) -> None:
    """Train a model with a recipe. If run_dir contains a run with the same config, that run is resumed.

    With --from, a new run starts from the weights, optimizer state, step and data position of another run's checkpoint.

    The exit code is 75 if the run has ended before its last step and the same command resumes it: after a signal, at
    the time limit, if a lost node was not replaced, or if Ray on this machine was killed.
    """
    with reported() as failure, resumable():
        from rl_launch.commands.start import run_of

        given = run_of(recipe, overrides or (), start)
        failure.run_dir = given.run_dir

        from rl_launch.commands.train import train as run
        from rl_launch.session import show_logs

        show_logs(verbose=verbose)
        outcome = run(given.plan, run_dir=given.run_dir, title=given.name, fresh=fresh, branch_point=given.branch_point)
        sys.stdout.write(f"{given.run_dir}\n")
        sys.stderr.write(f"next: rl show {shlex.quote(str(given.run_dir))}, or rl view for all runs in a browser\n")
        if not outcome.is_finished:
            raise typer.Exit(UNFINISHED)


app.command("eval")(evaluation_commands.evaluate)
app.command("compare")(evaluation_commands.compare)
app.command()(chat_commands.chat)


app.command()(run_commands.runs)
app.command()(run_commands.label)
app.command()(run_commands.show)
app.command()(view_commands.view)
app.command()(stacks_commands.stacks)
app.command()(worker_envs)
app.command()(run_commands.sweep)


@app.command()
def push(
    source: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run (for its newest checkpoint), RUN:STEP, RUN:best or a checkpoint."),
    ],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="hf://OWNER/NAME, s3://BUCKET/FOLDER, gs://... or file:///FOLDER.")
    ],
    adapter: Annotated[bool, typer.Option("--adapter", help="Push only the adapters.")] = False,
    public: Annotated[bool, typer.Option("--public", help="Make a new repository on the hub public.")] = False,
) -> None:
    """Push the Hugging Face files of a checkpoint, with a model card, to the Hugging Face hub or a store.

    To push checkpoints during a run, set checkpointing.push_to.
    """
    with reported():
        from rl_launch.commands.push import push as run
        from rl_launch.session import show_logs

        show_logs()
        sys.stdout.write(f"{run(source, url, adapter=adapter, private=not public)}\n")


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint, a run (its newest checkpoint), an adapter, or a model, including pytorch_model.bin.",
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A new folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to set, such as cluster.cpu_ranks_per_node=2."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="BACKEND|hf",
            help="Write a checkpoint for this training backend, or Hugging Face files (hf).",
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapters, or with --to keep them separate.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Load the result and compare its logprobs with the source.")
    ] = True,
    verify_with: Annotated[
        str | None,
        typer.Option("--verify-with", metavar="BACKEND", help="Verify the Hugging Face files with this backend."),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="FORMAT",
            help="Quantise linear layers of Hugging Face files for vLLM: int4, mxfp4 or float8.",
        ),
    ] = None,
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Inputs that share a scale with int4; 128 if not given.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="NAME", help="Layer that --quantize leaves out, such as o_proj; repeatable."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="DTYPE",
            help="Dtype that --quantize rounds weights to first, their policy.precision in training; by default the "
            "files' own.",
        ),
    ] = None,
) -> None:
    """Convert between checkpoints of training backends, adapters and Hugging Face files, and verify the result.

    Writes Hugging Face files, or with --to a checkpoint of a training backend. Weights in pytorch_model.bin become
    safetensors, without running code from the pickle. --quantize writes Hugging Face files in which linear layers have
    few bits, as vLLM reads them.
    """
    with reported():
        from rl_core.errors import ConfigError
        from rl_launch.commands.convert import HUGGING_FACE, Verification, named_source, to_checkpoint, to_hugging_face
        from rl_launch.session import show_logs

        if quantize is not None:
            if to is not None or adapter or verify_with is not None or not verify:
                raise ConfigError("--quantize cannot be combined with --to, --adapter, --no-verify or --verify-with")
            _quantize(source, target.expanduser(), quantize, group_size, exclude or [], dtype or "", overrides or [])
            return
        if group_size is not None or exclude:
            raise ConfigError("--group-size and --exclude have no effect without --quantize")
        if dtype is not None:
            raise ConfigError(
                "--dtype has no effect without --quantize. Set policy.precision for the dtype of the files"
            )
        if verify_with is not None and not verify:
            raise ConfigError("--verify-with and --no-verify cannot be combined")
        show_logs()
        verification = Verification(verify, verify_with)
        if to is None or to == HUGGING_FACE:
            folder = Path(named_source(source)).expanduser()
            to_hugging_face(folder, target.expanduser(), overrides or (), adapter=adapter, verification=verification)
        else:
            found = named_source(source)
            to_checkpoint(found, target.expanduser(), to, overrides or (), adapter=adapter, verification=verification)
        sys.stdout.write(f"{target}\n")


def _quantize(
    source: str, target: Path, name: str, group_size: int | None, exclude: list[str], dtype: str, overrides: list[str]
) -> None:
    from rl_core.errors import ConfigError
    from rl_launch.commands.convert import to_quantized
    from rl_launch.commands.convert_quantized import Quantization
    from rl_launch.model_files.run_models import model_of_run
    from rl_launch.session import show_logs

    if group_size is not None and name != "int4":
        raise ConfigError(f"--group-size has no effect with --quantize {name}")
    show_logs()
    found = model_of_run(source) or Path(source).expanduser()
    to_quantized(found, target, Quantization(name, group_size or 128, tuple(exclude), dtype), overrides)
    sys.stdout.write(f"{target}\n")


@app.command()
def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[run_dir=DIR] [cluster.KEY=VALUE]...")] = None,
) -> None:
    """Train a tiny model on sums with SFT and GRPO, and show what it learned. Takes a few minutes on any machine."""
    with reported() as failure:
        from rl_core.errors import ConfigError
        from rl_launch.session import show_logs

        run_dir, cluster = Path("runs/quickstart"), []
        for override in overrides or ():
            key, _, value = override.partition("=")
            if key == "run_dir" and value:
                run_dir = Path(value).expanduser()
            elif key.startswith("cluster.") and value:
                cluster.append(override)
            else:
                raise ConfigError(f"got {override!r}; allowed: run_dir=DIR and cluster.KEY=VALUE")
        show_logs()
        failure.run_dir = run_dir

        from rl_launch.commands.quickstart import run

        run(run_dir, cluster)


def main() -> None:
    """Entry point of `rl`."""
    # imports make hundreds of thousands of objects that stay, which takes a fifth of their time at Python's threshold
    collect_seldom()
    with quiet_without_reader():
        app()
