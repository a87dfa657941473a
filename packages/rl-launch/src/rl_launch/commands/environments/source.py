"""The environment and the rows of data that a command line of `rl env` refers to."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rl_algos.data.config import DataConfig
from rl_algos.data.encoding import with_section
from rl_algos.data.examples import load_datasets
from rl_algos.data.rows.example import info_of
from rl_algos.judges.config import JudgeConfig, functions_of_models, judge_sections, judged_rewards
from rl_algos.judges.rubrics import Rubric
from rl_algos.rollouts.data import AnswerCheck
from rl_core.config import Config, assemble, load, resolve
from rl_core.devices import CPU
from rl_core.environments.instance import EnvironmentInstance, instance_of, problem_with, tools_of, unknown_environment
from rl_core.environments.trial import Attempt, answer_forms, attempts_on
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import DATASETS, ENVIRONMENTS, load_problem, names
from rl_core.rollouts.rollout import Message
from rl_launch.commands.explain import names_config
from rl_launch.run_config.reading import read_plan
from rl_launch.run_config.root_types import environments_type
from rl_launch.worker_envs.driver import missing
from rl_launch.worker_envs.spec import worker_env

MAX_ROWS = 100
"""Maximum number of rows that are read from the data."""


@dataclass(frozen=True)
class GivenRow:
    """A row of data.

    Args:
        id: Id of the row.
        place: Place of the row, such as `prompts.jsonl, line 3`.
        messages: Messages of its prompt.
        fields: Fields of the row, which the environment can request.
        is_text: Whether the row gives the prompt as plain text.
        environment: Name of the environment that scores it in a run; empty if none is chosen.
    """

    id: str
    place: str
    messages: tuple[Message, ...]
    fields: Mapping[str, Any]
    is_text: bool = False
    environment: str = ""

    def attempts(self, responses: Sequence[str] = ()) -> list[Attempt]:
        """Return the row with responses that a policy might give, its answer in several forms, and further ones."""
        further = [*responses, *answer_forms(self.fields)]
        return attempts_on(self.place, self.id, self.messages, self.fields, further, is_text=self.is_text)


class GivenEnvironment(NamedTuple):
    """An environment as the user named it.

    Args:
        instance: The environment with its settings.
        tools: Schemas of its tools.
        rows: Rows of the data; at least one.
        judges: Judges of the config by name.
        rewards: Its rewards by judges, by reported name.
        later: Functions that ask reward models, which the instance is without.
    """

    instance: EnvironmentInstance
    tools: Sequence[Mapping[str, Any]]
    rows: Sequence[GivenRow]
    judges: Mapping[str, JudgeConfig]
    rewards: Mapping[str, Rubric]
    later: frozenset[str] = frozenset()


def environment_of(
    name: str, overrides: Sequence[str], source: str = "", prompt: str = "", fields: str = ""
) -> GivenEnvironment:
    """Return the environment of a name, which can be used here.

    Args:
        name: An installed environment, `file.py:NAME` or `package.module:NAME`; or a recipe, a YAML file or a run
            directory, for the environment and the training data of that config.
        overrides: `KEY=VALUE` of its settings, and `data.train.KEY=VALUE` of the dataset that the rows are from; for a
            config, its own keys.
        source: Rows: a file, or an installed dataset; by default the installed dataset of the environment's name.
        prompt: Text of a single row; empty for none.
        fields: JSON object with the fields of that row.

    Raises:
        ConfigError: If the environment or a setting does not exist, or cannot be used here.
        DataError: If the rows cannot be read.
    """
    if name not in names(ENVIRONMENTS) and names_config(name):
        if source or prompt:
            raise ConfigError(f"{name} contains its data. Omit --data and --prompt, or pass only the environment")
        return _of_config(name, overrides)
    if ":" in name:
        problem = problem_with(name, Config())
    elif name in names(ENVIRONMENTS):
        problem = load_problem(ENVIRONMENTS, name)
    else:
        problem = unknown_environment(name, names(ENVIRONMENTS))
    if problem:
        raise ConfigError(problem)
    # messages contain the key of its section: `score` for `reward.py:score`
    key = re.sub(r"\W", "_", name.rpartition(":")[2])
    values: dict[str, Any] = {"env": {key: {"type": name} if ":" in name else {}}}
    data = "" if prompt else source or (name if name in names(DATASETS) else "")
    if data:
        kind = "dataset_name" if data in names(DATASETS) and not Path(data).exists() else "data_path"
        values["data"] = {"train": {kind: data, "env_name": key}}
    raw = load(values, [each if data and each.startswith("data.") else f"env.{key}.{each}" for each in overrides])
    sections: dict[str, Any] = {"env": environments_type(raw), **({"data": DataConfig} if data else {})}
    config: Any = resolve(raw, assemble("Root", sections)).config
    return _given(config, key, _rows(config) if data else [_row(name, prompt, fields)])


def _given(config: Any, key: str, rows: Sequence[GivenRow]) -> GivenEnvironment:
    try:
        later = functions_of_models(config).get(key, frozenset())
        instance = instance_of(config.env, key).without(later)
        problems = missing(worker_env(instance.requirement, CPU.extras))
        if problems:
            raise ConfigError(f"environment {instance.label} cannot be used here: {'; '.join(problems)}")
        tools = tools_of(instance)
    except (ValueError, ImportError) as error:
        raise ConfigError(str(error)) from error
    judges = judge_sections(config) if hasattr(config, "judges") else {}
    return GivenEnvironment(instance, tools, rows, judges, judged_rewards(config).get(key, {}), later)


def _of_config(source: str, overrides: Sequence[str]) -> GivenEnvironment:
    """Return the environment of a config's training data, with its rows."""
    config: Any = read_plan(source, overrides).config
    rows = _rows(config) if hasattr(config, "env") else []
    in_datasets = [each.env_name for each in config.data.train_datasets if each.env_name]
    names = list(dict.fromkeys([*in_datasets, *(row.environment for row in rows if row.environment)]))
    if not names:
        raise ConfigError(f"{source} does not use an environment")
    if len(names) > 1:
        raise ConfigError(
            f"{source} has several environments: {', '.join(names)}. Pass one of them, with its data in --data"
        )
    return _given(config, names[0], rows)


def _rows(config: Any) -> list[GivenRow]:
    """Return the first rows, after all rows are checked as a run checks them."""
    try:
        datasets = load_datasets(config.data, "train", check=AnswerCheck(config.env))
    except DataError as error:
        raise DataError(with_section(str(error), "data.train")) from None
    found: list[GivenRow] = []
    for dataset in datasets:
        for row_id in islice(dataset.examples, MAX_ROWS - len(found)):
            example = dataset.examples[row_id]
            name = dataset.settings.env_name or example.environment
            place, fields = dataset.place(row_id), info_of(example)
            found.append(GivenRow(row_id, place, example.messages, fields, example.is_text, name))
    return found


def _row(name: str, prompt: str, text: str) -> GivenRow:
    if not prompt:
        raise ConfigError(
            f"{name} needs a row. Pass a file with --data, or a string with --prompt and the fields that it "
            """requests with --fields '{"answer": "42"}'"""
        )
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f'--fields: {error}. Pass a JSON object, such as \'{{"answer": "42"}}\'') from None
    if not isinstance(fields, dict):
        raise ConfigError(f'--fields: got {text}; allowed: a JSON object, such as \'{{"answer": "42"}}\'')
    messages = ({"role": "user", "content": prompt},)
    return GivenRow("prompt:0", "the prompt", messages, {"prompt": prompt, **fields}, is_text=True)
