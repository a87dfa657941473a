"""Distillation: of a student's own rollouts (GKD, arXiv:2306.13649), or of given rows by the supervised loop; its data,
and checks of the teachers, which must agree with the student on its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from rl_algos.data.examples import Dataset, Datasets, load_examples
from rl_algos.data.preview import RowReader
from rl_algos.data.rows.lazily import Lazily
from rl_algos.distillation.config import (
    DEFAULT_K,
    DistillationConfig,
    DistillationLossConfig,
    RolloutsRoot,
    TextRoot,
    learning_agents,
    teacher_sections,
)
from rl_algos.distillation.self_teacher import SelfTeacher
from rl_algos.distillation.span_teacher import SpanTeacher, Translator
from rl_algos.distillation.teachers import RolloutTeacher, Teachers, check_routes, check_teachers, require_teacher
from rl_algos.losses.distillation import (
    STATE_WEIGHTS,
    DistillationLoss,
    Divergence,
    LossOfDivergences,
    SpanLoss,
    WholeDistillationLoss,
)
from rl_algos.losses.importance import LOG_RATIO_BOUND, ImportanceCorrection, importance_weights
from rl_algos.losses.mask import without_demonstrations
from rl_algos.rollouts.algorithm import RolloutAlgorithm
from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.data import RolloutData, check_environments, prompt_reader
from rl_algos.rollouts.driver.steps import RolloutSteps
from rl_algos.rollouts.driver.validation import Validation
from rl_algos.rollouts.setup import steps_of, validation_sampling
from rl_algos.rollouts.training.agents import AgentWatch, trained_batch
from rl_algos.rollouts.training.batch import build_batch, minibatches
from rl_algos.rollouts.training.metrics import rollout_metrics, training_metrics
from rl_algos.rollouts.training.segments import ROLLOUT
from rl_algos.sft.data import TrainingRow, conversation_reader, training_rows
from rl_algos.sft.data import to_batch as text_batch
from rl_algos.supervised.algorithm import SupervisedAlgorithm
from rl_algos.supervised.data import SupervisedData, longest_row, supervised_data
from rl_algos.supervised.loop import RowObjective
from rl_algos.supervised.loop import train as learn
from rl_algos.tokenizer import encode_prompt, plain_tokenizer, require_chat_template
from rl_core.data.batch import Batch
from rl_core.data.microbatch import PAIR
from rl_core.errors import ConfigError
from rl_core.model import HIDDEN, LOGPROBS, HeadFiles, Loss, Model, hidden_states, topk
from rl_core.model_config import ModelConfig
from rl_core.rollouts.generation import SamplingParams
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, RolloutGroup
from rl_core.rollouts.rollout import Prompt
from rl_core.run import Components, Run
from rl_core.tokenizer import Tokenizer

UNSCORED = "rl_algos.distillation.unscored:unscored"
"""Environment of prompts that name none."""


@dataclass(frozen=True)
class DistillationData(RolloutData):
    """Data that the driver loads for distillation on the student's own rollouts.

    Args:
        vocabulary: Number of tokens that student and teachers share.
        translator: Translator to the tokens of a teacher that has other tokens; None if it has the student's.
    """

    vocabulary: int
    translator: Translator | None = None


@dataclass(frozen=True)
class TextRow:
    """A given text.

    Args:
        row: Its tokens, with a mask of the learned ones.
        teacher: Role of its teacher.
    """

    row: TrainingRow
    teacher: str


@dataclass(frozen=True)
class TextData(SupervisedData[TextRow]):
    """Data that the driver loads for distillation on given text.

    Args:
        vocabulary: Number of tokens that student and teachers share.
    """

    vocabulary: int


TEACHER = "teacher"
"""Column of the role of each row's teacher."""


class Distillation(RolloutAlgorithm[RolloutsRoot]):
    """Distillation on the student's own rollouts."""

    def load(self, config: RolloutsRoot) -> Datasets:
        # A row without an environment is not scored: a teacher is all that the student learns from.
        loaded = load_examples(config)
        train, validation = (
            [replace(each.answered(), default_environment=UNSCORED) for each in part]
            for part in (loaded.train, loaded.validation)
        )
        datasets = Datasets(train, validation)
        check_environments(config.env, datasets, also=[UNSCORED])
        return datasets

    def prepare(self, config: RolloutsRoot, tokenizer: Tokenizer, loaded: Datasets) -> DistillationData:
        translator = None
        if config.distillation.cross_tokenizer:
            translator = Translator(tokenizer, teacher_tokenizer(config, "teacher"), key="teacher.model_name")
        else:
            check_k(config.distillation.topk_logits_k, len(tokenizer))
            check_heads(config, len(tokenizer))
            check_teachers(config, tokenizer)
        own = config.distillation.self_teacher
        check_routes(config, loaded, all_rows=own is None)
        data = super().prepare(config, tokenizer, loaded)
        return DistillationData(
            data.train,
            data.validation,
            data.end_of_sequence,
            len(tokenizer),
            translator,
            environments=data.environments,
            turn_ends=data.turn_ends,
            encode=partial(encode_prompt, tokenizer) if own else None,
        )

    def row_reader(self, config: RolloutsRoot) -> RowReader:
        return prompt_reader(config, needs_environment=False)

    def run(self, config: RolloutsRoot, components: Components, run: Run) -> None:
        data: DistillationData = components.data
        settings, policy = config.distillation, components.models["policy"]
        teachers: RolloutTeacher
        loss: Loss
        if data.encode is not None and settings.self_teacher is not None:
            loss = distillation_loss_of(config, vocabulary=data.vocabulary)
            teachers = SelfTeacher(
                policy,
                data.encode,
                settings.self_teacher,
                [topk(settings.topk_logits_k or DEFAULT_K)],
                temperature=loss.temperature,
                max_tokens=config.policy.max_total_sequence_length,
            )
        elif data.translator is None:
            loss = distillation_loss_of(config, vocabulary=data.vocabulary)
            teachers = teachers_of(config, components)
        else:
            loss = SpanLoss(config.loss_fn.span_tau, config.loss_fn.temperature)
            longest = attrgetter("teacher.max_total_sequence_length")(config)
            model = components.models["teacher"]
            teachers = SpanTeacher(model, data.translator, max_tokens=longest, temperature=loss.temperature)
        generation, weights = config.policy.generation, None
        validated = loss
        if isinstance(loss, LossOfDivergences) and loss.importance is not None:
            weights = partial(with_state_weights, correction=loss.importance, temperature=generation.temperature)
            validated = replace(loss, importance=None)
        sampling = validation_sampling(generation, data.stop_token_ids)
        validation = DistillationValidation(policy, teachers, validated, data.validation, sampling, settings)
        train(
            settings,
            loss,
            policy=policy,
            teachers=teachers,
            weights=weights,
            steps=replace(steps_of(config, components, run), validation=validation),
            rows_per_minibatch=config.policy.train_global_batch_size,
        )


class OfflineDistillation(SupervisedAlgorithm[TextRoot, TextData]):
    """Distillation on given text."""

    def prepare(self, config: TextRoot, tokenizer: Tokenizer, loaded: Datasets) -> TextData:
        settings, data = config.distillation, config.data
        require_chat_template(tokenizer)
        check_k(settings.topk_logits_k, len(tokenizer))
        check_heads(config, len(tokenizer))
        check_teachers(config, tokenizer)

        def rows_of(dataset: Dataset) -> Sequence[TextRow]:
            teacher = require_teacher(config, dataset)
            rows = training_rows(dataset, data, tokenizer, longest_row(data, config.policy), learn=settings.learn)
            return Lazily(len(rows), lambda index: TextRow(rows[index], teacher))

        rows = supervised_data(settings, data, config.policy, loaded, rows_of)
        return TextData(rows.train, rows.validation, len(tokenizer))

    def row_reader(self, config: TextRoot) -> RowReader:
        return conversation_reader(config.data, config.policy, config.distillation.learn)

    def run(self, config: TextRoot, components: Components, run: Run) -> None:
        loss = distillation_loss_of(config, vocabulary=components.data.vocabulary)
        objective = text_objective(loss, teachers_of(config, components))
        policy, rows = components.models["policy"], config.policy.train_global_batch_size
        scores = self.scores(config, components, run)
        learn(config.distillation, objective, policy, components.data, run, batch_size=rows, scores=scores)


BYTES_PER_TOKEN = 8
"""Bytes of an id and a logprob that the teacher sends to the student."""

MAX_BYTES = 64 * 2**10
"""Maximum number of bytes for the teacher's tokens of one position."""


def sends_hidden(k: int | None, vocabulary: int) -> bool:
    """Return whether the teacher's hidden states are sent instead of its most likely tokens, because the loss reads all
    tokens of a vocabulary that is too large to send.

    Args:
        k: Configured number of tokens; None for the whole vocabulary.
        vocabulary: Number of tokens.
    """
    return k is None and BYTES_PER_TOKEN * vocabulary > MAX_BYTES


def check_k(k: int | None, vocabulary: int) -> None:
    """Refuse more of the teacher's tokens than there are, or than can travel.

    Args:
        k: Configured number of tokens; None for the whole vocabulary.
        vocabulary: Number of tokens.

    Raises:
        ConfigError: With the bytes of a position.
    """
    if sends_hidden(k, vocabulary):
        return
    if k is not None and k > vocabulary:
        raise ConfigError(
            f"distillation.topk_logits_k: got {k}, but the tokenizer has only {vocabulary} tokens. Set it to at most "
            f"{vocabulary}, or to null for all tokens"
        )
    size = BYTES_PER_TOKEN * (k or vocabulary)
    if size > MAX_BYTES:
        raise ConfigError(
            f"distillation.topk_logits_k: {k} takes {size:,} bytes per token of text (ids and logprobs); the limit is "
            f"{MAX_BYTES:,}. Set it to at most {MAX_BYTES // BYTES_PER_TOKEN}, such as {DEFAULT_K}, so that all "
            "other tokens count together as the tail. Or set it to null for all tokens, which sends only the "
            "teacher's hidden states"
        )


def check_heads(config: TextRoot | RolloutsRoot, vocabulary: int) -> None:
    """Refuse teachers with code of their own if the student's ranks read their heads.

    Args:
        config: Resolved config of the run.
        vocabulary: Number of tokens that student and teachers share.

    Raises:
        ConfigError: With the key of the teacher.
    """
    if not sends_hidden(config.distillation.topk_logits_k, vocabulary):
        return
    for key in teacher_sections(config).values():
        if attrgetter(key)(config).trust_remote_code is not None:
            raise ConfigError(
                f"{key}.trust_remote_code: with distillation.topk_logits_k=null and {vocabulary:,} tokens the ranks of "
                "the student read the head of the teacher, and they do not run its code. Set "
                f"distillation.topk_logits_k={DEFAULT_K}, or choose a teacher that transformers has"
            )


def teacher_tokenizer(config: TextRoot | RolloutsRoot, key: str) -> Any:
    """Return the tokenizer of a teacher that has its own tokens.

    Raises:
        ConfigError: If it has no tokenizer files, no end-of-sequence token or no chat template.
    """
    name = attrgetter(key)(config).model_name
    tokenizer = plain_tokenizer(name)
    if tokenizer is None:
        raise ConfigError(f"{key}.model_name: {name!r} has no tokenizer files; distillation.cross_tokenizer needs them")
    for what, value in (("end-of-sequence token", tokenizer.eos_token), ("chat template", tokenizer.chat_template)):
        if value is None:
            raise ConfigError(f"{key}.model_name: the tokenizer of {name!r} has no {what}; choose an instruct model")
    return tokenizer


def distillation_loss_of(
    config: TextRoot | RolloutsRoot, *, vocabulary: int
) -> DistillationLoss | WholeDistillationLoss:
    """Return the loss of a run.

    Args:
        config: Resolved config of the run.
        vocabulary: Number of tokens that student and teachers share.
    """
    settings: DistillationLossConfig = config.loss_fn
    divergence = Divergence(settings.kl_type, settings.mixed_kl_weight, settings.jensen_shannon_beta)
    importance = settings.importance and settings.importance.at_level("token")
    loss = DistillationLoss(divergence, settings.nll_weight, settings.temperature, importance)
    if not sends_hidden(config.distillation.topk_logits_k, vocabulary):
        return loss
    heads = tuple(head_files(attrgetter(key)(config)) for key in teacher_sections(config).values())
    return WholeDistillationLoss(
        divergence, settings.nll_weight, settings.temperature, importance, heads=heads, vocabulary=vocabulary
    )


def head_files(teacher: ModelConfig) -> HeadFiles:
    """Return the head of a teacher, for the student's ranks to read."""
    return HeadFiles(teacher.model_name, teacher.precision, json.dumps(teacher.hf_config_overrides, sort_keys=True))


def text_objective(loss: DistillationLoss | WholeDistillationLoss, teachers: Teachers) -> RowObjective[TextRow]:
    """Return the objective of learning from text that teachers score."""

    def complete(batch: Batch, policy: Model) -> Batch:
        return teachers.scored_rows(batch, batch.array(TEACHER).tolist())

    return RowObjective(loss, to_batch, complete)


def to_batch(rows: Sequence[TextRow]) -> Batch:
    """Return text as the columns that the loss needs, and `teacher`, the role of each row's teacher."""
    return text_batch([row.row for row in rows]).with_columns({TEACHER: np.array([row.teacher for row in rows])})


def teachers_of(config: TextRoot | RolloutsRoot, components: Components) -> Teachers:
    """Return the teachers of a run."""
    vocabulary = components.data.vocabulary
    models = {role: components.models[role] for role in teacher_sections(config)}
    k = config.distillation.topk_logits_k
    reads = [topk(k or vocabulary, below=vocabulary)]
    if sends_hidden(k, vocabulary):
        reads = [HIDDEN if len(models) == 1 else hidden_states(_widest(config)), LOGPROBS]
    return Teachers(models, reads, temperature=config.loss_fn.temperature)


def _widest(config: TextRoot | RolloutsRoot) -> int:
    """Return the largest hidden size of the teachers."""
    # This package imports torch where it is installed.
    from transformers import AutoConfig

    teachers = [attrgetter(key)(config) for key in teacher_sections(config).values()]
    found = [
        AutoConfig.from_pretrained(each.model_name, trust_remote_code=False, **each.hf_config_overrides)
        for each in teachers
    ]
    return max(each.get_text_config().hidden_size for each in found)


def train(
    config: DistillationConfig,
    loss: Loss,
    *,
    policy: Model,
    teachers: RolloutTeacher,
    steps: RolloutSteps,
    rows_per_minibatch: int,
    weights: Callable[[Batch, Model], tuple[Batch, dict[str, float]]] | None = None,
) -> None:
    """Train the student for `config.max_num_steps` steps, or until the data or the run ends.

    Where models run and on what backend are properties of the objects handed in.

    Args:
        config: Config section of the algorithm.
        loss: Loss of the student.
        policy: Student, the model to train.
        teachers: Teachers that score the rollouts.
        steps: Rollouts of each step, weight sync, validation and checkpoints.
        rows_per_minibatch: Rollouts of one optimizer step.
        weights: Function that adds the importance weights that the loss reads to a batch (`with_state_weights`), and
            returns their metrics; None for none.
    """
    run, agents = steps.run, learning_agents(config)
    watch = AgentWatch(config.section, agents)
    for step, groups, *_ in steps.take(models={"policy": policy}):
        watch.observe(groups)
        with run.phase("teacher"):
            batch = teachers.scored(trained_batch(build_batch(groups, config), groups, agents), groups)
        if weights is not None:
            with run.phase("logprobs"):
                batch, of_weights = weights(batch, policy)
            run.record(step, of_weights)
        with run.phase("training"):
            updates = [policy.train_step(minibatch, loss) for minibatch in minibatches(batch, rows_per_minibatch)]
            if config.self_teacher is not None and run.due(config.self_teacher.sync_period, step):
                policy.update_reference(config.self_teacher.mixup_alpha)
        steps.sync(step, batch)
        run.record(step, {**training_metrics(updates), **rollout_metrics(groups), **teachers.metrics})
        run.record_rollouts(step, groups, np.zeros(0), batch=batch)


def with_state_weights(
    batch: Batch, policy: Model, *, correction: ImportanceCorrection, temperature: float
) -> tuple[Batch, dict[str, float]]:
    """Return the batch with the column `STATE_WEIGHTS`, importance weights of rollouts that run ahead of training, and
    the metrics of the ratios of sampled tokens.

    The ratio is of the policy as it is to the weights that sampled; given responses have the weight 1.

    Args:
        batch: Batch with `generation_logprobs`.
        policy: The student.
        correction: Truncation, bounds and level of the weights.
        temperature: Sampling temperature, which the logprobs of the engine have.
    """
    prev = policy.infer(batch, [LOGPROBS], temperature=temperature).ragged("logprobs")
    sampled = without_demonstrations(batch.with_columns({"prev_logprobs": prev}))
    if ROLLOUT in batch:
        sampled = sampled.with_columns({PAIR: batch.array(ROLLOUT)})
    is_sampled = sampled.ragged(LOSS_MASK).values > 0
    found = importance_weights(correction, sampled, of_states=True).values
    batch = batch.with_columns({STATE_WEIGHTS: prev.like(np.where(is_sampled, found, 1.0).astype(np.float32))})
    d = prev.values[is_sampled].astype(np.float64) - batch.ragged(GENERATION_LOGPROBS).values[is_sampled]
    ratios = np.exp(np.clip(d, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    if not len(ratios):
        return batch, {}
    size = ratios.mean() ** 2 / np.square(ratios).mean()
    return batch, {"mismatch/weight": ratios.mean(), "mismatch/effective_sample_size": size}


class DistillationValidation(Validation):
    """Compares the student with its teachers, and ends the run when a goal is reached.

    Args:
        policy: The student.
        teachers: Teachers that it is compared with.
        loss: Loss that is measured.
        prompts: All validation prompts; at most `config.max_val_samples` of them are used.
        sampling: How completions are drawn.
        config: Number of samples and generations, and the goal.
    """

    def __init__(
        self,
        policy: Model,
        teachers: RolloutTeacher,
        loss: Loss,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        config: RolloutConfig,
    ) -> None:
        super().__init__(prompts, sampling, config)
        self._policy, self._teachers, self._loss = policy, teachers, loss

    def further_metrics(self, groups: Sequence[RolloutGroup]) -> Mapping[str, float]:
        """Measure the loss with its parts."""
        batch = self._teachers.scored(build_batch(groups, self._config), groups)
        return {f"val/{name}": metric.result() for name, metric in self._policy.evaluate(batch, self._loss).items()}
