"""The base of algorithms that train on their own rollouts, and the evaluation of a config by rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.encoding import with_section
from rl_algos.data.examples import Dataset, Datasets, load_datasets, load_examples
from rl_algos.data.inputs import dataset_problems
from rl_algos.data.inputs import input_problems as data_problems
from rl_algos.data.preview import RowReader, UnusedRow
from rl_algos.data.rows.example import Example
from rl_algos.data.stream import Stream
from rl_algos.evaluation.config import EvaluationConfig, TaskConfig
from rl_algos.evaluation.summary import Scoring, powers_of_two
from rl_algos.evaluation.tasks import task_of
from rl_algos.judges.needs import with_judges
from rl_algos.rollouts.config import (
    SCORED_BY_AGENT,
    EvaluationRoot,
    PolicyGradientConfig,
    RolloutConfig,
    RolloutRoot,
    rollout_config,
)
from rl_algos.rollouts.data import (
    AnswerCheck,
    RolloutData,
    attempts,
    check_environments,
    check_places,
    effort_problem,
    prompt_reader,
    tools_by_environment,
)
from rl_algos.rollouts.driver.live_source import UserPrompts
from rl_algos.rollouts.driver.source import evaluation_tasks
from rl_algos.rollouts.driver.task_evaluation import EvaluationPlan, EvaluationTask
from rl_algos.rollouts.setup import first_prompts, program_needs, training_sampling, validation_sampling
from rl_core.algorithm import Algorithm
from rl_core.config import Problem, option
from rl_core.environments.instance import environment_names, problem_with, unknown_environment
from rl_core.environments.trial import Attempt
from rl_core.errors import ConfigError, DataError
from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt
from rl_core.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_algos.data.flow import FlowStream

C = TypeVar("C", bound=RolloutRoot)

VALIDATION = "validation"
"""Name of the task that is the run's validation data."""

_ANY_LENGTH = 2**31
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")


def evaluation_input_problems(config: EvaluationRoot) -> Iterator[Problem]:
    """Yield what is wrong with the files and names of the data of an evaluation: of its tasks, or if it has none, of
    the validation data of its run."""
    data: DataConfig | None = getattr(config, "data", None)
    yield from task_input_problems(config.eval, data)
    if config.eval.tasks or data is None:
        return
    for key, section in data.sections():
        if not key.startswith("data.train"):
            yield from dataset_problems(key, section)


def task_input_problems(settings: EvaluationConfig, data: DataConfig | None) -> Iterator[Problem]:
    """Yield what is wrong with the names of all tasks, and with the files and folders of their data.

    Args:
        settings: Config section `eval`.
        data: Data of the run; None without one.
    """
    for place, given in enumerate(settings.tasks):
        key = f"eval.tasks[{place}]"
        try:
            task = task_of(given, settings, data)
        except ConfigError as error:
            yield Problem(key, str(error).removeprefix("eval.tasks: "))
        else:
            problems = dataset_problems(f"{key}.dataset", task.dataset)
            yield from problems if task is given else (problem.at(key) for problem in problems)


class RolloutAlgorithm(Algorithm[C, Datasets, RolloutData]):
    """Loads prompts, rolls them out, and evaluates on them; a subclass adds `run`.

    `rl_algos.rollouts.setup.steps_of` gives `run` the steps of its loop.
    """

    settings = staticmethod(rollout_config)
    """Returns the section of the algorithm."""
    evaluation_problems = staticmethod(evaluation_input_problems)

    def input_problems(self, config: C) -> Iterable[Problem]:
        settings = self.settings(config)
        yield from data_problems(config)
        if isinstance(settings, PolicyGradientConfig) and settings.demonstrations.dataset is not None:
            key = f"{settings.section}.demonstrations.dataset"
            yield from dataset_problems(key, settings.demonstrations.dataset)
        if config.eval.in_training:
            yield from task_input_problems(config.eval, config.data)

    def load(self, config: C) -> Datasets:
        settings = self.settings(config)
        loaded = load_examples(config, check=AnswerCheck(config.env))
        datasets = Datasets([each.answered() for each in loaded.train], [each.answered() for each in loaded.validation])
        if settings.agent is not None and not settings.agent.needs_environment and not settings.serves_users:
            update = {"env_name": SCORED_BY_AGENT}
            train, validation = (
                [replace(each, settings=each.settings.model_copy(update=update)) for each in part]
                for part in (datasets.train, datasets.validation)
            )
            return Datasets(train, validation)
        check_environments(config.env, datasets)
        has_levels = isinstance(settings, PolicyGradientConfig) and settings.reward_shaping.effort_levels
        for dataset in (*datasets.train, *datasets.validation):
            for row_id, example in dataset.examples.items() if has_levels else ():
                if problem := effort_problem(settings, example):
                    raise DataError(f"{dataset.place(row_id)}: {problem}")
        check_places(config.env, settings, datasets)
        return datasets

    def attempts(self, config: C, loaded: Datasets) -> Mapping[str, Sequence[Attempt]]:
        return attempts(loaded, self.settings(config).agent)

    def prepare(self, config: C, tokenizer: Tokenizer, loaded: Datasets) -> RolloutData:
        # These modules import transformers, which takes a second that `load` need not pay.
        from rl_algos.data.flow import tell_extent
        from rl_algos.data.prompts import prompt_stream, validation_prompts
        from rl_algos.rollouts.worker.conversation_checks import check_conversations
        from rl_algos.sft.data import EncodeShown

        settings = self.settings(config)
        room = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
        environments = _environments((*loaded.train, *loaded.validation))
        tools = tools_by_environment(config.env, environments)
        end_of_sequence, *others = check_conversations(config.policy, settings, tokenizer, tools).sampled
        epochs = settings.max_num_epochs
        train: Stream[Prompt] | FlowStream[Prompt] | UserPrompts = UserPrompts()
        if not settings.serves_users:
            train = prompt_stream(
                loaded.train,
                config.data,
                tokenizer,
                max_tokens=room,
                seed=settings.seed,
                max_num_epochs=epochs,
                tools=tools,
                respond=EncodeShown(tokenizer, config.policy.generation.max_new_tokens)
                if settings.demonstrated_share
                else None,
            )
            tell_extent(
                train,
                settings.num_prompts_per_step,
                unit="prompts",
                size_key=f"{settings.section}.num_prompts_per_step",
                max_num_steps=settings.max_num_steps,
                max_num_epochs=epochs,
            )
        held_out = validation_prompts(loaded.validation, config.data, tokenizer, max_tokens=room, tools=tools)
        shown = settings.demonstrations if isinstance(settings, PolicyGradientConfig) else None
        demonstrations = None
        if shown is not None and shown.dataset is not None:
            from rl_algos.rollouts.training.demonstrations import DemonstrationRows

            longest, rows = config.policy.max_total_sequence_length, shown.rows_per_step
            demonstrations = DemonstrationRows.of(
                shown.dataset, config.data, tokenizer, rows=rows, max_tokens=longest, seed=settings.seed
            )
        return RolloutData(
            train,
            held_out,
            end_of_sequence,
            environments=environments,
            turn_ends=tuple(others),
            demonstrations=demonstrations,
        )

    def check_data(self, prepared: RolloutData, state: Callable[[str], Mapping[str, Any]]) -> None:
        prepared.train.check(state("rollouts")["prompts"])
        if prepared.demonstrations is not None:
            prepared.demonstrations.stream.check(state("demonstrations"))

    def rollouts(self, config: C, prepared: RolloutData) -> RolloutNeeds:
        settings, environments = self.settings(config), prepared.environments
        if environments is None:
            every = (*prepared.train.datasets, prepared.validation)
            environments = frozenset(prompt.environment for prompts in every for prompt in prompts)
        users = training_sampling(config.policy.generation, prepared.stop_token_ids)
        found = program_needs(settings, config.policy, environments, users)
        return replace(
            with_judges(found, config),
            keeps_cache=settings.keeps_cache,
            max_steps=settings.max_num_steps,
            sample_prompts=first_prompts(prepared),
            changes_under_way=settings.max_staleness > 0,
        )

    def evaluation(self, config: C) -> RolloutEvaluation:
        return RolloutEvaluation(config, self.load)

    def row_reader(self, config: C) -> RowReader:
        answers, rollouts = AnswerCheck(config.env), self.settings(config)

        def check(example: Example, settings: DatasetConfig) -> None:
            if example.is_unanswered:
                raise UnusedRow("it has a solution, but no answer that can be compared")
            answers(example, settings)
            if problem := effort_problem(rollouts, example):
                raise DataError(problem)

        return prompt_reader(config, check)


@dataclass(frozen=True)
class _LoadedTask:
    """The data of a task before it is tokenised.

    Args:
        task: Its settings; None for the run's validation data.
        datasets: Its rows.
        data: Settings for tokenising them.
    """

    task: TaskConfig | None
    datasets: Sequence[Dataset]
    data: DataConfig


def evaluation_needs(config: EvaluationRoot, environments: frozenset[str]) -> RolloutNeeds:
    """Return the needs of the rollouts of tasks without the rollouts of a run.

    Args:
        config: Resolved root, with the section `eval`.
        environments: Names of the environments that score the tasks.
    """
    rollouts = RolloutConfig(max_rollout_turns=config.eval.max_turns or 1)
    return with_judges(program_needs(rollouts, config.policy, environments), config)


class RolloutEvaluation:
    """The evaluation that a config asks for: its tasks, or the validation data of its run, which gets the same prompts,
    seeds and sampling as the run's own validation.

    Args:
        config: Resolved root, with the section `eval`.
        load: Reads the data of the run, whose validation data is scored if no tasks are listed; None without a run.

    Raises:
        ConfigError: If there are no tasks and no validation data, or settings contradict one another.
        DataError: Naming dataset and row, and the remedy.
    """

    def __init__(self, config: EvaluationRoot, load: Callable[[Any], Datasets] | None = None) -> None:
        self._config, self._load_data, self._settings = config, load, config.eval
        of_run = next((each for each in vars(config).values() if isinstance(each, RolloutConfig)), None)
        self._has_run, self._rollouts = of_run is not None, of_run or RolloutConfig()
        self._data: DataConfig | None = getattr(config, "data", None)
        tasks = [task_of(each, self._settings, self._data) for each in self._settings.tasks]
        names = [task.name for task in tasks]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"eval.tasks: {', '.join(repeated)} appears more than once; give each task its own name")
        self._loaded = [self._load_task(task) for task in tasks] if tasks else [self._load_validation()]

    def attempts(self) -> Mapping[str, list[Attempt]]:
        """Return first rows of the data with responses, by the environment that scores them."""
        datasets = [dataset for each in self._loaded for dataset in each.datasets]
        return attempts(Datasets([], datasets), self._rollouts.agent)

    def plan(self, tokenizer: Tokenizer) -> EvaluationPlan:
        """Return the rollouts of the evaluation.

        Raises:
            ConfigError, DataError: If the prompts cannot be tokenised, or no prompt leaves room for a completion.
        """
        # This module imports transformers, which takes a second that loading need not pay.
        from rl_algos.rollouts.worker.conversation_checks import check_turns

        settings, rollouts, policy = self._settings, self._rollouts, self._config.policy
        key = "eval.max_turns"
        if settings.max_turns is None and self._has_run:
            key = f"{rollouts.section}.max_rollout_turns"
        else:
            rollouts = rollouts.model_copy(update={"max_rollout_turns": settings.max_turns or 1})
        environments = _environments([dataset for each in self._loaded for dataset in each.datasets])
        tools = tools_by_environment(self._config.env, environments)
        ends = check_turns(policy, rollouts, tokenizer, tools, turns_key=key)
        tasks = [self._planned(loaded, tokenizer, tools, ends.sampled) for loaded in self._loaded]
        if not any(task.groups for task in tasks):
            reasons = "; ".join(reason for task in tasks for _, reason in task.refused[:1])
            raise ConfigError(f"no prompt leaves room for a completion: {reasons}")
        needs = program_needs(rollouts, policy, environments)
        most = max(task.num_samples for task in tasks)
        several = (*powers_of_two(most), most) if most > 1 else ()
        k = tuple(sorted(set(settings.k or several)))
        return EvaluationPlan(tasks, needs, Scoring(k, settings.pass_threshold, settings.confidence, self._seed))

    @property
    def _seed(self) -> int:
        return self._rollouts.seed if self._settings.seed is None else self._settings.seed

    def _load_task(self, task: TaskConfig) -> _LoadedTask:
        workers = self._data.num_workers if self._data is not None else 0
        data = DataConfig(train=task.dataset, validation=task.dataset, num_workers=workers)
        is_file = task not in self._settings.tasks and task.dataset.data_path is not None
        keys = "eval.default" if is_file else "dataset"
        try:
            loaded = load_datasets(data, "validation", check=AnswerCheck(self._config.env))
        except DataError as error:
            raise DataError(with_section(str(error), keys)) from None
        datasets = [dataset.answered() for dataset in loaded]
        known = environment_names(self._config.env)
        for dataset in datasets:
            given = dataset.settings.env_name
            if given is not None and (problem := problem_with(given, self._config.env)):
                raise ConfigError(f"eval.tasks: {task.name}: {problem}")
            if not given and "" in dataset.named:
                raise DataError(
                    f"{dataset.place(dataset.named[''])}: the row has no environment to score it; set "
                    f"{keys}.env_name to an installed environment (rl env list) or to your own reward function "
                    "(file.py:function)"
                )
            for found, row_id in dataset.environments().items():
                # A row may not name a file, because data must not choose code.
                if not given and found not in known:
                    place = dataset.place(row_id)
                    raise DataError(f"{place}: {unknown_environment(found, known)}, as env_name of its dataset")
        return _LoadedTask(task, datasets, data)

    def _load_validation(self) -> _LoadedTask:
        data = self._data
        if self._load_data is None or data is None or not data.validation_datasets:
            raise ConfigError(
                "eval.tasks: is empty, and there is no validation data (data.validation, or split_validation_size of a "
                "training dataset) to score instead. Pass tasks, such as " + option("--tasks gsm8k", "tasks=['gsm8k']")
            )
        # Training data is read only if rows are held out from it.
        held_out = [dataset for dataset in data.train_datasets if dataset.split_validation_size is not None]
        data = data.model_copy(update={"train": held_out or data.validation})
        of_run: Any = self._config  # it has data, so it is the config of a run
        loaded = self._load_data(of_run.model_copy(update={"data": data}))
        return _LoadedTask(None, loaded.validation, data)

    def _planned(
        self, loaded: _LoadedTask, tokenizer: Tokenizer, tools: Mapping[str, Any], stop_token_ids: tuple[int, ...]
    ) -> EvaluationTask:
        # This module imports transformers, which takes a second that loading need not pay.
        from rl_algos.data.prompts import validation_prompts

        task, sampling = loaded.task, self._sampling(loaded.task, stop_token_ids)
        of_run = self._rollouts
        count = (task.num_samples if task else None) or self._settings.num_samples
        count = count or of_run.val_num_generations_per_prompt
        most = (task.max_prompts if task else None) or self._settings.max_prompts
        most = most or (of_run.max_val_samples if task is None else None)
        name, total = VALIDATION if task is None else task.name, self._config.policy.max_total_sequence_length
        limit = total - sampling.max_new_tokens
        if limit < 1:
            raise ConfigError(
                f"eval: {sampling.max_new_tokens} new tokens leave no room for a prompt of task {name} within "
                f"policy.max_total_sequence_length ({total}); lower eval.max_new_tokens, or increase that"
            )
        limit = min(loaded.data.max_input_seq_length or limit, limit)
        whole = loaded.data.model_copy(update={"max_input_seq_length": None})
        prompts = validation_prompts(list(loaded.datasets), whole, tokenizer, max_tokens=_ANY_LENGTH, tools=tools)
        prompts = prompts[:most]
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        room = f"{limit} leave room for {sampling.max_new_tokens} new ones"
        refused = [
            (prompt, f"context overflow: the prompt has {len(prompt.token_ids)} tokens, and {room}")
            for prompt in prompts
            if len(prompt.token_ids) > limit
        ]
        groups = evaluation_tasks(fitting, sampling, num_generations=count, seed=self._seed)
        return EvaluationTask(name, groups, refused, count)

    def _sampling(self, task: TaskConfig | None, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        sampling = validation_sampling(self._config.policy.generation, stop_token_ids)
        for settings in (self._settings, task):
            given = {name: getattr(settings, name, None) for name in _SAMPLING}
            sampling = replace(sampling, **{name: value for name, value in given.items() if value is not None})
        return sampling


class EvaluationOnly(Algorithm[EvaluationRoot, None, None]):
    """Evaluates a model on tasks, without a run that trains it."""

    input_problems = staticmethod(evaluation_input_problems)
    evaluation_problems = staticmethod(evaluation_input_problems)
    evaluation = staticmethod(RolloutEvaluation)


def _environments(datasets: Iterable[Dataset]) -> frozenset[str]:
    return frozenset(name for dataset in datasets for name in dataset.environments())
