"""Settings of the GRPO loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

from pydantic import Field

from rl_algos.distillation.config import SelfTeacherConfig
from rl_algos.policy_gradient.config import ObjectiveRoot
from rl_algos.rollouts.config import PolicyGradientConfig, WeightedAgentConfig
from rl_core.config import Config, NamedConfig, PathText


class EstimatorConfig(NamedConfig):
    """How rewards become advantages; the keys next to `name` are the settings of that estimator."""

    name: str | None = None
    """Name of the advantage estimator: `grpo`, `grpo_batch_std`, `drgrpo`, `rloo`, `reinforce`, `reinforce_plus_plus`,
    `reinforce_plus_plus_baseline`, `gpg`, `opo`, `remax`, `pass_at_k`, `maxrl`, `raft`, `tpo`, `gdpo`,
    `optimal_token_baseline`, by turn `turn_returns`, `mt_grpo` and `gigpo`, or your own function as
    `package.module:function` or `file.py:function`. If unset, it is `rloo` with `use_leave_one_out_baseline` and `grpo`
    without it."""


class OpponentConfig(Config):
    """Other weights that take the turns of an agent: an older version of the policy, or another model."""

    update_every: int | None = Field(default=None, gt=0)
    """Number of steps until the opponent takes over the policy's weights, as they are then; in between it keeps
    them. It starts with the initial weights."""
    pool: int = Field(default=1, gt=0)
    """Number of the newest of these versions; at every update, the one that plays next is drawn from them. With 1 it is
    the newest."""
    model_name: PathText | None = None
    """Folder or hub name of a model that plays as it is during the whole run, instead of an older version of the
    policy. It must have the policy's tokens."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the plays with the opponent as the agent; in the others it is the policy. The shares of agents that
    are below 1 are of different plays: with 0.5 for each of two players, each play has one opponent."""


class TrainedAgentConfig(WeightedAgentConfig):
    """How the rollouts of one agent train, with estimators and opponents."""

    refused: ClassVar[Mapping[str, str]] = {}

    adv_estimator: EstimatorConfig = EstimatorConfig()
    """Advantage estimator of this agent; `grpo.adv_estimator` if it has no name."""
    opponent: OpponentConfig | None = None
    """Other weights than the policy's that take the turns of this agent: an older version of the policy
    (`update_every`), or another model (`model_name`). Their turns are recorded and nothing is trained on them."""


class TrainedAgentsConfig(Config):
    """Settings of agents by their names, which the environment or the rollout program gives."""

    named: ClassVar[type[Config] | None] = TrainedAgentConfig


class TeacherAdvantageConfig(Config):
    """Advantages of tokens by teachers, in addition to the rewards' own (on-policy distillation). The teachers are
    the sections `teacher` and `teachers`, as in distillation, or `self_teacher`; without any, only rewards teach."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of a sampled token's advantage by its teacher: the logprob that the teacher gives it less the policy's as
    the step begins. Its mean policy gradient is the gradient of the reverse KL divergence, KL(policy || teacher)."""
    reward_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Factor of the advantages of the rewards, which the estimator computes. 0 learns from the teachers only; then each
    row must have one. Otherwise rows without a teacher learn from their rewards."""
    self_teacher: SelfTeacherConfig | None = None
    """The policy as its own teacher, with more in its prompt, instead of the sections `teacher` and `teachers` (SDPO).
    With `weights: reference`, `reference_sync_period` moves the reference. If unset, other models teach, if there are
    some."""


class TrainedEnvironmentConfig(Config):
    """How the rollouts of one environment train, if a run has several."""

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the advantages of this environment, applied after they are clipped."""
    adv_estimator: EstimatorConfig = EstimatorConfig()
    """Advantage estimator of this environment, which sees only its rollouts; `grpo.adv_estimator` if it has no name. An
    estimator of an agent takes precedence."""
    surrogate: dict[str, float] = {}
    """Settings of `loss_fn.surrogate` that differ for this environment, such as `{clip_low: 0.2, clip_high: 0.28}`: the
    numbers in the term of a token."""


class TrainedEnvironmentsConfig(Config):
    """Settings of environments by the names that `data.train` and `env` give them."""

    named: ClassVar[type[Config] | None] = TrainedEnvironmentConfig


class GRPOConfig(PolicyGradientConfig):
    """GRPO and its family: steps, prompts and samples of a step, advantages, validation."""

    section: ClassVar[str] = "grpo"
    learns_from_users: ClassVar[bool] = True
    also_called: ClassVar[Mapping[str, str]] = {
        **PolicyGradientConfig.also_called,
        "num_ppo_epochs": "num_iterations",
        "ppo_epochs": "num_iterations",
    }

    normalize_rewards: bool = True
    """Divide advantages by the standard deviation of their group (`grpo`, `rloo`)."""
    use_leave_one_out_baseline: bool = False
    """Compare each reward with the mean of the other rewards in its group instead of the mean of all of them."""
    adv_estimator: EstimatorConfig = EstimatorConfig()
    agents: TrainedAgentsConfig = TrainedAgentsConfig()
    """Settings of single agents by name, if plays have several (players of a game, proposer and solver): `train`,
    `weight`, `adv_estimator` and `opponent`. Each agent's rollouts are compared with one another only, whether it is
    listed here or not."""
    environments: TrainedEnvironmentsConfig = TrainedEnvironmentsConfig()
    """Settings of single environments by name, if a run has several: `weight`, `adv_estimator` and `surrogate`. The
    rest of the loss is the same for all, because the tokens of a step are added up and divided by one count."""
    distillation: TeacherAdvantageConfig = TeacherAdvantageConfig()
    num_iterations: int = Field(default=1, gt=0)
    """Number of passes over the rollouts of a step. With more than one, each pass has its own order, which depends on
    the seed, and the ratio of the loss is relative to the policy before the first pass (`prev_logprobs`)."""

    @property
    def passes_per_step(self) -> int:
        """Number of times that a step trains on each of its rollouts."""
        return self.num_iterations

    @property
    def fixed_agents(self) -> frozenset[str]:
        named = trained_agents(self).items()
        return frozenset(name for name, each in named if each.opponent is not None and each.opponent.share == 1)

    @property
    def surrogate_by_environment(self) -> Mapping[str, Mapping[str, float]]:
        return {name: own.surrogate for name, own in trained_environments(self).items() if own.surrogate}

    @property
    def reads_reference(self) -> bool:
        own = self.distillation.self_teacher
        return own is not None and own.weights == "reference"


def trained_environments(config: GRPOConfig) -> dict[str, TrainedEnvironmentConfig]:
    """Return the settings of environments by name."""
    return dict(config.environments)


def trained_agents(config: GRPOConfig) -> dict[str, TrainedAgentConfig]:
    """Return the settings of agents by name."""
    return dict(config.agents)


class GRPORoot(ObjectiveRoot, Protocol):
    """The resolved config of a GRPO run, as far as GRPO reads it."""

    grpo: GRPOConfig
    """Settings of the loop."""
