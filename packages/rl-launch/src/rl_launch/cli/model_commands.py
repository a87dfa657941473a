"""`rl eval`, `rl compare`, `rl judge`, `rl chat`, `rl push` and `rl convert`: commands about models, judges and
checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_launch.cli.completion import complete_tasks
from rl_launch.cli.failure import reported
from rl_launch.cli.options import AsJson, Verbose, argument, keys, named, option, write_json

if TYPE_CHECKING:
    from rl_algos.evaluation.estimates import ModelComparison

Result = Annotated[Path, argument(None, "Folder of an evaluation, or its eval.json.")]


def evaluate(
    recipe: Annotated[
        str,
        named(
            "MODEL|RUN[:STEP]|RECIPE|FILE.yaml",
            "A Hugging Face folder or hub name, a run (its newest checkpoint), a recipe, or an evaluation to resume.",
        ),
    ],
    overrides: Annotated[
        list[str] | None, keys("Config keys to set, such as eval.num_samples=8 or run_dir=DIR.")
    ] = None,
    tasks: Annotated[
        str,
        option(
            "--tasks",
            "Tasks to score, such as gsm8k,reasoning_gym/chain_sum, and files of data, such as problems.jsonl or "
            "NAME=problems.jsonl (default: the run's validation data).",
            "NAME|FILE,...",
            autocompletion=complete_tasks,
        ),
    ] = "",
    against: Annotated[Path | None, option("--against", "Compare with an earlier evaluation.", "RESULT")] = None,
    contamination: Annotated[
        bool, option("--contamination", "Find the prompts that the training rows of the run contain.")
    ] = False,
    follows: Annotated[
        bool, option("--follow", "Evaluate every checkpoint of a run as it is saved, until the run ends.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Score a model on tasks, or on a run's validation data, without training it.

    The results are written to run_dir (default: a new folder below runs): eval.json, rollouts.jsonl and logs. To resume
    an interrupted evaluation, use rl eval DIR. With --follow, they are in eval-RUN next to the run, or in run_dir, with
    a folder for each checkpoint, and the same command continues there. For all keys of eval, use rl config explain
    RECIPE eval.

    Rows of a file are scored by the environment in the row, the environment of the run, or eval.default.env_name:
    rl eval MODEL --tasks problems.jsonl eval.default.env_name=math eval.num_samples=4 eval.temperature=0.8

    With --json: {"schema": 1, "mean_reward", "num_prompts", "num_rollouts", "num_failed", "path", "tasks": {TASK:
    {"estimates": {"mean": {"value", "low", "high"}, "pass@K": ..., "cons@K": ...}, "num_truncated", ...}},
    "comparison": {TASK: as rl compare}}.
    """
    with reported() as failure:
        from rl_launch.evaluation.result import EvaluationResult, compare_results
        from rl_launch.evaluation.source import evaluation_of
        from rl_launch.run_session import show_logs

        earlier = None if against is None else EvaluationResult.read(against)
        chosen = [name.strip() for name in tasks.split(",") if name.strip()]
        show_logs(verbose=verbose)
        if follows:
            _follow(recipe, overrides or (), chosen, contamination=contamination, alone=not as_json and earlier is None)
            return
        given = evaluation_of(recipe, overrides or (), chosen)
        failure.run_dir = given.folder

        from rl_launch.commands.evaluate import evaluate as run

        result = run(given.plan, folder=given.folder, trained=given.training() if contamination else None)
        compared = None if earlier is None else compare_results(earlier, result)
        if as_json:
            found = {"schema": 1, "mean_reward": result.mean_reward, **result.counts, "path": str(result.path)}
            found["tasks"] = {name: asdict(summary) for name, summary in result.tasks.items()}
            if compared is not None:
                found["comparison"] = _as_json(compared)
            write_json(found)
            return
        from rich.console import Console

        from rl_launch.evaluation.result import show_comparison, show_result

        show_result(result, Console())
        if earlier is not None and compared is not None:
            show_comparison(earlier, result, compared, Console())


def _follow(run: str, overrides: Sequence[str], tasks: Sequence[str], *, contamination: bool, alone: bool) -> None:
    from rich.console import Console

    from rl_core.errors import ConfigError
    from rl_launch.commands.evaluate import follow
    from rl_launch.evaluation.result import show_result

    if not alone:
        raise ConfigError("--follow has a result for every checkpoint. Remove --json or --against, and use rl compare")
    for result in follow(run, overrides, tasks, contamination=contamination):
        show_result(result, Console())


def compare(first: Result, second: Result, as_json: AsJson = False) -> None:
    """Compare two evaluations on their common prompts: difference, interval and significance by task.

    With --json: {"schema": 1, "tasks": {TASK: {"num_prompts", "first", "second", "difference": {"value", "low",
    "high"}, "p_value", "is_significant", "num_better", "num_worse", "num_only_first", "num_only_second",
    "confidence"}}}.
    """
    with reported():
        from rl_launch.evaluation.result import EvaluationResult, compare_results

        results = EvaluationResult.read(first), EvaluationResult.read(second)
        compared = compare_results(*results)
        if as_json:
            write_json({"schema": 1, "tasks": _as_json(compared)})
            return
        from rich.console import Console

        from rl_launch.evaluation.result import show_comparison

        show_comparison(*results, compared, Console())


def _as_json(compared: Mapping[str, ModelComparison]) -> dict[str, Any]:
    return {name: {**asdict(each), "is_significant": each.is_significant} for name, each in compared.items()}


judges = typer.Typer(no_args_is_help=True)


@judges.command("agree")
def agree(
    file: Annotated[Path, argument("FILE", "JSONL with responses and the labels of people.")],
    recipe: Annotated[str, named("RECIPE|FILE.yaml|RUN", "A config with the judge and a reward that it gives.")],
    overrides: Annotated[list[str] | None, keys("Config keys to set, such as judges.critic.model=NAME.")] = None,
    reward: Annotated[
        str, option("--reward", "The reward, if the config has several by judges.", "ENVIRONMENT.NAME")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Compare a judge behind a URL with the labels of people: accuracy, Cohen's kappa, and its bias by length and by
    order, each with a confidence interval.

    Rows have a "prompt" and one of: "chosen" and "rejected"; two "responses" and "better" (1, 2 or "equal"); a
    "response" and a "label" (a number, or true or false). All fields of a row can be in the rubric. Verdicts are kept
    in the cache of runs, so nothing is asked twice.

    With --json: {"schema": 1, "reward", "num_rows", "num_failed", "failures", "accuracy": {"value", "low", "high"},
    "kappa", "length_bias", "order_changes", "first_bias"}; null for an estimate that is not defined.
    """
    with reported():
        from rl_launch.commands.environments.judges import agreement_json, agreement_text, judge_agreement

        key, found = judge_agreement(file.expanduser(), recipe, overrides or (), reward)
        if as_json:
            write_json(agreement_json(key, found))
        else:
            sys.stdout.write(agreement_text(key, found))
        if not found.num_rows:
            raise typer.Exit(1)


def chat(
    source: Annotated[
        str,
        named(
            "RUN|MODEL",
            "A run (its newest checkpoint), RUN:STEP, RUN:best, a checkpoint, a model folder or a hub name.",
        ),
    ],
    overrides: Annotated[list[str] | None, keys("Config keys to set, such as policy.generation.backend=hf.")] = None,
    system: Annotated[
        str | None, option("--system", "System message (default: the one of the run's training data).", "TEXT")
    ] = None,
    temperature: Annotated[
        float | None,
        option(
            "--temperature", "Sampling temperature; 0 is greedy (default: policy.generation.val_temperature).", min=0
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        option("--max-new-tokens", "Maximum number of tokens (default: policy.generation.max_new_tokens).", min=1),
    ] = None,
    seed: Annotated[int, option("--seed", "Sampling seed.", min=0)] = 0,
    once: Annotated[str | None, option("--once", "Send this message, print the answer, and exit.", "TEXT")] = None,
    verbose: Verbose = False,
) -> None:
    """Chat with a model, with the generator and the chat template of its rollouts.

    /reset clears the conversation, /raw shows its tokens as text, /system TEXT replaces the system message, /help lists
    the commands. Ctrl-C discards an answer, Ctrl-D exits.
    """
    with reported(shows_logs=True, verbose=verbose):
        from rl_launch.commands.chat import AnswerFailed, ChatLoop, chat_plan, serving, system_prompt_of

        config = chat_plan(source, overrides or [])
        said = system_prompt_of(source) if system is None else system

        # imports transformers, which takes a second
        from rl_algos.rollouts.worker.chat import Chat
        from rl_algos.rollouts.worker.dialogue import Dialogue

        turns = 1 if once is not None else 2
        with serving(
            config, temperature=temperature, max_new_tokens=max_new_tokens, num_turns=turns, seed=seed
        ) as model:
            dialogue = Dialogue(model.tokenizer, Chat(model.tokenizer, model.tool_format), system=said)
            loop = ChatLoop(dialogue, model.answer, _print, _note, _waiting, model.max_tokens)
            if once is None:
                if sys.stdin.isatty():
                    _note(f"{model.name}; /help lists the commands, Ctrl-D ends")
                loop.run(_lines())
                return
            try:
                loop.ask(once)
            except AnswerFailed as error:
                _note(f"error: {error}")
                raise typer.Exit(1) from None


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
    from rl_launch.run_session.tracking.log_output import shared_console

    console = shared_console()
    return console.status("") if console.is_terminal else nullcontext()


def push(
    source: Annotated[str, argument("RUN", "A run (for its newest checkpoint), RUN:STEP, RUN:best or a checkpoint.")],
    url: Annotated[str, argument("URL", "hf://OWNER/NAME, s3://BUCKET/FOLDER, gs://... or file:///FOLDER.")],
    adapter: Annotated[bool, option("--adapter", "Push only the adapters.")] = False,
    public: Annotated[bool, option("--public", "Make a new repository on the hub public.")] = False,
) -> None:
    """Push the Hugging Face files of a checkpoint, with a model card, to the Hugging Face hub or a store.

    To push checkpoints during a run, set checkpointing.push_to.
    """
    with reported(shows_logs=True):
        from rl_launch.push.pusher import push as run

        sys.stdout.write(f"{run(source, url, adapter=adapter, private=not public)}\n")


Source = Annotated[
    str,
    argument(
        "SOURCE", "A checkpoint, a run (its newest checkpoint), an adapter, or a model, including pytorch_model.bin."
    ),
]
Backend = Annotated[
    str | None,
    option("--to", "Write a checkpoint for this training backend, or Hugging Face files (hf).", "BACKEND|hf"),
]
Quantize = Annotated[
    str | None,
    option("--quantize", "Quantise linear layers of Hugging Face files for vLLM: int4, mxfp4 or float8.", "FORMAT"),
]
Exclude = Annotated[
    list[str] | None, option("--exclude", "Layer that --quantize leaves out, such as o_proj; repeatable.", "NAME")
]
Dtype = Annotated[
    str | None,
    option(
        "--dtype",
        "Dtype that --quantize rounds weights to first, their policy.precision in training; by default the files' own.",
        "DTYPE",
    ),
]


def convert(
    source: Source,
    target: Annotated[Path, argument("TARGET", "A new folder.")],
    overrides: Annotated[
        list[str] | None, argument("[KEY=VALUE]...", "Config keys to set, such as cluster.cpu_ranks_per_node=2.")
    ] = None,
    to: Backend = None,
    adapter: Annotated[bool, option("--adapter", "Write only the adapters, or with --to keep them separate.")] = False,
    verify: Annotated[
        bool, option("--verify/--no-verify", "Load the result and compare its logprobs with the source.")
    ] = True,
    verify_with: Annotated[
        str | None, option("--verify-with", "Verify the Hugging Face files with this backend.", "BACKEND")
    ] = None,
    quantize: Quantize = None,
    group_size: Annotated[
        int | None, option("--group-size", "Inputs that share a scale with int4; 128 if not given.")
    ] = None,
    exclude: Exclude = None,
    dtype: Dtype = None,
) -> None:
    """Convert between checkpoints of training backends, adapters and Hugging Face files, and verify the result.

    Writes Hugging Face files, or with --to a checkpoint of a training backend. Weights in pytorch_model.bin become
    safetensors, without running code from the pickle. So does a checkpoint of Megatron-LM or Megatron Bridge
    (torch_dist); policy.model_name=MODEL gives its config and tokenizer. --quantize writes Hugging Face files whose
    linear layers have few bits, as vLLM reads them.
    """
    with reported(shows_logs=True):
        from rl_launch.commands.conversion.convert import convert as run

        run(
            source,
            target.expanduser(),
            overrides or (),
            to=to,
            adapter=adapter,
            verify=verify,
            verify_with=verify_with,
            quantize=quantize,
            group_size=group_size,
            exclude=exclude or (),
            dtype=dtype,
        )
        sys.stdout.write(f"{target}\n")
