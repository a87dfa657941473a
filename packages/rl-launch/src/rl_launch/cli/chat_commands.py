"""`rl chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import typer

from rl_launch.cli.completion import complete_override, complete_recipe
from rl_launch.cli.failure import reported


def chat(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="A run (its newest checkpoint), RUN:STEP, RUN:best, a checkpoint, a model folder or a hub name.",
            autocompletion=complete_recipe,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Config keys to set, such as policy.generation.backend=hf.",
            autocompletion=complete_override,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="System message (default: the one of the run's training data)."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            min=0,
            help="Sampling temperature; 0 is greedy (default: policy.generation.val_temperature).",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", min=1, help="Maximum number of tokens (default: policy.generation.max_new_tokens)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Sampling seed.")] = 0,
    once: Annotated[
        str | None, typer.Option("--once", metavar="TEXT", help="Send this message, print the answer, and exit.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print more log messages.")] = False,
) -> None:
    """Chat with a model, with the generator and the chat template of its rollouts.

    /reset clears the conversation, /raw shows its tokens as text, /system TEXT replaces the system message, /help lists
    the commands. Ctrl-C discards an answer, Ctrl-D exits.
    """
    with reported():
        from rl_launch.session import show_logs

        show_logs(verbose=verbose)

        from rl_launch.commands.chat import AnswerFailed, Sampling, chat_plan, serving, system_prompt_of

        config = chat_plan(source, overrides or [])
        said = system_prompt_of(source) if system is None else system

        # imports transformers, which takes a second
        from rl_algos.rollouts.worker.chat import Chat
        from rl_algos.rollouts.worker.dialogue import Dialogue
        from rl_launch.commands.chat_loop import ChatLoop

        sampling = Sampling(temperature, max_new_tokens)
        with serving(config, sampling, num_turns=1 if once is not None else 2, seed=seed) as model:
            dialogue = Dialogue(model.tokenizer, Chat(model.tokenizer, model.tool_format), system=said)
            loop = ChatLoop(dialogue, model.answer, _print, _note, _waiting, model.max_tokens)
            if once is not None:
                try:
                    loop.ask(once)
                except AnswerFailed as error:
                    _note(f"error: {error}")
                    raise typer.Exit(1) from None
                return
            if sys.stdin.isatty():
                _note(f"{model.name}; /help lists the commands, Ctrl-D ends")
            loop.run(_lines())


def _lines() -> Iterator[str]:
    """Yield lines from the keyboard until Ctrl-D or Ctrl-C, or lines from a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # for `input`, which edits lines by it

    while True:
        try:
            yield input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _waiting() -> AbstractContextManager[object]:
    from rl_launch.session.tracking.log_output import shared_console

    console = shared_console()
    return console.status("") if console.is_terminal else nullcontext()
