"""From a resolved config to the rollouts of its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_algos.data.config import DataConfig
from rl_algos.data.examples import Dataset, Datasets, load_datasets
from rl_algos.data.faults import with_section
from rl_algos.evaluation.config import TaskConfig
from rl_algos.evaluation.summary import Scoring, powers_of_two
from rl_algos.evaluation.tasks import task_of
from rl_algos.rollouts.agent_config import AgentConfig
from rl_algos.rollouts.config import EvaluationRoot, RolloutConfig
from rl_algos.rollouts.data import AnswerCheck, tools_by_environment
from rl_algos.rollouts.data import attempts as attempts_on_data
from rl_algos.rollouts.driver.evaluation_plan import EvaluationPlan, EvaluationTask
from rl_algos.rollouts.driver.source import evaluation_tasks
from rl_algos.rollouts.setup import program_needs, validation_sampling
from rl_algos.rollouts.worker.programs import DEFAULT_PROGRAM
from rl_core.config import option
from rl_core.environments.instance import environment_names, problem_with, unknown_environment
from rl_core.environments.trial import Attempt
from rl_core.errors import ConfigError, DataError
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.rollout import Prompt

VALIDATION = "validation"
"""Name of the task that is the run's validation data."""

DEFAULT_SEED = 42

_ANY_LENGTH = 2**31
_SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens")


@dataclass(frozen=True)
class _Loaded:
    """The data of a task before it is tokenised.

    Args:
        task: Its settings; None for the run's validation data.
        datasets: Its rows.
        data: Settings by which they are tokenised.
    """

    task: TaskConfig | None
    datasets: Sequence[Dataset]
    data: DataConfig


class RolloutEvaluation:
    """The evaluation that a config asks for: its tasks, or the validation data of its run, which gets the same prompts,
    seeds and sampling as the run's own validation.

    Args:
        config: Resolved root, with the section `eval`.
        load: Reads the data of the run, whose validation data is scored if no tasks are named; None without a run.

    Raises:
        ConfigError: If there are no tasks and no validation data, or settings contradict one another.
        DataError: Naming dataset and row, and the remedy.
    """

    def __init__(self, config: EvaluationRoot, load: Callable[[Any], Datasets] | None = None) -> None:
        self._config, self._load_data = config, load
        self._settings = config.eval
        self._of_run = next((each for each in vars(config).values() if isinstance(each, RolloutConfig)), None)
        of_run = getattr(config, "data", None)
        tasks = [task_of(each, self._settings, of_run) for each in self._settings.tasks]
        repeated = sorted({task.name for task in tasks if [each.name for each in tasks].count(task.name) > 1})
        if repeated:
            raise ConfigError(f"eval.tasks: {', '.join(repeated)} appears more than once; give each task its own name")
        self._loaded = [self._load_task(task) for task in tasks] if tasks else [self._load_validation()]

    def attempts(self) -> Mapping[str, list[Attempt]]:
        """First rows of the data with responses, by the environment that scores them."""
        every = [dataset for loaded in self._loaded for dataset in loaded.datasets]
        return attempts_on_data(Datasets([], every), self._agent)

    def plan(self, tokenizer: Any) -> EvaluationPlan:
        """The rollouts of the evaluation.

        Raises:
            ConfigError, DataError: If the prompts cannot be tokenised, or no prompt leaves room for a completion.
        """
        # imports transformers, which takes a second that loading need not pay
        from rl_algos.rollouts.worker.conversation_checks import check_turns

        turns, key = self._max_turns
        program = self._of_run.rollout_program if self._of_run else DEFAULT_PROGRAM
        renders_anew = self._of_run is not None and self._of_run.renders_anew
        environments = frozenset(
            name for loaded in self._loaded for dataset in loaded.datasets for name in dataset.environments()
        )
        tools = tools_by_environment(self._config, environments)
        ends = check_turns(
            self._config.policy,
            tokenizer,
            tools,
            program=program,
            max_turns=turns,
            turns_key=key,
            renders_anew=renders_anew,
        )
        tasks = [self._planned(loaded, tokenizer, tools, ends.sampled) for loaded in self._loaded]
        prompts = [group.prompt for task in tasks for group in task.groups]
        if not prompts:
            reasons = "; ".join(reason for task in tasks for _, reason in task.refused[:1])
            raise ConfigError(f"no prompt leaves room for a completion: {reasons}")
        seconds = self._of_run.max_rollout_seconds if self._of_run else None
        needs = program_needs(
            self._config,
            environments,
            program=program,
            args=self._of_run.rollout_program_args if self._of_run else {},
            max_turns=turns,
            renders_anew=renders_anew,
            max_seconds=seconds,
            agent=self._agent,
        )
        return EvaluationPlan(tasks, needs, self._scoring(max(task.num_samples for task in tasks)))

    @property
    def _agent(self) -> AgentConfig | None:
        """Agent that plays the rollouts, if the run has one."""
        return self._of_run.agent if self._of_run else None

    @property
    def _max_turns(self) -> tuple[int, str]:
        """Most turns of a sample, and the key that says so."""
        if self._settings.max_turns is None and self._of_run is not None:
            return self._of_run.max_rollout_turns, f"{self._of_run.section}.max_rollout_turns"
        return self._settings.max_turns or 1, "eval.max_turns"

    @property
    def _seed(self) -> int:
        given = self._settings.seed
        return given if given is not None else self._of_run.seed if self._of_run else DEFAULT_SEED

    def _load_task(self, task: TaskConfig) -> _Loaded:
        of_run = getattr(self._config, "data", None)
        data = DataConfig(
            train=task.dataset, validation=task.dataset, num_workers=of_run.num_workers if of_run is not None else 0
        )
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
                # a row may not name a file, as data must not choose code
                if not given and found not in known:
                    place = dataset.place(row_id)
                    raise DataError(f"{place}: {unknown_environment(found, known)}, as env_name of its dataset")
        return _Loaded(task, datasets, data)

    def _load_validation(self) -> _Loaded:
        data = getattr(self._config, "data", None)
        if self._load_data is None or data is None or not data.validation_datasets:
            raise ConfigError(
                "eval.tasks: is empty, and there is no validation data (data.validation, or split_validation_size of a "
                "training dataset) to score instead. Pass tasks, such as " + option("--tasks gsm8k", "tasks=['gsm8k']")
            )
        # of the training data only what rows are held out from is read
        held_out = [dataset for dataset in data.train_datasets if dataset.split_validation_size is not None]
        data = data.model_copy(update={"train": held_out or data.validation})
        of_run: Any = self._config  # it has data, so it is the config of a run
        loaded = self._load_data(of_run.model_copy(update={"data": data}))
        return _Loaded(None, loaded.validation, data)

    def _planned(
        self, loaded: _Loaded, tokenizer: Any, tools: Mapping[str, Any], stop_token_ids: tuple[int, ...]
    ) -> EvaluationTask:
        # imports transformers, which takes a second that loading need not pay
        from rl_algos.data.prompts import validation_prompts

        sampling, count = self._sampling(loaded.task, stop_token_ids), self._num_samples(loaded.task)
        name = VALIDATION if loaded.task is None else loaded.task.name
        total = self._config.policy.max_total_sequence_length
        limit = total - sampling.max_new_tokens
        if limit < 1:
            raise ConfigError(
                f"eval: {sampling.max_new_tokens} new tokens leave no room for a prompt of task {name} within "
                f"policy.max_total_sequence_length ({total}); lower eval.max_new_tokens, or increase that"
            )
        limit = min(loaded.data.max_input_seq_length or limit, limit)
        whole = loaded.data.model_copy(update={"max_input_seq_length": None})
        prompts = validation_prompts(list(loaded.datasets), whole, tokenizer, max_tokens=_ANY_LENGTH, tools=tools)
        prompts = prompts[: self._max_prompts(loaded.task)]
        fitting = [prompt for prompt in prompts if len(prompt.token_ids) <= limit]
        return EvaluationTask(
            name,
            evaluation_tasks(fitting, sampling, num_generations=count, seed=self._seed),
            list(_refused(prompts, limit, sampling)),
            count,
        )

    def _sampling(self, task: TaskConfig | None, stop_token_ids: tuple[int, ...]) -> SamplingParams:
        sampling = validation_sampling(self._config.policy.generation, stop_token_ids)
        for settings in (self._settings, task):
            given = {name: getattr(settings, name, None) for name in _SAMPLING}
            sampling = replace(sampling, **{name: value for name, value in given.items() if value is not None})
        return sampling

    def _num_samples(self, task: TaskConfig | None) -> int:
        of_run = self._of_run.val_num_generations_per_prompt if self._of_run else 1
        return (task.num_samples if task else None) or self._settings.num_samples or of_run

    def _max_prompts(self, task: TaskConfig | None) -> int | None:
        of_run = self._of_run.max_val_samples if self._of_run and task is None else None
        return (task.max_prompts if task else None) or self._settings.max_prompts or of_run

    def _scoring(self, num_samples: int) -> Scoring:
        settings = self._settings
        several = (*powers_of_two(num_samples), num_samples) if num_samples > 1 else ()
        k = tuple(sorted(set(settings.k or several)))
        return Scoring(k, settings.pass_threshold, settings.confidence, self._seed)


def _refused(prompts: Sequence[Prompt], limit: int, sampling: SamplingParams) -> Iterator[tuple[Prompt, str]]:
    room = f"{limit} leave room for {sampling.max_new_tokens} new ones"
    for prompt in prompts:
        if len(prompt.token_ids) > limit:
            yield prompt, f"context overflow: the prompt has {len(prompt.token_ids)} tokens, and {room}"
