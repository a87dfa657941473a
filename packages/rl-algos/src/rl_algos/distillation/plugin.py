"""Distillation as plugins: on the student's own rollouts, and on given text."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from rl_algos.distillation.config import (
    DEFAULT_K,
    DistillationConfig,
    DistillationLossConfig,
    OfflineDistillationConfig,
    RolloutsRoot,
    SelfTeacherConfig,
    TextRoot,
    fields_of,
    teacher_sections,
)
from rl_algos.losses.distillation import METRICS, NLL, SPAN_METRICS
from rl_algos.rollouts.checks import length_problem
from rl_algos.rollouts.config import LearningAgentConfig, LearningAgentsConfig, RolloutConfig, RolloutRoot
from rl_algos.rollouts.plugin import rollout_algorithm, sections_by_name
from rl_algos.supervised.config import validation_metrics as of_text
from rl_algos.supervised.plugin import supervised_algorithm
from rl_core.config import Config, Problem, assemble, is_changed
from rl_core.model import ModelSpec
from rl_core.plugins import ModelNeed, TrainingDefaults, WrittenValues

_WEIGHTS = {"mixed_kl_weight": "mixed", "jensen_shannon_beta": "jensen_shannon"}
"""Keys of `loss_fn` with the divergence that reads each."""


TEACHERS = ("teacher", "teachers.*")
"""Sections of the teachers."""


def teacher_needs(config: object) -> dict[str, ModelNeed]:
    """Return the teachers of a resolved config by role. They do not train."""
    spec = ModelSpec(role="teacher", trains=False)
    return {role: ModelNeed(key, spec) for role, key in teacher_sections(config).items()}


def distillation_section(written: Any) -> type[Config]:
    """Return the type of `distillation` on rollouts, with the agents that are written there."""
    agents = sections_by_name(written, "agents", LearningAgentsConfig, lambda _name, _settings: LearningAgentConfig)
    return assemble("Distillation", {"agents": agents}, base=DistillationConfig)


def models(config: TextRoot | RolloutsRoot) -> dict[str, ModelNeed]:
    """Return the student, which trains, and the teachers, which do not change."""
    own = config.distillation.self_teacher if isinstance(config.distillation, DistillationConfig) else None
    keeps = own is not None and own.weights == "reference"
    student = ModelSpec(keeps_reference=keeps, seed=config.distillation.seed)
    return {"policy": ModelNeed("policy", student), **teacher_needs(config)}


def check_rollouts(config: RolloutsRoot) -> Iterator[Problem]:
    """Yield problems of distillation on rollouts."""
    if config.distillation.self_teacher is None:
        yield from _teacher(config, ", or distillation.self_teacher for the student as its own teacher")
    yield from _loss(config.loss_fn)
    if not config.distillation.cross_tokenizer:
        yield from short_teachers(config)
    yield from _cross_tokenizer(config)
    yield from _self_teacher(config)
    if config.distillation.structured_output == "constrain":
        reason = "limits sampling to the tokens that a grammar allows, but the loss compares the distributions over all"
        yield Problem("distillation.structured_output", reason, got="constrain", remedy="Set it to ignore or refuse")
    if weight := config.loss_fn.nll_weight:
        reason = "is for training on given text; here the student would train on its own rollouts"
        remedy = f"Remove this key, or use algorithm: {OFFLINE.name}"
        yield Problem("loss_fn.nll_weight", reason, got=weight, remedy=remedy)


def check_text(config: TextRoot) -> Iterator[Problem]:
    """Yield problems of distillation on given text, in addition to problems of every algorithm with given rows."""
    yield from _teacher(config)
    if config.loss_fn.importance is not None:
        yield Problem.unused("loss_fn.importance", f"with algorithm: {OFFLINE.name}, which samples nothing")
    yield from _loss(config.loss_fn)
    if is_changed(config.loss_fn, "span_tau"):
        yield Problem.unused("loss_fn.span_tau", f"with algorithm: {OFFLINE.name}")


def short_teachers(config: RolloutRoot) -> Iterator[Problem]:
    """Yield the problems of teachers that are too short for the rollouts they read."""
    for key in teacher_sections(config).values():
        yield from length_problem(config.policy, key, attrgetter(key)(config).max_total_sequence_length)


def _teacher(config: TextRoot | RolloutsRoot, others: str = "") -> Iterator[Problem]:
    """Yield the problem of a config without a teacher."""
    if not teacher_sections(config):
        remedy = f"Set teacher.model_name, or teachers.NAME.model_name for rows of an environment or dataset{others}"
        yield Problem("teacher", "must be set, because nothing else teaches the student", remedy=remedy)


def _cross_tokenizer(config: RolloutsRoot) -> Iterator[Problem]:
    settings, loss = config.distillation, config.loss_fn
    if not settings.cross_tokenizer:
        if is_changed(loss, "span_tau"):
            yield Problem.unused("loss_fn.span_tau", "without distillation.cross_tokenizer=true")
        return
    if is_changed(settings, "topk_logits_k"):
        yield Problem.unused("distillation.topk_logits_k", "with distillation.cross_tokenizer=true")
    for key in ("kl_type", "importance"):
        if is_changed(loss, key):
            yield Problem.unused(f"loss_fn.{key}", "with distillation.cross_tokenizer=true")
    if settings.max_rollout_turns > 1:
        reason = "cross_tokenizer supports single-turn rollouts only"
        yield Problem("distillation.max_rollout_turns", reason, got=settings.max_rollout_turns, allowed="1")
    if settings.agent is not None:
        reason = "cannot be combined with cross_tokenizer, which supports single-turn rollouts only"
        yield Problem("distillation.agent", reason)
    elif settings.renders_anew:
        because = "because cross_tokenizer supports single-turn rollouts only, which have no earlier turns to rewrite"
        yield Problem.unused("distillation.rewritten_history", because)
    if list(teacher_sections(config)) != ["teacher"]:
        reason = "supports a single teacher only, the section `teacher`"
        yield Problem("distillation.cross_tokenizer", reason, got=True, remedy="Remove `teachers`")


def _self_teacher(config: RolloutsRoot) -> Iterator[Problem]:
    settings, key = config.distillation, "distillation.self_teacher"
    own = settings.self_teacher
    if own is None:
        return
    yield from self_teacher_problems(config, settings, own, key)
    if settings.cross_tokenizer:
        yield Problem("distillation.cross_tokenizer", f"is for a teacher with other tokens, but {key} is set", got=True)
    if settings.topk_logits_k is None:
        reason = f"needs a number with {key}, whose distributions travel through the driver"
        yield Problem("distillation.topk_logits_k", reason, remedy=f"Set it to a number, such as {DEFAULT_K}")
    for name in ("sync_period", "mixup_alpha"):
        if is_changed(own, name) and own.weights != "reference":
            yield Problem.unused(f"{key}.{name}", f"with {key}.weights={own.weights}")
    if is_changed(own, "mixup_alpha") and own.weights == "reference" and not own.sync_period:
        yield Problem.unused(f"{key}.mixup_alpha", f"with {key}.sync_period=0")


def self_teacher_problems(
    config: object, settings: RolloutConfig, own: SelfTeacherConfig, key: str
) -> Iterator[Problem]:
    """Yield problems of a policy that is its own teacher.

    Args:
        config: Resolved config of the run.
        settings: Section of the algorithm.
        own: Settings of the teacher.
        key: Dotted key of these settings.
    """
    section = settings.section
    if others := teacher_sections(config):
        reason = f"makes the student its own teacher, but there is also {next(iter(others.values()))}"
        yield Problem(key, reason, remedy="Remove one of the two")
    if settings.splits:
        split = "agent" if settings.agent is not None else "rewritten_history"
        reason = f"makes rollouts of several segments, but {key} replaces one prompt of a rollout"
        yield Problem(f"{section}.{split}", reason)
    fields: set[str] = set()
    for number, template in enumerate(own.prompts):
        try:
            fields |= fields_of(template)
        except ValueError as error:
            yield Problem(f"{key}.prompts.{number}", str(error), got=template)
    if "success" not in fields and is_changed(own, "success_threshold"):
        yield Problem.unused(f"{key}.success_threshold", "because no template has {success}")
    if "success" in fields and settings.num_generations_per_prompt < 2:
        reason = "must be at least 2, because {success} is of another rollout of the same prompt"
        got = settings.num_generations_per_prompt
        yield Problem(f"{section}.num_generations_per_prompt", reason, got=got)


def _loss(loss: DistillationLossConfig) -> Iterator[Problem]:
    for key, kind in _WEIGHTS.items():
        if is_changed(loss, key) and loss.kl_type != kind:
            remedy = f"Remove this key, or set loss_fn.kl_type={kind}"
            yield Problem.unused(f"loss_fn.{key}", f"with loss_fn.kl_type={loss.kl_type}", remedy=remedy)


def rollout_validation_metrics(config: RolloutsRoot) -> list[str]:
    """Return the metrics that a validation on rollouts records, in addition to every algorithm's."""
    measured = SPAN_METRICS if config.distillation.cross_tokenizer else METRICS
    return [f"val/{name}" for name in ("loss", *measured)]


def text_validation_metrics(config: TextRoot) -> list[str]:
    """Return the metrics that a validation on text records; none if the run does not validate."""
    measured = [*METRICS, *([NLL] if config.loss_fn.nll_weight else [])]
    return of_text(config.distillation, config.data, ["loss", *measured, "num_tokens"])


def training_defaults(written: WrittenValues) -> dict[str, TrainingDefaults]:
    """Return the defaults of one update of the policy with all rollouts of a step."""
    rollouts = DistillationConfig.rollouts_written(written)
    return {"policy": TrainingDefaults(lr=1e-5, adapter_lr=1e-4, rows=rollouts)}


PLUGIN = rollout_algorithm(
    "distillation",
    sections={"distillation": distillation_section, "loss_fn": DistillationLossConfig},
    implementation="rl_algos.distillation.algorithm:Distillation",
    models=models,
    optional_models=TEACHERS,
    training_defaults=training_defaults,
    # The filter of sampling decides on the states, and the loss compares whole distributions in them.
    reads_filtered=True,
    checks=(check_rollouts,),
    further_metrics=rollout_validation_metrics,
)
OFFLINE = supervised_algorithm(
    "offline_distillation",
    sections={"distillation": OfflineDistillationConfig, "loss_fn": DistillationLossConfig},
    implementation="rl_algos.distillation.algorithm:OfflineDistillation",
    models=models,
    optional_models=TEACHERS,
    validation_metrics=text_validation_metrics,
    training_defaults=TrainingDefaults(lr=2e-5, adapter_lr=2e-4, rows=64),
    checks=(check_text,),
    scores_tasks=True,
)
