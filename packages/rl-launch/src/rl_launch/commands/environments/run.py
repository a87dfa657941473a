"""`rl env run`: one rollout of an environment, with completions of a person, a file or a model."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rl_algos.rollouts.config import RolloutConfig
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
from rl_launch.cluster.machine import local_gpus
from rl_launch.commands.environments.source import GivenEnvironment, GivenRow
from rl_launch.commands.train import with_local_models
from rl_launch.model_files.model_folder import check_models
from rl_launch.run_config.inputs import model_names
from rl_launch.run_config.reading import read_plan
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.spec import worker_env

MAX_BYTES = 2**20
"""Maximum number of bytes of a conversation whose completions are typed."""
TURNS_KEY = "--max-turns"

END = "."
"""A line with nothing else ends a completion; the last one may end with the input."""

_READ_BYTES = 2**16


@dataclass(frozen=True)
class Player:
    """The source of the policy's completions.

    Args:
        spec: Spec of the rollout worker.
        tokenizer: Tokenizer that the worker loads.
        sampling: Sampling parameters of every completion.
        held: Resources that are closed when the rollout is over.
    """

    spec: RolloutWorkerSpec
    tokenizer: Any
    sampling: SamplingParams
    held: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True)
class Course:
    """The course of the rollout.

    Args:
        program: Name of the program, as in the key `rollout_program`.
        max_turns: Maximum number of turns.
        tool_format: Format of calls; the default is the format of the chat template, or the Hermes format for written
            completions.
    """

    program: str = "multi_turn"
    max_turns: int = 20
    tool_format: str | None = None

    def worker_program(self) -> Any:
        """Return the program of the rollout worker."""
        try:
            return program_named(self.program)
        except ValueError as error:
            raise ConfigError(f"--program: {error}") from None


def written_player(path: Path | None, course: Course) -> Player:
    """Return a player whose completions are in a file; without a file they are typed, or come by a pipe.

    Raises:
        ConfigError: If the file cannot be read.
    """
    held = ExitStack()
    try:
        source = sys.stdin if path is None else held.enter_context(path.open("rb"))
    except OSError as error:
        raise ConfigError(f"--scripted: {path} cannot be read: {error.strerror}") from None
    tokenizer = make_tokenizer()
    folder = held.enter_context(tempfile.TemporaryDirectory())
    tokenizer.save_pretrained(folder)
    program = course.worker_program()
    try:
        config = TokenizerConfig(name=folder, tool_format=course.tool_format)  # type: ignore[arg-type]  # it is checked
    except ValueError:
        raise ConfigError(f"--tool-format: got {course.tool_format!r}; use one of {', '.join(FORMATS)}") from None
    spec = RolloutWorkerSpec(
        "rl_algos.rollouts.worker.written:WrittenGenerator",
        (CompletionInput(source.fileno()).next, tokenizer),
        program,
        {"max_turns": course.max_turns, "max_tokens": MAX_BYTES},
        config,
        "",
    )
    sampling = SamplingParams(max_new_tokens=MAX_BYTES - 1, stop_token_ids=(tokenizer.eos_token_id,))
    return Player(spec, tokenizer, sampling, held)


def model_player(model: str, overrides: Sequence[str], course: Course, given: GivenEnvironment) -> Player:
    """Return a player that samples from a model, in this process.

    Args:
        model: A folder, or a name of the hub.
        overrides: Keys of `policy` and `cluster`.
        course: Program, limit of turns and tool format of the rollout.
        given: Environment, whose tools the model can call.

    Raises:
        ConfigError: If the model or a key does not exist, or a package that the generator needs is not installed here.
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
    turns = RolloutConfig(max_rollout_turns=course.max_turns, rollout_program=course.program)
    ends = check_turns(policy, turns, tokenizer, tools, turns_key=TURNS_KEY)
    spec = RolloutWorkerSpec(
        backend.plugin.worker,
        (backend.config, backend.backend, backend.model, Placement(device.name, gpus)),
        course.worker_program(),
        {"max_turns": course.max_turns, "max_tokens": policy.max_total_sequence_length},
        policy.tokenizer,
        policy.model_name,
    )
    return Player(spec, tokenizer, training_sampling(policy.generation, ends.sampled))


def play(given: GivenEnvironment, row: GivenRow, player: Player, output: TextIO, *, seed: int = 0) -> Mapping[str, Any]:
    """Play one rollout, as a run would, and show it as it proceeds.

    Args:
        given: Environment of the rollout.
        row: Row that gives the prompt.
        player: Source of completions; it is closed afterwards.
        output: Stream for the conversation.
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
    instance = given.instance
    config = instance.config.model_copy(update={"num_workers": 1})
    pool = EnvironmentPool.of(instance.environment, config, name=instance.label)
    worker = RolloutWorker(player.spec, {instance.name: _ShownEnvironment(pool, show)})
    try:
        try:
            await pool.start()
        except WorkerError as error:
            kind = "" if error.kind == ValueError.__name__ else f"{error.kind}: "
            raise ConfigError(f"environment {instance.label} cannot be built: {kind}{error.message}") from None
        await worker.start()
        for function in (tool["function"] for tool in given.tools):
            parameters = function.get("parameters", {}).get("properties", {}).items()
            named = ", ".join(f"{name}: {schema.get('type', 'any')}" for name, schema in parameters)
            show(f"tool {function['name']}({named}): {function.get('description', '')}\n")
        for message in row.messages:
            show(_message(message))
        tokens = encode_prompt(player.tokenizer, row.messages, given.tools)
        where = (instance.name, row.fields, "", row.place, tuple(given.tools), row.is_text)
        prompt = Prompt(row.id, row.messages, tokens, *where)
        await worker.begin([(0, RolloutTask(prompt, player.sampling, (seed,)))])
        _, _, records = await worker.finished()
        record: dict[str, Any] = json.loads(bytes(records.ragged(RECORD)[0]))
    finally:
        await worker.close()
        await pool.close()
    if record["status"] == "failed":
        show(f"[failed]\n{record['failure']}\n")
    else:
        turns = len(record["turns"])
        how = "cut off by a limit" if record["status"] == "truncated" else "ended by the environment"
        show(f"[end] {turns} turn{'s' * (turns != 1)}, {how}; {_rewards(record['rewards'])}\n")
    return record


class _ShownEnvironment:
    """The client of an environment, which shows every turn and its answer; see
    `rl_algos.rollouts.worker.conversations.EnvironmentClient`.

    Args:
        pool: Pool of the environment.
        show: Function that is called with lines.
    """

    def __init__(self, pool: EnvironmentPool, show: Callable[[str], None]) -> None:
        self._pool = pool
        self._show = show
        self.abandon = pool.abandon

    async def step(self, conversation: Conversation) -> StepResult | EnvironmentFailure:
        """Step the environment."""
        lines = [f"[turn {conversation.turn + 1}]", conversation.completion]
        for call in conversation.tool_calls:
            arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
            read = f"call of {call.name}: {arguments}"
            lines.append(f"call that cannot be read: {call.error}" if call.error else read)
        if conversation.truncated:
            lines.append("(cut off at the token limit)")
        self._show("\n".join(lines) + "\n")
        [outcome] = await self._pool.step([conversation])
        if isinstance(outcome, StepResult):
            lines = [_rewards(outcome.rewards())]
            lines += [_message(message).rstrip("\n") for message in outcome.observation]
            if outcome.info:
                lines.append(f"info: {', '.join(f'{name} {value}' for name, value in outcome.info.items())}")
            if outcome.stop_strings:
                lines.append(f"stop strings of the next turn: {', '.join(map(repr, outcome.stop_strings))}")
            if outcome.max_new_tokens is not None:
                lines.append(f"maximum number of tokens of the next turn: {outcome.max_new_tokens}")
            self._show("\n".join(lines) + "\n")
        return outcome


class CompletionInput:
    """Completions from a descriptor: a terminal, a pipe or a file. Each has any number of lines.

    Args:
        descriptor: Open for reading.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._ended = False

    async def next(self) -> str | None:
        """Return the next completion without its last line break; None at the end of the input.

        Other work continues while it waits, and it may be cancelled.
        """
        lines: list[str] = []
        while (line := await self._line()) is not None:
            if line == END:
                return "\n".join(lines)
            lines.append(line)
        return "\n".join(lines) if lines else None

    async def _line(self) -> str | None:
        while b"\n" not in self._rest and not self._ended:
            await self._readable()
            found = os.read(self._descriptor, _READ_BYTES)
            self._rest += found
            self._ended = not found
        if self._ended and not self._rest:
            return None
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace").rstrip("\r")

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, readable.set)
        except PermissionError:
            # a file is always readable, and cannot be waited for
            return
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._descriptor)


def _message(message: Message) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"[{message.get('role')}]\n{text}\n"


def _rewards(rewards: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in rewards.items() if name != "reward")
    return f"reward {rewards.get('reward', 0.0):g}" + (f" ({parts})" if parts else "")
