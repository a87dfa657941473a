"""The prompts of a run, loaded before anything is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_algos.data.config import DatasetConfig
from rl_algos.data.examples import NO_ENVIRONMENT, Datasets, RowCheck
from rl_algos.data.flow import FlowStream
from rl_algos.data.preview import RowReader, Text
from rl_algos.data.rows.example import Example, info_of
from rl_algos.data.stream import Stream
from rl_algos.rollouts.config import SCORED_BY_AGENT, AgentConfig, PolicyGradientConfig, RolloutConfig, RolloutRoot
from rl_algos.rollouts.driver.live_source import UserPrompts
from rl_algos.rollouts.training.rewards import EFFORT
from rl_core.config import Config
from rl_core.environments.instance import (
    environment_names,
    instance_of,
    problem_with,
    row_check_of,
    tools_of,
    unknown_environment,
)
from rl_core.environments.trial import Attempt, attempts_on
from rl_core.errors import DataError
from rl_core.images import image_refs
from rl_core.rollouts.rollout import Message, Prompt
from rl_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_algos.rollouts.training.demonstrations import DemonstrationRows

TRIED_ROWS = 2
"""Number of rows of a dataset for the trial of its environment."""

_MAPPING_REMEDY = (
    ". If a column with another name contains it, set `output_key` to that column for the answer, or map it in "
    "`columns`, such as {NAME: COLUMN}, for other fields"
)


Encode = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], np.ndarray]
"""From messages and tools to int32 `[tokens]`, up to the start of the next turn."""


@dataclass(frozen=True)
class RolloutData:
    """Data that the driver loads before anything is started.

    Args:
        train: Prompts to train on.
        validation: Prompts to validate on.
        end_of_sequence: Token that ends every completion.
        environments: Environments that score the prompts; None to collect them from all prompts.
        turn_ends: Further tokens that end a completion, as the chat template has them.
        demonstrations: Conversations that steps learn next to their rollouts; None for none.
        encode: Renders a conversation by the policy's chat template; None unless the policy is its own teacher.
    """

    train: Stream[Prompt] | FlowStream[Prompt] | UserPrompts
    validation: Sequence[Prompt]
    end_of_sequence: int
    environments: frozenset[str] | None = field(default=None, kw_only=True)
    turn_ends: tuple[int, ...] = field(default=(), kw_only=True)
    demonstrations: DemonstrationRows | None = field(default=None, kw_only=True)
    encode: Encode | None = field(default=None, kw_only=True)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion; the end of sequence comes first."""
        return (self.end_of_sequence, *self.turn_ends)


def check_places(environments: Config, settings: RolloutConfig, datasets: Datasets) -> None:
    """Refuse rows whose environment runs agents if there is no agent for it to run, and the other way round.

    Args:
        environments: Section `env`.
        settings: Section of the algorithm.
        datasets: Datasets for training and validation.
    """
    agent, section = settings.agent, f"{settings.section}.agent"
    runs_agents, has_command = agent is not None and agent.place == "environment", bool(agent and agent.command)
    for dataset in (*datasets.train, *datasets.validation):
        for name, row_id in dataset.environments().items():
            if problem_with(name, environments):
                continue
            environment = instance_of(environments, name)
            if runs_agents and not environment.runs_agents:
                own = f"scores responses and runs no agent; set {section}.place=process, or another"
            elif environment.runs_agents and not runs_agents:
                own = f"runs an agent; set {section} with {section}.place=environment"
            elif environment.brings_agent and has_command:
                own = f"runs its own agent; remove {section}.command"
            elif environment.runs_agents and not environment.brings_agent and not has_command:
                own = f"runs a command; set {section}.command"
            else:
                continue
            problem = f"the environment {name} {own}"
            raise DataError(f"{dataset.place(row_id)}: {problem}")


class AnswerCheck:
    """Refuses a row that its environment cannot score, whatever the completion.

    Args:
        environments: The section `env` of the config.
    """

    def __init__(self, environments: Config) -> None:
        self._environments = environments
        self._checks: dict[str, Callable[[Mapping[str, Any]], None] | None] = {}

    def __call__(self, example: Example, settings: DatasetConfig) -> None:
        """Raise a `DataError` with the reason."""
        name = settings.env_name or example.environment
        if not name or example.is_unanswered:
            return
        if name not in self._checks:
            known = not problem_with(name, self._environments)
            self._checks[name] = row_check_of(instance_of(self._environments, name)) if known else None
        check, info = self._checks[name], info_of(example)
        try:
            if check is not None:
                check(info)
        except ValueError as error:
            remedy = "" if "answer" in info else _MAPPING_REMEDY
            raise DataError(f"the environment {name} cannot score it: {error}{remedy}") from None
        answers = example.answer if isinstance(example.answer, list | tuple) else (example.answer,)
        if wrong := [each for each in answers if isinstance(each, float) and not math.isfinite(each)]:
            raise DataError(f"its answer is {wrong[0]}, which no response can match; use a number or a string")


def check_environments(environments: Config, datasets: Datasets, *, also: Collection[str] = ()) -> None:
    """Refuse a row with an environment that is neither installed nor configured.

    Args:
        environments: Section `env`.
        datasets: Datasets for training and validation.
        also: Further names that rows may have.

    Raises:
        DataError: With the row and the environments that there are.
    """
    known = environment_names(environments)
    for dataset in (*datasets.train, *datasets.validation):
        for name, row_id in dataset.environments().items():
            # The value of `env_name` has been checked. A row may not name a file, because data must not choose code.
            if not dataset.settings.env_name and name not in known and name not in also:
                raise DataError(f"{dataset.place(row_id)}: {unknown_environment(name, known)}, as env_name")


def effort_problem(settings: RolloutConfig, example: Example) -> str:
    """Return the problem of the level of effort of a row, if the config has levels; empty if there is none."""
    levels = settings.reward_shaping.effort_levels if isinstance(settings, PolicyGradientConfig) else {}
    level = info_of(example).get(EFFORT)
    if not levels or level is None or level in levels:
        return ""
    key = f"{settings.section}.reward_shaping.effort_levels"
    return f"its {EFFORT} is {level!r}; {key} has {', '.join(levels)}"


def attempts(datasets: Datasets, agent: AgentConfig | None) -> Mapping[str, list[Attempt]]:
    """Return the first rows of every dataset with responses, by the environment that scores them.

    Args:
        datasets: Datasets of a run or an evaluation.
        agent: Agent that plays the rollouts, if any. Rows of an environment that runs it have no attempts.
    """
    found: dict[str, list[Attempt]] = {}
    runs_agents = agent is not None and agent.place == "environment"
    for dataset in (*datasets.train, *datasets.validation):
        for row_id in islice(dataset.examples, TRIED_ROWS):
            example = dataset.examples[row_id]
            if dataset.environment(row_id) == SCORED_BY_AGENT or runs_agents:
                continue
            tried = found.setdefault(dataset.environment(row_id), [])
            place = dataset.place(row_id)
            tried += attempts_on(place, row_id, example.messages, info_of(example), is_text=example.is_text)
    return found


def prompt_reader(config: RolloutRoot, check: RowCheck | None = None, *, needs_environment: bool = True) -> RowReader:
    """Return the reader of rows that are prompts for rollouts.

    Args:
        config: Resolved config of the run.
        check: Raises a `DataError` for an example that cannot be used.
        needs_environment: True if every prompt is scored.
    """
    known = environment_names(config.env)
    total, new = config.policy.max_total_sequence_length, config.policy.generation.max_new_tokens
    own = config.data.max_input_seq_length
    room, room_key = total - new, "policy.max_total_sequence_length less policy.generation.max_new_tokens"
    limit, key = (own, "data.max_input_seq_length") if own is not None and own <= room else (room, room_key)
    tools: dict[str, tuple[Mapping[str, Any], ...]] = {}

    def environment(example: Example, settings: DatasetConfig) -> str:
        name = settings.env_name or example.environment
        if not name and needs_environment:
            raise DataError(NO_ENVIRONMENT)
        if name and not settings.env_name and name not in known:
            raise DataError(f"{unknown_environment(name, known)}, as env_name")
        return name

    def encode(tokenizer: Tokenizer, example: Example, settings: DatasetConfig) -> list[Text]:
        # This module imports transformers, which takes a second.
        from rl_algos.data.prompts import EncodePrompt

        # A row may not name a file, because data must not choose code.
        name = settings.env_name or (example.environment if example.environment in known else "")
        if name not in tools:
            tools[name] = tools_by_environment(config.env, [name]).get(name, ()) if name else ()
        offered = {name: tools[name]} if tools[name] else {}
        tokens = EncodePrompt(tokenizer, offered, settings.env_name)(example)
        learned = np.zeros(len(tokens), dtype=np.uint8)
        return [Text("prompt", tokens, learned, tuple(image_refs(example.messages)))]

    return RowReader(encode, limit, key, check=check, environment=environment)


def tools_by_environment(settings: Config, environments: Collection[str]) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """Return the tools of the environments that have some, by name."""
    # A row may name something other than an environment, such as a teacher.
    names = sorted(name for name in environments if not problem_with(name, settings))
    found = {name: tools_of(instance_of(settings, name)) for name in names}
    return {name: tools for name, tools in found.items() if tools}
