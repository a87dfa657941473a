"""Settings of distillation."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, ClassVar, Protocol, cast

from pydantic import Field

from rl_algos.data.config import DataRoot
from rl_algos.losses.distillation import KLName
from rl_algos.rollouts.config import RolloutConfig, RolloutRoot
from rl_algos.sft.config import LearnedTurns
from rl_algos.supervised.config import SupervisedConfig
from rl_core.config import Config, WhenChanged
from rl_core.model_config import GeneratingModelConfig, ModelConfig

DEFAULT_K = 64


class DistillationConfig(RolloutConfig):
    """On-policy distillation: steps, prompts and samples of a step, what the teacher scores, validation."""

    section: ClassVar[str] = "distillation"
    validation_goals: ClassVar[tuple[str, ...]] = ("reward", "accuracy", "mean_length", "loss")

    num_generations_per_prompt: int = Field(default=1, gt=0)
    """Rollouts of each prompt."""
    topk_logits_k: int | None = Field(default=DEFAULT_K, gt=0)
    """Number of the teacher's most likely tokens at which the student is compared with it; all others count as one, the
    tail. null compares the whole vocabulary, with one teacher or several; if it is large, the teachers' hidden states
    are sent in place of logprobs."""
    cross_tokenizer: bool = False
    """The teacher has other tokens than the student: compare the likelihoods of spans of text that both make of whole
    tokens, in place of the teacher's most likely tokens."""
    stop_at_validation_metric: Annotated[str | None, WhenChanged.GOAL] = None
    """End the run once this validation metric reaches the threshold: `accuracy` or `mean_length` from below, or `loss`
    from above."""


class OfflineDistillationConfig(SupervisedConfig):
    """Distillation on given conversations: steps, epochs, what is learned of a row, validation."""

    learn: LearnedTurns = "all"
    """Turns of the assistant that are learned: all of them, or the last one."""
    topk_logits_k: int | None = Field(default=DEFAULT_K, gt=0)
    """Number of the teacher's most likely tokens at which the student is compared with it; all others count as one, the
    tail. null compares the whole vocabulary, with one teacher or several; if it is large, the teachers' hidden states
    are sent in place of logprobs."""


class DistillationLossConfig(Config):
    """The divergence of the student from the teacher."""

    kl_type: KLName = "mixed"
    """Divergence of the student from the teacher: `forward` KL(teacher || student), `reverse` KL(student || teacher),
    `mixed`, the weighted sum of both, or `jensen_shannon`, generalised as in GKD."""
    mixed_kl_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of the forward KL in `mixed`; the reverse KL has the rest."""
    jensen_shannon_beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of `jensen_shannon`."""
    nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the negative log-likelihood of the given text itself, beside the divergence."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of student and teacher in the loss."""
    span_tau: float = Field(default=100.0, ge=1)
    """With `distillation.cross_tokenizer`: likelihoods of spans are compared to the power of one over this."""


class TextRoot(DataRoot, Protocol):
    """The resolved config of distillation on given text, as far as it reads it."""

    @property
    def distillation(self) -> OfflineDistillationConfig:
        """Settings of the loop."""
        ...

    @property
    def loss_fn(self) -> DistillationLossConfig:
        """Settings of the loss."""
        ...

    @property
    def policy(self) -> ModelConfig:
        """The student."""
        ...


class RolloutsRoot(RolloutRoot, Protocol):
    """The resolved config of distillation on the student's own rollouts, as far as it reads it."""

    @property
    def distillation(self) -> DistillationConfig:
        """Settings of the loop."""
        ...

    @property
    def loss_fn(self) -> DistillationLossConfig:
        """Settings of the loss."""
        ...

    @property
    def policy(self) -> GeneratingModelConfig:
        """The student."""
        ...


def teacher_sections(config: object) -> dict[str, str]:
    """The role of each teacher of a resolved config, to the key of its section: `teacher` to `teacher`, and
    `teacher_NAME` to `teachers.NAME`."""
    known = type(cast(Config, config)).model_fields
    several = type(attrgetter("teachers")(config)).model_fields if "teachers" in known else ()
    one = {"teacher": "teacher"} if "teacher" in known else {}
    return {**one, **{f"teacher_{name}": f"teachers.{name}" for name in several}}
