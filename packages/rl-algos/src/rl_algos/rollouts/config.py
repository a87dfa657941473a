"""Settings that algorithms share which train on their own rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from rl_algos.data.config import DataRoot
from rl_algos.evaluation.config import EvaluationConfig
from rl_algos.rollouts.agent_config import AgentConfig
from rl_core.config import Config, WhenChanged
from rl_core.model_config import GenerationConfig, TokenizerConfig


class AsyncConfig(Config):
    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    enabled: bool = False
    """Roll out ahead of training, so that generation and training go on at the same time. Generation then needs devices
    of its own, and the loss a correction for rollouts that older weights sampled."""
    max_trajectory_age_steps: int = Field(default=1, ge=0)
    """Most steps that the weights of a rollout may be behind those that train on it. So many steps' prompts run ahead;
    a step waits for a rollout that would become older, and none is discarded. 0 is the synchronous run."""
    in_flight_weight_updates: bool = False
    """Interrupt completions under way when the generators take new weights; each goes on with them from the tokens that
    it has. Otherwise they end first, with the old weights, and the generators wait for the longest."""
    recompute_kv_cache_after_weight_updates: bool = True
    """Have a completion that was interrupted go on from keys and values that the new weights compute of all its tokens,
    so that every token's logprob is that of one weight version. false keeps those that the engine (vLLM) has: an update
    costs no prefill, and what follows is sampled by the new weights over keys and values of older ones."""


class CurriculumConfig(Config):
    enabled: bool = False
    """Draw more prompts from the datasets that the policy sometimes solves, and fewer from those that it always or
    never solves: the weight of a dataset is multiplied by `4 s (1 - s)`, where s is the share of its rollouts that
    succeed. For several training datasets."""
    success_reward: float = 1.0
    """Reward from which on a rollout has succeeded."""
    window: int = Field(default=32, gt=0)
    """Groups of a dataset over which its success is averaged."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Smallest factor of a weight, so that every dataset is tried again."""


class RolloutConfig(Config):
    """Base of the section of an algorithm that rolls out prompts: how many, for how long, and what validates them."""

    section: ClassVar[str]
    """Key of the section in the config of a run, as messages name it; set by every algorithm."""
    validation_goals: ClassVar[tuple[str, ...]] = ("reward", "accuracy", "mean_length")
    """Values of `stop_at_validation_metric`."""
    also_called: ClassVar[Mapping[str, str]] = {
        "num_samples": "num_generations_per_prompt",
        "num_samples_per_prompt": "num_generations_per_prompt",
        "num_generations": "num_generations_per_prompt",
        "val_num_samples": "val_num_generations_per_prompt",
        "val_num_generations": "val_num_generations_per_prompt",
        "max_prompts": "max_val_samples",
        "max_val_prompts": "max_val_samples",
        "val_batches": "max_val_samples",
    }

    num_prompts_per_step: int = Field(default=32, gt=0)
    """Prompts of one step."""
    num_generations_per_prompt: int = Field(default=16, gt=0)
    """Rollouts of each prompt: the group."""
    max_num_steps: Annotated[int, WhenChanged.GOAL] = Field(default=1000, gt=0)
    """Steps of the run."""
    max_num_epochs: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Passes over the data after which the run ends, if it has not ended before."""
    max_failed_share: Annotated[float, WhenChanged.RESUME] = Field(default=0.5, ge=0, le=1)
    """Largest share of the rollouts collected or evaluated together that may fail (rewards that raise, environments
    that hang or crash, prompts that the engine refuses); past it, or if all fail, the run stops with the reasons."""
    max_rollout_turns: int = Field(default=1, gt=0)
    """Most turns of one rollout."""
    max_rollout_seconds: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Most seconds of one rollout, all its turns and its waits for the engine included; one that takes longer fails.
    Unset, only the calls of its environment have deadlines (`env.<name>.deadline_s`)."""
    rewritten_history: Literal["keep", "split"] | None = None
    """For several turns with a chat template that renders earlier turns in another way than the policy wrote them, as
    those do that drop thoughts. `keep`: go on from the tokens as the engine consumed and sampled them, thoughts
    included, so that training sees what sampling saw. `split`: render the conversation for every turn, as a chat server
    does, and cut the rollout into segments where that rewrites earlier turns; each is a row of the batch that begins
    with what the engine consumed, and the rows of a rollout count as one sequence. `max_total_sequence_length` then
    limits each segment. Unset, such a template is refused."""
    rollout_program: str = "multi_turn"
    """The course of a rollout: `multi_turn`, the policy and the environment in turns, or a `RolloutProgram` of your own
    as `file.py:Class` or `package.module:Class`, which is built with `max_turns` and `max_tokens`."""
    agent: AgentConfig | None = None
    """A program of your own that calls the policy over HTTP, as it would call OpenAI's or Anthropic's models. Set, it
    plays the rollouts in place of `rollout_program`."""
    async_grpo: AsyncConfig = AsyncConfig()
    overlong_filtering: bool = False
    """Leave rollouts that ran into a token limit out of the loss, and out of the tokens and sequences that it is
    divided by. Their rewards still count in the baselines of their groups."""
    val_period: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Validate after every this many steps; 0 does not."""
    val_at_start: Annotated[bool, WhenChanged.RESUME] = False
    """Validate before the first step."""
    val_at_end: Annotated[bool, WhenChanged.RESUME] = False
    """Validate after the last step."""
    max_val_samples: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Most validation prompts; all where unset."""
    val_num_generations_per_prompt: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Rollouts of each validation prompt."""
    stop_at_validation_metric: Annotated[str | None, WhenChanged.GOAL] = None
    """End the run once this validation metric reaches the threshold: `reward`, `mean_length`, or `accuracy` of an
    environment that reports it."""
    stop_at_validation_threshold: Annotated[float | None, WhenChanged.GOAL] = None
    """Threshold of `stop_at_validation_metric`."""
    seed: int = 42
    """Seed of data order, sampling and dropout."""

    @property
    def rollouts_per_step(self) -> int:
        """Rollouts that one step trains on."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @classmethod
    def rollouts_written(cls, written: Callable[[str], Any]) -> int:
        """`rollouts_per_step` of a config that is not read yet, from the values that the user wrote; that of the
        defaults where these are wrong, which is reported when they are read.

        Args:
            written: from a dotted key to its value.
        """
        counts = []
        for key in ("num_prompts_per_step", "num_generations_per_prompt"):
            value = written(f"{cls.section}.{key}")
            valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
            counts.append(value if valid else cls.model_fields[key].default)
        return math.prod(counts)

    @property
    def splits(self) -> bool:
        """Whether a rollout may be several rows of a batch, its segments."""
        return self.rewritten_history == "split"

    @property
    def max_staleness(self) -> int:
        """Most weight versions between the begin of a rollout and its training."""
        return self.async_grpo.max_trajectory_age_steps if self.async_grpo.enabled else 0

    @property
    def updates_in_flight(self) -> bool:
        """Whether the completions under way are interrupted when the weights change."""
        return self.max_staleness > 0 and self.async_grpo.in_flight_weight_updates

    @property
    def keeps_cache(self) -> bool:
        """Whether they go on from the keys and values of older weights."""
        return self.updates_in_flight and not self.async_grpo.recompute_kv_cache_after_weight_updates

    @property
    def validates(self) -> bool:
        """Whether the run validates at all."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)


class RewardScalingConfig(Config):
    enabled: bool = False
    """Map rewards linearly from the source range to the target range, clamped at its ends."""
    source_min: float = 0.0
    """Reward that maps to `target_min`."""
    source_max: float = 1.0
    """Reward that maps to `target_max`."""
    target_min: float = 0.0
    """Smallest reward after scaling."""
    target_max: float = 1.0
    """Largest reward after scaling."""


class RewardShapingConfig(Config):
    enabled: bool = False
    """Lower rewards for how a response ended, repeated itself or was written, as the keys below say."""
    max_response_length: int = Field(default=512, gt=0)
    """Sampled tokens at which the whole overlong penalty applies (DAPO's soft overlong punishment)."""
    overlong_buffer_length: int = Field(default=128, gt=0)
    """Tokens before the limit over which the penalty grows from 0."""
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Overlong penalty at the limit."""
    effort_levels: dict[str, int] = {}
    """`max_response_length` of prompts by their level of effort, which is the field `effort` of a row of data; rows
    without one have the key above. Tell the policy of the level in the prompt, such as in its system message."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Weight of the length reward of Kimi k1.5 (arXiv:2501.12599), within each group: `w = 0.5 - (length - shortest) /
    (longest - shortest)` for rollouts with a reward above 0 and `min(w, 0)` for the others; short right answers gain,
    long ones lose."""
    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)
    """Factor of the rewards of rollouts that ran into a token limit; unset, they are kept."""
    repetition_penalty: float = Field(default=0.0, ge=0)
    """Penalty times the share of runs of tokens that have occurred before in the response; the driver then reads all
    sampled tokens."""
    repetition_ngram_size: int = Field(default=20, gt=0)
    """Tokens of such a run."""
    malformed_thinking_penalty: float = Field(default=0.0, ge=0)
    """Penalty of a rollout with a turn whose thoughts are not closed by exactly one `</think>`; the driver then reads
    all responses."""
    invalid_tool_call_penalty: float = Field(default=0.0, ge=0)
    """Penalty of a rollout with a `<tool_call>` that is not closed, or not a JSON object with `name` and `arguments`;
    the driver then reads all responses."""


class PolicyGradientConfig(RolloutConfig):
    """Base of the section of an algorithm that learns from the rewards of its rollouts, by `loss_fn`."""

    advantage_clip_low: float | None = None
    """Smallest advantage."""
    advantage_clip_high: float | None = None
    """Largest advantage."""
    use_dynamic_sampling: bool = False
    """Train only on groups whose rewards differ, sampling further prompts in place of the others (DAPO)."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, gt=0)
    """Most rounds of sampling for one step."""
    batch_multiplier: float = Field(default=1.0, ge=1)
    """Prompts that a round of dynamic sampling rolls out for each one that is still wanted. More than one takes fewer
    rounds; groups beyond those wanted train nothing, and their prompts are used up."""
    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)
    """Leave rollouts whose mean `exp|prev - generation|` logprob is above this out of all terms of the loss; the tokens
    and sequences that it is divided by still count them."""
    reference_sync_period: int = Field(default=0, ge=0)
    """Move the reference policy, which the KL penalty compares with, towards the policy after every this many steps; 0
    keeps the initial weights."""
    reference_mixup_alpha: float = Field(default=1.0, gt=0, le=1)
    """Share of the way from the reference to the policy that such a move takes (arXiv:2404.09656): `reference + alpha
    (policy - reference)`, weight by weight; 1 makes the reference the policy. With LoRA the adapters are mixed."""
    curriculum: CurriculumConfig = CurriculumConfig()
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()

    @property
    def passes_per_step(self) -> int:
        """Times that a step trains on each of its rollouts."""
        return 1


class GeneratingPolicy(Protocol):
    """The keys of `policy` that are read by an algorithm which trains on its own rollouts."""

    @property
    def train_global_batch_size(self) -> int:
        """Rollouts of one optimizer step."""
        ...

    @property
    def max_total_sequence_length(self) -> int:
        """Most tokens of a rollout."""
        ...

    @property
    def generation(self) -> GenerationConfig:
        """How completions are sampled."""
        ...

    @property
    def tokenizer(self) -> TokenizerConfig:
        """The tokenizer and its chat template."""
        ...


class EvaluationRoot(Protocol):
    """The resolved config of an evaluation, and of a run that can be evaluated."""

    @property
    def eval(self) -> EvaluationConfig:
        """Settings of the evaluation."""
        ...

    @property
    def env(self) -> Config:
        """Settings of environments by name."""
        ...

    @property
    def policy(self) -> GeneratingPolicy:
        """The model that generates."""
        ...


class RolloutRoot(EvaluationRoot, DataRoot, Protocol):
    """The resolved config of a run that trains on its own rollouts. One of its sections extends `RolloutConfig`."""


def rollout_config(config: object) -> RolloutConfig:
    """The section of a resolved config that extends `RolloutConfig`: that of its algorithm."""
    found = [section for section in vars(config).values() if isinstance(section, RolloutConfig)]
    assert len(found) == 1, f"an algorithm that trains on its rollouts has one RolloutConfig, this has {len(found)}"
    return found[0]
