"""`rl env run`: one rollout of an environment, with completions of a person, a file or a model."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rl_algos.rollouts.setup import training_sampling
from rl_algos.rollouts.worker.conversation_checks import check_turns
from rl_algos.rollouts.worker.programs import program_named
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.rollouts.worker.written import make_tokenizer
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_algos.tool_calls.formats import FORMATS
from rl_core.environments.pool import EnvironmentPool
from rl_core.errors import ConfigError, WorkerError
from rl_core.model_config import TokenizerConfig
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult
from rl_core.rollouts.generation import Placement, SamplingParams
from rl_core.rollouts.group import RECORD
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Message, Prompt
from rl_launch.cluster.device import check_devices
from rl_launch.cluster.local_gpus import local_gpus
from rl_launch.commands.completion_input import CompletionInput
from rl_launch.commands.environment_source import GivenEnvironment, GivenRow
from rl_launch.commands.train import with_local_models
from rl_launch.model_files.model_folder import check_models
from rl_launch.run_config.inputs import model_names
from rl_launch.run_config.reading import read_plan
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.spec import worker_env

MAX_BYTES = 2**20
"""Maximum number of bytes of a conversation whose completions are typed."""
TURNS_KEY = "--max-turns"


@dataclass(frozen=True)
class Player:
    """Who plays the policy's part.

    Args:
        spec: Spec of the rollout worker.
        tokenizer: Tokenizer that the worker loads.
        sampling: Sampling parameters of every completion.
        held: What is closed when the rollout is over.
    """

    spec: RolloutWorkerSpec
    tokenizer: Any
    sampling: SamplingParams
    held: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True)
class Course:
    """The course of the rollout.

    Args:
        program: As `rollout_program` names it.
        max_turns: Maximum number of turns.
        tool_format: Format of calls; the default is the format of the chat template, or the Hermes format for written
            completions.
    """

    program: str = "multi_turn"
    max_turns: int = 20
    tool_format: str | None = None


def typed_player(course: Course) -> Player:
    """A player whose completions are typed, or come by a pipe."""
    return _written_player(sys.stdin.fileno(), course, ExitStack())


def scripted_player(path: Path, course: Course) -> Player:
    """A player whose completions are in a file.

    Raises:
        ConfigError: If it cannot be read.
    """
    held = ExitStack()
    try:
        file = held.enter_context(path.open("rb"))
    except OSError as error:
        raise ConfigError(f"--scripted: {path} cannot be read: {error.strerror}") from None
    return _written_player(file.fileno(), course, held)


def _written_player(descriptor: int, course: Course, held: ExitStack) -> Player:
    tokenizer = make_tokenizer()
    folder = held.enter_context(tempfile.TemporaryDirectory())
    tokenizer.save_pretrained(folder)
    spec = RolloutWorkerSpec(
        "rl_algos.rollouts.worker.written:WrittenGenerator",
        (CompletionInput(descriptor).next, tokenizer),
        _program(course),
        {"max_turns": course.max_turns, "max_tokens": MAX_BYTES},
        _tokenizer_config(folder, course),
        "",
    )
    sampling = SamplingParams(max_new_tokens=MAX_BYTES - 1, stop_token_ids=(tokenizer.eos_token_id,))
    return Player(spec, tokenizer, sampling, held)


def model_player(model: str, overrides: Sequence[str], course: Course, given: GivenEnvironment) -> Player:
    """A player that samples from a model, in this process.

    Args:
        model: A folder, or a name of the hub.
        overrides: Keys of `policy` and `cluster`.
        course: Program, limit of turns and tool format of the rollout.
        given: Environment, whose tools the model can call.

    Raises:
        ConfigError: If the model or a key does not exist, or what the generator needs is not installed here.
    """
    values: dict[str, Any] = {"model_name": model, "generation": {"backend": "hf"}}
    if course.tool_format is not None:
        values["tokenizer"] = {"tool_format": course.tool_format}
    plan = read_plan({"algorithm": "evaluation", "policy": values}, overrides)
    check_devices(plan.config.cluster)
    check_models(model_names(plan))
    plan = with_local_models(plan)
    config, backend, device = plan.config, plan.backends.generation, plan.device
    assert backend is not None, "an evaluation generates"
    if problems := missing(worker_env(backend.plugin.requirement, device.extras)):
        raise ConfigError(f"the generator {backend.plugin.name} cannot be used here: {'; '.join(problems)}")
    gpus = (device.visible() or ("0",))[:1] if device.has_gpus and local_gpus() else ()
    policy = config.policy
    tokenizer = load_tokenizer(policy.tokenizer, policy.model_name, policy.vision)
    tools = {given.instance.name: given.tools} if given.tools else {}
    ends = check_turns(
        policy,
        tokenizer,
        tools,
        program=course.program,
        max_turns=course.max_turns,
        turns_key=TURNS_KEY,
        renders_anew=False,
    )
    spec = RolloutWorkerSpec(
        backend.plugin.worker,
        (backend.config, backend.backend, backend.model, Placement(device.name, gpus)),
        _program(course),
        {"max_turns": course.max_turns, "max_tokens": policy.max_total_sequence_length},
        policy.tokenizer,
        policy.model_name,
    )
    return Player(spec, tokenizer, training_sampling(policy.generation, ends.sampled))


def play(given: GivenEnvironment, row: GivenRow, player: Player, output: TextIO, *, seed: int = 0) -> Mapping[str, Any]:
    """Play one rollout, as a run would, and show it as it goes.

    Args:
        given: Environment of the rollout.
        row: Row that gives the prompt.
        player: Source of completions; it is closed afterwards.
        output: Stream to which the conversation is written.
        seed: Sampling seed.

    Returns:
        The record of the rollout, as `rollouts/step_<n>.jsonl` has it.

    Raises:
        ConfigError: If the environment cannot be built.
        WorkerDied: If its process ended.
    """

    def show(text: str) -> None:
        output.write(text)
        output.flush()

    with player.held:
        return asyncio.run(_play(given, row, player, show, seed))


async def _play(
    given: GivenEnvironment, row: GivenRow, player: Player, show: Callable[[str], None], seed: int
) -> Mapping[str, Any]:
    name, config = given.instance.name, given.instance.config
    pool = EnvironmentPool.of(
        given.instance.environment, config.model_copy(update={"num_workers": 1}), name=given.instance.label
    )
    worker = RolloutWorker(player.spec, {name: ShownEnvironment(pool, show)})
    try:
        try:
            await pool.start()
        except WorkerError as error:
            kind = "" if error.kind == ValueError.__name__ else f"{error.kind}: "
            raise ConfigError(f"environment {given.instance.label} cannot be built: {kind}{error.message}") from None
        await worker.start()
        show(_tools(given.tools))
        for message in row.messages:
            show(_message(message))
        tokens = encode_prompt(player.tokenizer, row.messages, given.tools)
        prompt = Prompt(row.id, row.messages, tokens, name, row.fields, "", row.place, tuple(given.tools), row.is_text)
        await worker.begin([(0, RolloutTask(prompt, player.sampling, (seed,)))])
        _, _, records = await worker.finished()
        record: dict[str, Any] = json.loads(bytes(records.ragged(RECORD)[0]))
    finally:
        await worker.close()
        await pool.close()
    show(_end(record))
    return record


class ShownEnvironment:
    """The client of an environment, which shows every turn and its answer.

    Args:
        pool: Pool of the environment.
        show: Is given lines.
    """

    def __init__(self, pool: EnvironmentPool, show: Callable[[str], None]) -> None:
        self._pool = pool
        self._show = show

    async def step(self, conversation: Conversation) -> StepResult | EnvironmentFailure:
        """See `rl_algos.rollouts.worker.conversations.EnvironmentClient`."""
        self._show(_turn(conversation))
        [outcome] = await self._pool.step([conversation])
        if isinstance(outcome, StepResult):
            self._show(_answer(outcome))
        return outcome

    async def abandon(self, conversation_ids: Sequence[str]) -> None:
        """See `rl_algos.rollouts.worker.conversations.EnvironmentClient`."""
        await self._pool.abandon(conversation_ids)


def _program(course: Course) -> Any:
    try:
        return program_named(course.program)
    except ValueError as error:
        raise ConfigError(f"--program: {error}") from None


def _tokenizer_config(folder: str, course: Course) -> TokenizerConfig:
    try:
        return TokenizerConfig(name=folder, tool_format=course.tool_format)  # type: ignore[arg-type]  # it is checked
    except ValueError:
        raise ConfigError(f"--tool-format: got {course.tool_format!r}; use one of {', '.join(FORMATS)}") from None


def _tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The signatures of tools."""
    lines = []
    for tool in tools:
        function = tool["function"]
        named = ", ".join(
            f"{name}: {schema.get('type', 'any')}"
            for name, schema in function.get("parameters", {}).get("properties", {}).items()
        )
        lines.append(f"tool {function['name']}({named}): {function.get('description', '')}\n")
    return "".join(lines)


def _message(message: Message) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"[{message.get('role')}]\n{text}\n"


def _turn(conversation: Conversation) -> str:
    lines = [f"[turn {conversation.turn + 1}]", conversation.completion]
    for call in conversation.tool_calls:
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
        lines.append(f"call that cannot be read: {call.error}" if call.error else f"call of {call.name}: {arguments}")
    if conversation.truncated:
        lines.append("(cut off at the token limit)")
    return "\n".join(lines) + "\n"


def _answer(result: StepResult) -> str:
    lines = [_rewards(result.rewards())]
    lines += [_message(message).rstrip("\n") for message in result.observation]
    if result.info:
        lines.append(f"info: {', '.join(f'{name} {value}' for name, value in result.info.items())}")
    if result.stop_strings:
        lines.append(f"stop strings of the next turn: {', '.join(map(repr, result.stop_strings))}")
    if result.max_new_tokens is not None:
        lines.append(f"maximum number of tokens of the next turn: {result.max_new_tokens}")
    return "\n".join(lines) + "\n"


def _rewards(rewards: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in rewards.items() if name != "reward")
    return f"reward {rewards.get('reward', 0.0):g}" + (f" ({parts})" if parts else "")


def _end(record: Mapping[str, Any]) -> str:
    if record["status"] == "failed":
        return f"[failed]\n{record['failure']}\n"
    turns = len(record["turns"])
    how = "cut off by a limit" if record["status"] == "truncated" else "ended by the environment"
    return f"[end] {turns} turn{'s' * (turns != 1)}, {how}; {_rewards(record['rewards'])}\n"
