"""The prompts of a run, loaded before anything is started."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from rl_algos.data.config import DatasetConfig
from rl_algos.data.example import Example, info_of
from rl_algos.data.examples import NO_ENVIRONMENT, Dataset, Datasets, RowCheck, load_examples
from rl_algos.data.flow import FlowStream
from rl_algos.data.preview import RowReader, Text, UnusedRow
from rl_algos.data.stream import Stream
from rl_algos.rollouts.agent_config import SCORED_BY_AGENT, AgentConfig
from rl_algos.rollouts.config import EvaluationRoot, PolicyGradientConfig, RolloutRoot, rollout_config
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
from rl_core.rollouts.rollout import Prompt

TRIED_ROWS = 2
"""Rows of a dataset that its environment is tried on."""


@dataclass(frozen=True)
class RolloutData:
    """Data that the driver loads before anything is started.

    Args:
        train: Prompts to train on.
        validation: Prompts to validate on.
        end_of_sequence: Token that ends every completion.
        environments: Those that score the prompts; None to have every prompt asked.
        turn_ends: Further tokens that end a completion, as the chat template has them.
    """

    train: Stream[Prompt] | FlowStream[Prompt]
    validation: Sequence[Prompt]
    end_of_sequence: int
    environments: frozenset[str] | None = field(default=None, kw_only=True)
    turn_ends: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """All tokens that end a completion; the end of sequence comes first."""
        return (self.end_of_sequence, *self.turn_ends)


def load(config: RolloutRoot) -> Datasets:
    """All data of the config, before it is tokenised, every row with an environment that scores it.

    Raises:
        DataError: Naming dataset and row, and the remedy.
        ConfigError: If a file or a processor that a dataset names is not there.
    """
    loaded = load_examples(config, check=AnswerCheck(config.env))
    datasets = Datasets([each.answered() for each in loaded.train], [each.answered() for each in loaded.validation])
    agent = rollout_config(config).agent
    if agent is not None and not agent.needs_environment:
        return Datasets([_by_agent(each) for each in datasets.train], [_by_agent(each) for each in datasets.validation])
    check_environments(config, datasets)
    _check_place(config, datasets)
    return datasets


def _check_place(config: RolloutRoot, datasets: Datasets) -> None:
    """Refuse rows whose environment runs agents if no agent is for it to run, and the other way round."""
    settings = rollout_config(config)
    runs_agents = settings.agent is not None and settings.agent.place == "environment"
    key = f"{settings.section}.agent.place"
    for dataset in (*datasets.train, *datasets.validation):
        for name, row_id in dataset.environments().items():
            if problem_with(name, config.env) or instance_of(config.env, name).runs_agents == runs_agents:
                continue
            if runs_agents:
                problem = f"the environment {name} scores responses and runs no agent; set {key}=process, or another"
            else:
                problem = f"the environment {name} runs an agent; set {settings.section}.agent with {key}=environment"
            raise DataError(f"{dataset.place(row_id)}: {problem}")


def _by_agent(dataset: Dataset) -> Dataset:
    """The dataset with rows that no environment scores."""
    return replace(dataset, settings=dataset.settings.model_copy(update={"env_name": SCORED_BY_AGENT}))


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
            raise DataError(f"the environment {name} cannot score it: {error}{_mapping_remedy(info)}") from None
        answers = example.answer if isinstance(example.answer, list | tuple) else (example.answer,)
        if wrong := [each for each in answers if isinstance(each, float) and not math.isfinite(each)]:
            raise DataError(f"its answer is {wrong[0]}, which no response can match; use a number or a string")


def _mapping_remedy(info: Mapping[str, Any]) -> str:
    """Return how to give a row an answer; empty if it has one."""
    if "answer" in info:
        return ""
    return (
        ". If a column with another name contains it, set `output_key` to that column for the answer, or map it in "
        "`columns`, such as {NAME: COLUMN}, for other fields"
    )


def check_environments(config: RolloutRoot, datasets: Datasets, *, also: Collection[str] = ()) -> None:
    """Refuse a row that names an environment which is neither installed nor configured.

    Args:
        config: Resolved config of the run, with the configured environments.
        datasets: Datasets for training and validation.
        also: Further names that rows may have.

    Raises:
        DataError: Naming the row, and the environments that there are.
    """
    known = environment_names(config.env)
    for dataset in (*datasets.train, *datasets.validation):
        for name, row_id in dataset.environments().items():
            # what `env_name` says has been checked; a row may not name a file, as data must not choose code
            if not dataset.settings.env_name and name not in known and name not in also:
                raise DataError(f"{dataset.place(row_id)}: {unknown_environment(name, known)}, as env_name")
        for row_id in dataset.examples if _effort_levels(config) else ():
            if problem := _effort_problem(config, dataset.examples[row_id]):
                raise DataError(f"{dataset.place(row_id)}: {problem}")


def _effort_levels(config: RolloutRoot) -> Collection[str]:
    algorithm = rollout_config(config)
    return algorithm.reward_shaping.effort_levels if isinstance(algorithm, PolicyGradientConfig) else ()


def _effort_problem(config: RolloutRoot, example: Example) -> str:
    """What is wrong with the level of effort of a row, if the config has levels; empty if nothing is."""
    level, levels = info_of(example).get(EFFORT), _effort_levels(config)
    if not levels or level is None or level in levels:
        return ""
    key = f"{rollout_config(config).section}.reward_shaping.effort_levels"
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


def prepare(config: RolloutRoot, tokenizer: Any, datasets: Datasets) -> RolloutData:
    """Tokenise and check the prompts; each leaves room for a whole completion."""
    # imports transformers, which takes a second that `load` need not pay
    from rl_algos.data.extent import tell_extent
    from rl_algos.data.prompts import prompt_stream, validation_prompts
    from rl_algos.rollouts.worker.conversation_checks import check_conversations

    settings = rollout_config(config)
    room = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    environments = frozenset(
        name for dataset in (*datasets.train, *datasets.validation) for name in dataset.environments()
    )
    tools = tools_by_environment(config, environments)
    ends = check_conversations(config, tokenizer, tools)
    train = prompt_stream(
        datasets.train,
        config.data,
        tokenizer,
        max_tokens=room,
        seed=settings.seed,
        max_num_epochs=settings.max_num_epochs,
        tools=tools,
    )
    tell_extent(
        train,
        settings.num_prompts_per_step,
        unit="prompts",
        size_key=f"{settings.section}.num_prompts_per_step",
        max_num_steps=settings.max_num_steps,
        max_num_epochs=settings.max_num_epochs,
    )
    held_out = validation_prompts(datasets.validation, config.data, tokenizer, max_tokens=room, tools=tools)
    end_of_sequence, *others = ends.sampled
    return RolloutData(train, held_out, end_of_sequence, environments=environments, turn_ends=tuple(others))


def reader(config: RolloutRoot) -> RowReader:
    """How a run reads its rows, to look at them."""
    answers = AnswerCheck(config.env)

    def check(example: Example, settings: DatasetConfig) -> None:
        if example.is_unanswered:
            raise UnusedRow("it has a solution, but no answer that can be compared")
        answers(example, settings)
        if problem := _effort_problem(config, example):
            raise DataError(problem)

    return prompt_reader(config, check)


def prompt_reader(config: RolloutRoot, check: RowCheck | None = None, *, needs_environment: bool = True) -> RowReader:
    """How prompts for rollouts are read.

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

    def encode(tokenizer: Any, example: Example, settings: DatasetConfig) -> list[Text]:
        # imports transformers, which takes a second
        from rl_algos.data.prompts import EncodePrompt

        # a row may not name a file, as data must not choose code
        name = settings.env_name or (example.environment if example.environment in known else "")
        if name not in tools:
            tools[name] = tools_by_environment(config, [name]).get(name, ()) if name else ()
        offered = {name: tools[name]} if tools[name] else {}
        tokens = EncodePrompt(tokenizer, offered, settings.env_name)(example)
        learned = np.zeros(len(tokens), dtype=np.uint8)
        return [Text("prompt", tokens, learned, tuple(image_refs(example.messages)))]

    return RowReader(encode, limit, key, check=check, environment=environment)


def tools_by_environment(
    config: EvaluationRoot, environments: Collection[str]
) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """The tools of the environments that have some, by name."""
    # a row may name something else than an environment, such as a teacher
    names = sorted(name for name in environments if not problem_with(name, config.env))
    found = {name: tools_of(instance_of(config.env, name)) for name in names}
    return {name: tools for name, tools in found.items() if tools}
