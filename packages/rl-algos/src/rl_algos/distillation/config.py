"""Settings of distillation."""

from __future__ import annotations

from string import Formatter
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import Field

from rl_algos.data.config import DataRoot
from rl_algos.losses.distillation import KLName
from rl_algos.losses.importance import ImportanceCorrection
from rl_algos.rollouts.config import LearningAgentConfig, LearningAgentsConfig, RolloutConfig, RolloutRoot
from rl_algos.sft.config import LearnedTurns
from rl_algos.supervised.config import SupervisedConfig
from rl_core.config import Config, WhenChanged
from rl_core.model_config import GeneratingModelConfig, ModelConfig

DEFAULT_K = 64


class SelfTeacherConfig(Config):
    """The student as its own teacher, whose prompt has more than the student's (SDFT, OPSD, SDPO)."""

    prompts: list[str] = Field(min_length=1)
    """Templates of the teacher's prompt, in place of the last message of the student's: `{prompt}` is that message,
    `{success}` the final text of another rollout of the group that succeeded, `{feedback}` the text that the
    environment returned as `feedback` in `info`, and all other fields come from the row, such as `{answer}`. The
    first template whose fields are all known is taken; a rollout without one has no teacher."""
    weights: Literal["current", "reference"] = "current"
    """Weights that read the teacher's prompt: `current`, those of the student as the step begins, or `reference`, the
    initial ones, or a copy that follows the student after every sync period of the reference."""
    success_threshold: float = 1.0
    """Minimum reward of a rollout that succeeded, for `{success}`."""


class FollowingTeacherConfig(SelfTeacherConfig):
    """The student as its own teacher, with the updates of the reference that may be its weights."""

    sync_period: int = Field(default=0, ge=0)
    """Number of steps between updates that move the reference towards the student; 0 keeps the initial weights."""
    mixup_alpha: float = Field(default=1.0, gt=0, le=1)
    """Step size of such an update: 1 copies the student, less makes a moving average."""


class DistillationConfig(RolloutConfig):
    """On-policy distillation: steps, prompts and samples per step, scored tokens, validation."""

    section: ClassVar[str] = "distillation"
    validation_goals: ClassVar[tuple[str, ...]] = ("reward", "accuracy", "mean_length", "loss")

    num_generations_per_prompt: int = Field(default=1, gt=0)
    """Number of rollouts per prompt."""
    on_policy_share: float = Field(default=1.0, ge=0, le=1)
    """Share of the rollouts that the student samples (lambda of GKD, arXiv:2306.13649). The others take the response in
    the row of their prompt, which supervised fine-tuning would learn. A fraction of a rollout is a chance, drawn from
    the seed. All rollouts of a row without a response are sampled."""
    agents: LearningAgentsConfig = LearningAgentsConfig()
    """Settings of single agents by name, if plays have several: `train: false` leaves the rollouts of an agent out of
    the loss. All agents that train have the teacher of the prompt."""
    topk_logits_k: int | None = Field(default=DEFAULT_K, gt=0)
    """Number of the teacher's most likely tokens that student and teacher are compared at; all other tokens count as
    one, the tail. null compares the whole vocabulary, with one teacher or several; if the vocabulary is large, the
    teachers' hidden states are sent instead of logprobs."""
    cross_tokenizer: bool = False
    """Distil from a teacher whose tokenizer differs from the student's: compare the likelihoods of spans of the text
    that consist of whole tokens in both, instead of the teacher's most likely tokens."""
    self_teacher: FollowingTeacherConfig | None = None
    """The student as its own teacher, instead of the sections `teacher` and `teachers`. If unset, another model
    teaches."""
    stop_at_validation_metric: Annotated[str | None, WhenChanged.GOAL] = None
    """Validation metric that ends the run when it reaches `stop_at_validation_threshold`: `reward`, `accuracy` or
    `mean_length` from below, or `loss` from above."""

    @property
    def demonstrated_share(self) -> float:
        return 1 - self.on_policy_share


def learning_agents(config: DistillationConfig) -> dict[str, LearningAgentConfig]:
    """Return the settings of agents by name."""
    return dict(config.agents)


class OfflineDistillationConfig(SupervisedConfig):
    """Distillation on given conversations: steps, epochs, learned parts of a row, validation."""

    learn: LearnedTurns = "all"
    """Assistant turns to train on: `all` of them, or only the `last` one."""
    topk_logits_k: int | None = Field(default=DEFAULT_K, gt=0)
    """Number of the teacher's most likely tokens that student and teacher are compared at; all other tokens count as
    one, the tail. null compares the whole vocabulary, with one teacher or several; if the vocabulary is large, the
    teachers' hidden states are sent instead of logprobs."""


class DistillationLossConfig(Config):
    """The divergence of the student from the teacher."""

    kl_type: KLName = "mixed"
    """Divergence of the student from the teacher: `forward` KL(teacher || student), `reverse` KL(student || teacher),
    `mixed`, the weighted sum of both, or `jensen_shannon`, generalised as in GKD."""
    mixed_kl_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of the forward KL in `mixed`; the weight of the reverse KL is 1 minus this."""
    jensen_shannon_beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of `jensen_shannon`."""
    nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of the given text, which is added to the divergence."""
    importance: ImportanceCorrection | None = None
    """Weight the divergence at a token by the probability of the tokens before it, the student's as the step begins
    relative to that of the weights that sampled them, for rollouts that run ahead of training or are sampled from some
    tokens only (`top_p`, `top_k`, `min_p`). At the level `token`,
    the default, it is the ratio of the token before it; at the level `sequence` the product over all sampled tokens
    before it, which is exact and has more variance. The term of a given response has the weight 1. null turns the
    correction off."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the loss: the divisor of the logits of student and teacher."""
    span_tau: float = Field(default=100.0, ge=1)
    """Temperature of span likelihoods with `distillation.cross_tokenizer`: they are raised to the power of 1 over this
    before they are compared."""


class TextRoot(DataRoot, Protocol):
    """The resolved config of distillation on given text, as far as it reads it."""

    distillation: OfflineDistillationConfig
    """Settings of the loop."""
    loss_fn: DistillationLossConfig
    """Settings of the loss."""
    policy: ModelConfig
    """The student."""


class RolloutsRoot(RolloutRoot, Protocol):
    """The resolved config of distillation on the student's own rollouts, as far as it reads it."""

    distillation: DistillationConfig
    """Settings of the loop."""
    loss_fn: DistillationLossConfig
    """Settings of the loss."""
    policy: GeneratingModelConfig
    """The student."""


def teacher_sections(config: object) -> dict[str, str]:
    """Return the key of the section of each teacher of a resolved config, by role: `teacher` for `teacher`, and
    `teachers.NAME` for `teacher_NAME`."""
    known = vars(config)
    one = {"teacher": "teacher"} if "teacher" in known else {}
    several = vars(known["teachers"]) if "teachers" in known else {}
    return {**one, **{f"teacher_{name}": f"teachers.{name}" for name in several}}


def fields_of(template: str) -> set[str]:
    """Return the names of the fields of a template.

    Raises:
        ValueError: If it is no template: a brace without its partner, or a field without a name.
    """
    names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(f"has the field {{{wrong[0]}}}; fields have names such as {{answer}}, and {{{{ is a brace")
    return names
