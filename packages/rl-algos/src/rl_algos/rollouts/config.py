"""Settings that all algorithms with rollouts share, and settings of agents, which call the policy over HTTP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field, model_validator

from rl_algos.data.config import DataRoot, DatasetConfig, written_problems
from rl_algos.evaluation.config import EvaluationConfig
from rl_core.config import Config, EnvVars, PathText, Problem, ProblemError, Rename, WhenChanged, is_changed, moved
from rl_core.model_config import DraftHeadConfig, GenerationConfig, ModelConfig, TokenizerConfig, VisionConfig
from rl_core.token_filter import TokenFilter

SCORED_BY_AGENT = "agent"
"""Name of the environment of prompts whose rewards come from an agent; there is no such environment."""

COMPACTION_PROGRAM = "compaction"
"""Name of the rollout program that summarises a history which becomes long."""

DRAFTER = "drafter"
"""Role and section of a draft model that trains with the policy."""

_LEASE_S = 300.0

StructuredOutput = Literal["refuse", "ignore", "constrain"]
"""Values of `RolloutConfig.structured_output`."""

Sampler = Literal["weight_fifo", "in_order", "ready_first", "windowed"]
"""Values of `AsyncConfig.sampler`."""


class CanaryConfig(Config):
    """Trial of new weights before users are answered with them."""

    enabled: bool = False
    """Score each weight version on prompts of `data.validation`, which their environments score, before users get its
    answers. Calls of users wait meanwhile. A version whose mean reward has decreased by more than `max_drop`, or whose
    rollouts all fail, is taken back: users and training continue with the version before, and its conversations train
    nothing."""
    max_drop: float = Field(default=0.1, ge=0)
    """Maximum decrease of the mean reward, compared with the version that users are served, on the same prompts with
    the same seeds."""
    num_prompts: int = Field(default=64, gt=0)
    """Maximum number of prompts, the first ones of `data.validation`."""


class LiveConfig(Config):
    """Learning from users: they call the policy at one address, and rewards of their conversations come later."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the address, which all replicas of a node share. With 0 each replica takes a free one, which differs
    after every start, so users have to be told again."""
    deadline_s: float = Field(default=86400.0, gt=0)
    """Seconds after the last call of a conversation until which its reward is taken. After that it trains nothing."""
    retention_s: float = Field(default=30 * 86400.0, gt=0)
    """Seconds after the end of a conversation for which its text is stored. One that has not been trained on by then
    trains nothing."""
    max_open: int = Field(default=10_000, gt=0)
    """Maximum number of conversations without a reward. Others are refused (status 429) until some have ended."""
    max_requests: int = Field(default=256, gt=0)
    """Maximum number of requests of users that a replica answers at the same time; others are refused (status 429)."""
    requests_per_minute: int | None = Field(default=6000, gt=0)
    """Maximum number of requests of users to a replica in a minute; others are refused (status 429). null for no
    limit."""
    canary: CanaryConfig = CanaryConfig()


class AgentConfig(Config):
    """An agent that calls the policy over HTTP: a function, a command or a program elsewhere."""

    run: PathText | None = None
    """Function that plays one rollout, as `file.py:function` or `package.module:function`. It is called as
    `run(base_url, api_key, prompt)` in a process of its own for each rollout, may be `async`, and returns the reward: a
    number, or numbers by name."""
    command: list[str] = []
    """Command that plays one rollout, such as `[python, agent.py]`, started for each. It finds the policy in
    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, its task in the JSON file
    `RL_PROMPT_FILE`, and writes its reward, a number or numbers by name, as JSON to `RL_REWARD_FILE`."""
    external: bool = False
    """Let agents that run elsewhere take rollouts: `POST /rollouts` answers with a prompt, a URL and keys, and
    `POST /rollouts/ID/v1/end` ends the rollout. The log shows the address; the key is in a file in `logs/agents` of the
    run directory. A rollout waits for an agent, and for its end, as long as `max_rollout_s` allows."""
    lease_s: Annotated[float, WhenChanged.RESUME] = Field(default=_LEASE_S, gt=0)
    """Seconds without a call after which an external agent loses the rollout that it took: the next agent that asks
    gets it, from its beginning. Any request with one of the rollout's keys begins the time anew, such as
    `POST /rollouts/ID/v1/renew` while the agent does other work. The time does not run while a call is answered."""
    reward: Literal["returned", "posted", "environment"] = "returned"
    """Where rewards come from. `returned`: the function's result, or the command's reward file. `posted`: only
    `POST /rollouts/ID/v1/reward` with the key in `RL_REWARD_KEY`, for rewards of single calls or of a judge's.
    `environment`: the environment of the prompt scores the conversation that the agent ends with; the agent itself has
    no say in it. Always `environment` with `place: environment`. With `live`, rewards are posted to `/v1/reward`, at
    any time before the deadline."""
    place: Literal["process", "environment"] = "process"
    """Where the agent runs. `process`: in a process next to the rollout worker, with its files and its network.
    `environment`: the environment of the prompt runs `command`, such as `repository` in a sandbox, or its own agent,
    such as `verifiers`, and gives the reward; of the rollout worker's environment variables it has none."""
    files: list[PathText] = []
    """Files that `command` needs with `place: environment`, such as `[agent.py]` for `[python, agent.py]`, or modules
    as `package.module`. Their contents are sent. An argument of the command that is the name of one is replaced by its
    path."""
    env: EnvVars = {}
    """Environment variables of the function or the command, in addition to the rollout worker's."""
    live: LiveConfig | None = None
    """Learn from users instead of a dataset (`data.train: []`): each conversation that somebody begins at the address
    of the run is a rollout, and trains once its reward is posted. Needs `external: true` and `reward: posted`."""
    max_calls: int = Field(default=64, gt=0)
    """Maximum number of completions in one rollout; further calls are refused."""
    host: str = "127.0.0.1"
    """Address of the served policy. Agents on other machines need one of the node's own addresses."""
    grace_s: Annotated[float, WhenChanged.RESUME] = Field(default=5.0, ge=0)
    """Seconds between SIGTERM and SIGKILL when an agent is stopped, after its rollout has ended or taken too long
    (`max_rollout_s`). All processes that it started are ended with it."""

    @model_validator(mode="before")
    @classmethod
    def _scored_where_it_runs(cls, written: Any) -> Any:
        """With `place: environment`, only the environment can give rewards."""
        if isinstance(written, Mapping) and written.get("place") == "environment" and "reward" not in written:
            return {**written, "reward": "environment"}
        return written

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        kinds = {"run": self.run is not None, "command": bool(self.command), "external": self.external}
        given = [name for name, is_given in kinds.items() if is_given]
        is_own = self.place == "environment" and not given
        if len(given) != 1 and not is_own:
            remedy = f"Set one of {', '.join(kinds)}"
            raise ProblemError(Problem("", f"sets {' and '.join(given) or 'no agent'}", remedy=remedy))
        if problem := self._place_problem:
            raise ProblemError(problem)
        if self.external and self.reward == "returned":
            reason = "an agent that runs elsewhere returns nothing"
            raise ProblemError(Problem("reward", reason, got=self.reward, allowed="posted, environment"))
        if self.lease_s != _LEASE_S and not self.external:
            reason = "has no effect on an agent that the run starts"
            remedy = "Remove it, or set external: true; max_rollout_s limits the time of a rollout"
            raise ProblemError(Problem("lease_s", reason, got=self.lease_s, is_unused=True, remedy=remedy))
        if self.live is not None:
            if not self.external or self.reward != "posted":
                remedy = "Set external: true and reward: posted"
                raise ProblemError(Problem("live", "is for rollouts that users begin and reward", remedy=remedy))
            if self.lease_s != _LEASE_S:
                raise ProblemError(Problem.unused("lease_s", "with live", remedy="Remove it; see live.deadline_s"))
        if self.host in ("0.0.0.0", "::"):
            remedy = "Set one of the node's own addresses"
            raise ProblemError(Problem("host", "is not an address that agents can call", got=self.host, remedy=remedy))
        return self

    @property
    def needs_environment(self) -> bool:
        """True if the environments of the prompts score the rollouts."""
        return self.reward == "environment"

    @property
    def scores_last_turn(self) -> bool:
        """True if the environment scores the conversation that the agent ends with, not the state that it leaves."""
        return self.reward == "environment" and self.place == "process"

    @property
    def _place_problem(self) -> Problem | None:
        """Problem of `place` with other keys; None without one."""
        if self.place == "process":
            unused = Problem.unused("files", "with place=process", remedy="Remove it, or set place=environment")
            return unused if self.files else None
        if self.run is not None or self.external:
            reason = "runs a command, or the environment's own agent"
            return Problem("place", reason, got=self.place, remedy="Set command, or place=process")
        if self.files and not self.command:
            return Problem.unused("files", "without command")
        if self.reward != "environment":
            reason = "is given by the environment with place=environment"
            return Problem("reward", reason, got=self.reward, allowed="environment")
        names = [Path(name).name for name in self.files]
        if double := next((name for name in names if names.count(name) > 1), None):
            return Problem("files", f"has two files with the name {double}", got=self.files, remedy="Rename one")
        return None


class AsyncConfig(Config):
    """Rollouts that are generated while the policy trains, with a limit on their age."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME
    read_when_off: ClassVar[frozenset[str]] = frozenset(
        {"max_trajectory_age_steps", "sampler", "sampler_window", "recompute_kv_cache_after_weight_updates"}
    )

    enabled: bool = False
    """Sample rollouts ahead of training, so that generation and training run at the same time. Generation then needs
    its own devices, and the loss needs a correction for rollouts that older weights sampled."""
    max_trajectory_age_steps: int = Field(default=1, ge=0)
    """Maximum age of a rollout in steps: how far the weights that sampled it may be behind the weights that train on
    it. At most this many steps' worth of prompts run ahead. A step waits for a rollout that would become older, and no
    rollout is discarded. 0 makes the run synchronous. It is also the limit of a synchronous run with
    `over_sampling_ratio`."""
    sampler: Sampler | None = None
    """Which groups a step trains on. `weight_fifo`: those that the oldest weights began; among groups of equal age, the
    ones that finish first. `in_order`: the next ones in the order of the data, so that timing does not decide.
    `ready_first`: those that finish first. `windowed`: those that finish first among the next `sampler_window` prompts
    of the data. With all of them, a step first takes the groups that would otherwise exceed the maximum age. If unset,
    it is `ready_first` with `over_sampling_ratio` above 1, and `weight_fifo` otherwise."""
    sampler_window: int | None = Field(default=None, gt=0)
    """Number of prompts that the sampler `windowed` chooses from, between `num_prompts_per_step` and the number of
    prompts that are in progress."""
    in_flight_weight_updates: bool = False
    """Interrupt in-flight completions when the generators receive new weights; each one then continues from its tokens
    with the new weights. Otherwise they finish with the old weights, and the generators wait for the longest one."""
    recompute_kv_cache_after_weight_updates: bool = True
    """Recompute the keys and values of an interrupted completion with the new weights before it continues, so that the
    logprob of every token comes from one weight version. false keeps the cache of the engine (vLLM): an update needs no
    prefill, and the new weights continue from keys and values of older weights."""


class CurriculumConfig(Config):
    """Shares of datasets, or of prompts, that follow the success of the policy on them."""

    enabled: bool = False
    """Draw more prompts that the policy sometimes solves, and fewer that it always or never solves: the weight of a
    dataset or of a prompt is multiplied by `4 s (1 - s)`, where s is the share of its rollouts that succeed."""
    by: Literal["dataset", "prompt"] = "dataset"
    """What has a success rate and a weight: each of several training datasets, or each prompt. By prompt, every prompt
    is drawn once before any is repeated, and datasets are drawn by their `weight`; it needs data without `streaming`.
    """
    success_reward: float = 1.0
    """Minimum reward of a rollout that counts as a success."""
    window: int = Field(default=32, gt=0)
    """By dataset: number of recent groups of a dataset over which its success rate is averaged."""
    half_life: float = Field(default=4.0, gt=0)
    """By prompt: number of epochs of training after which a result counts half, because the policy has changed."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Minimum factor of a weight, so that every dataset and prompt is tried again: a prompt is drawn at least once in
    `1 / floor + 2` epochs of its dataset."""


class RolloutConfig(Config):
    """Base of the section of an algorithm that rolls out prompts: their number, limits and validation."""

    section: ClassVar[str]
    """Key of the section in the config of a run; every algorithm sets it."""
    validation_goals: ClassVar[tuple[str, ...]] = ("reward", "accuracy", "mean_length")
    """Values of `stop_at_validation_metric`."""
    renamed: ClassVar[Mapping[str, Rename]] = {"max_rollout_seconds": moved("max_rollout_s")}
    learns_from_users: ClassVar[bool] = False
    """True if rollouts may be the conversations of users."""
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
    """Number of prompts per step."""
    over_sampling_ratio: Annotated[float, WhenChanged.RESUME] = Field(default=1.0, ge=1)
    """Number of prompts that are rolled out at the same time, relative to `num_prompts_per_step`. Above 1, a step ends
    as soon as `num_prompts_per_step` groups have finished. Rollouts of the others are interrupted when the weights
    change and continue in the next step from the tokens that they have (partial rollouts, APRIL, arXiv:2509.18521). A
    step waits for a group that would otherwise become older than `async_grpo.max_trajectory_age_steps`."""
    num_generations_per_prompt: int = Field(default=16, gt=0)
    """Number of rollouts per prompt (the group size)."""
    max_num_steps: Annotated[int, WhenChanged.GOAL] = Field(default=1000, gt=0)
    """Maximum number of steps."""
    max_num_epochs: Annotated[int | None, WhenChanged.GOAL] = Field(default=None, gt=0)
    """Maximum number of passes over the data. If unset, only `max_num_steps` limits the run."""
    max_failed_share: Annotated[float, WhenChanged.RESUME] = Field(default=0.5, ge=0, le=1)
    """Maximum share of rollouts, among those collected or evaluated together, that may fail (rewards that raise,
    environments that hang or crash, prompts that the engine refuses). If more fail, or all of them, the run stops and
    reports the reasons."""
    max_rollout_turns: int = Field(default=1, gt=0)
    """Maximum number of turns of a rollout."""
    max_rollout_s: Annotated[float | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Timeout of a rollout in seconds, including all its turns and its waits for the engine; a rollout that takes
    longer fails. If unset, only the calls of its environment have deadlines (`env.<name>.deadline_s`)."""
    rewritten_history: Literal["keep", "split"] | None = None
    """How to handle a chat template that renders earlier turns differently from what the policy wrote, for example
    because it drops thoughts. `keep` continues from the tokens that the engine consumed and sampled, including
    thoughts, so that training sees what sampling saw. `split` renders the conversation anew for every turn, as a chat
    server does, and starts a new segment wherever that rewrites earlier turns. Each segment is a row of the batch that
    begins with what the engine consumed, the rows of a rollout count as one sequence, and `max_total_sequence_length`
    limits each segment. If unset, such a template is refused when rollouts have several turns."""
    rollout_program: str = "multi_turn"
    """Program that runs a rollout: `multi_turn`, where the policy and the environment take turns, as one agent or as
    the players of a game; `compaction`, which does the same and summarises a history that becomes long;
    `proposer_solver`, where the policy poses problems and solves them; or your own `RolloutProgram` as `file.py:Class`
    or `package.module:Class`, which is created with `max_turns`, `max_tokens` and `rollout_program_args`."""
    rollout_program_args: dict[str, Any] = {}
    """Further arguments of the program: `num_solvers` of `proposer_solver` (4 by default); `compact_at`,
    `summary_tokens`, `summariser` (`policy`, `recent` or an opponent) and `request` of `compaction`; `first_agent` (the
    name of the agent that has the first turn, if it is an opponent); or those of your own."""
    agent: AgentConfig | None = None
    """Your own program that calls the policy over HTTP, as it would call OpenAI's or Anthropic's models. If set, it
    runs the rollouts instead of `rollout_program`."""
    structured_output: StructuredOutput = "refuse"
    """What happens if an agent's request, or the field `response_format` of a row, asks for JSON that matches a schema.
    `refuse`: the request is answered with an error, and the row's rollout fails. `ignore`: the policy answers freely;
    the log and the metrics `rollout/ignored/...` show it. `constrain`: the engine samples only tokens that the schema
    allows, and the policy's logprobs are computed over these tokens, as with `top_p`. Forced calls (`tool_choice`) and
    tools with `strict` are constrained too; with the other values they are ignored."""
    async_grpo: AsyncConfig = AsyncConfig()
    overlong_filtering: bool = False
    """Exclude rollouts that reached a token limit from the loss, and from the token and sequence counts that it is
    divided by. Their rewards still count in the baselines of their groups."""
    val_period: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Number of steps between validations; 0 turns them off."""
    val_at_start: Annotated[bool, WhenChanged.RESUME] = False
    """Validate before the first step."""
    val_at_end: Annotated[bool, WhenChanged.RESUME] = False
    """Validate after the last step."""
    max_val_samples: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, gt=0)
    """Maximum number of validation prompts; all if unset."""
    val_num_generations_per_prompt: Annotated[int, WhenChanged.RESUME] = Field(default=1, gt=0)
    """Number of rollouts per validation prompt."""
    stop_at_validation_metric: Annotated[str | None, WhenChanged.GOAL] = None
    """Validation metric that ends the run when it reaches `stop_at_validation_threshold`: `reward`, `mean_length`, or
    `accuracy` if the environment reports it."""
    stop_at_validation_threshold: Annotated[float | None, WhenChanged.GOAL] = None
    """Threshold of `stop_at_validation_metric`."""
    seed: int = 42
    """Seed for data order, sampling and dropout."""

    @property
    def rollouts_per_step(self) -> int:
        """Number of rollouts that one step trains on."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @classmethod
    def rollouts_written(cls, written: Callable[[str], Any]) -> int:
        """Return `rollouts_per_step` of a config that is not read yet, from the values that the user wrote. Invalid
        values, which are reported when the config is read, are replaced by defaults.

        Args:
            written: Function from a dotted key to its value.
        """
        counts = []
        for key in ("num_prompts_per_step", "num_generations_per_prompt"):
            value = written(f"{cls.section}.{key}")
            valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
            counts.append(value if valid else cls.model_fields[key].default)
        return math.prod(counts)

    def token_filter(self, generation: GenerationConfig) -> TokenFilter | None:
        """Return the filter that training rollouts are drawn with; None if it would keep all tokens.

        Args:
            generation: Section of the engine that samples them.
        """
        found = generation.token_filter
        if self.structured_output != "constrain":
            return found
        return replace(TokenFilter() if found is None else found, allowed=True)

    @property
    def turn_limit(self) -> int:
        """Maximum number of completions of a rollout."""
        return self.max_rollout_turns if self.agent is None else self.agent.max_calls

    @property
    def serves_users(self) -> bool:
        """True if rollouts are the conversations of users instead of prompts of a dataset."""
        return self.agent is not None and self.agent.live is not None

    @property
    def demonstrated_share(self) -> float:
        """Share of the rollouts of a prompt that take the response in its row instead of a sample. They have the mark
        `RolloutReports.is_demonstration`, and batches the column `rl_algos.losses.mask.DEMONSTRATION`."""
        return 0.0

    @property
    def further_datasets(self) -> tuple[DatasetConfig, ...]:
        """Datasets that a run reads in addition to those of `data`."""
        return ()

    @property
    def marks_demonstrations(self) -> bool:
        """True if batches have the column `rl_algos.losses.mask.DEMONSTRATION`."""
        return self.demonstrated_share > 0

    @property
    def renders_anew(self) -> bool:
        """True if the chat template renders the whole conversation for every turn."""
        return self.rewritten_history == "split"

    @property
    def splits(self) -> bool:
        """True if a rollout may be several rows of a batch, its segments."""
        return self.renders_anew or self.agent is not None or self.rollout_program == COMPACTION_PROGRAM

    @property
    def fixed_agents(self) -> frozenset[str]:
        """Names of the agents whose turns other weights than the policy's take in every play."""
        return frozenset()

    @property
    def over_samples(self) -> bool:
        """True if a step ends before all rollouts in progress have finished."""
        return self.over_sampling_ratio > 1

    @property
    def max_staleness(self) -> int:
        """Maximum number of weight versions between the start of a rollout and its training."""
        settings = self.async_grpo
        return settings.max_trajectory_age_steps if settings.enabled or self.over_samples else 0

    @property
    def num_ahead(self) -> int:
        """Maximum number of prompts in progress in addition to the prompts of a step."""
        if self.serves_users:
            return 0  # A conversation that is taken early would only become older.
        if not self.over_samples:
            return self.max_staleness * self.num_prompts_per_step
        return math.ceil(round(self.over_sampling_ratio * self.num_prompts_per_step, 6)) - self.num_prompts_per_step

    @property
    def sampler(self) -> Sampler:
        """The sampler that takes effect."""
        return self.async_grpo.sampler or ("ready_first" if self.over_samples else "weight_fifo")

    @property
    def updates_in_flight(self) -> bool:
        """True if in-flight completions are interrupted when the weights change."""
        return self.max_staleness > 0 and (self.over_samples or self.async_grpo.in_flight_weight_updates)

    @property
    def keeps_cache(self) -> bool:
        """True if interrupted completions continue from the keys and values of older weights."""
        return self.updates_in_flight and not self.async_grpo.recompute_kv_cache_after_weight_updates

    @property
    def validates(self) -> bool:
        """True if the run validates at all."""
        return bool(self.val_period or self.val_at_start or self.val_at_end)


class RewardScalingConfig(Config):
    """Linear map of rewards from one range to another."""

    enabled: bool = False
    """Map rewards linearly from the source range to the target range, and clamp them to it."""
    source_min: float = 0.0
    """Reward that maps to `target_min`."""
    source_max: float = 1.0
    """Reward that maps to `target_max`."""
    target_min: float = 0.0
    """Minimum reward after scaling."""
    target_max: float = 1.0
    """Maximum reward after scaling."""


class RewardShapingConfig(Config):
    """Changes of rewards by the length, the ending and the format of a response."""

    enabled: bool = False
    """Adjust rewards by the length, the ending, the repetitions and the format of a response, with the keys below."""
    max_response_length: int = Field(default=512, gt=0)
    """Response length in tokens with the full overlong penalty (DAPO's soft overlong punishment)."""
    overlong_buffer_length: int = Field(default=128, gt=0)
    """Number of tokens before that length over which the penalty grows from 0."""
    overlong_buffer_penalty: float = Field(default=1.0, ge=0)
    """Overlong penalty at `max_response_length`."""
    effort_levels: dict[str, int] = {}
    """`max_response_length` by level of effort, which is the field `effort` of a row of data; rows without the field
    use `max_response_length` itself. Put the level into the prompt, such as the system message, so that the policy
    knows it."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Weight of the length reward of Kimi k1.5 (arXiv:2501.12599), within each group: `w = 0.5 - (length - shortest) /
    (longest - shortest)` for rollouts with a reward above 0 and `min(w, 0)` for the others. Short correct answers gain,
    long answers lose."""
    stop_properly_penalty_coef: float | None = Field(default=None, ge=0, le=1)
    """Factor applied to the rewards of rollouts that reached a token limit; if unset, these rewards do not change."""
    repetition_penalty: float = Field(default=0.0, ge=0)
    """Weight of the repetition penalty: the share of token n-grams that have occurred before in the response. If it is
    above 0, the driver reads all sampled tokens."""
    repetition_ngram_size: int = Field(default=20, gt=0)
    """Length of these n-grams in tokens."""
    malformed_thinking_penalty: float = Field(default=0.0, ge=0)
    """Penalty for a rollout with a turn whose thoughts (`<think>...</think>`, or other marks such as Magistral's) are
    not closed exactly once. The opening mark may be in the prompt. If it is above 0, the driver reads all responses."""
    invalid_tool_call_penalty: float = Field(default=0.0, ge=0)
    """Penalty for a rollout with a tool call that cannot be read in the format of the policy
    (`policy.tokenizer.tool_format`). It needs an environment with tools, or an agent. If it is above 0, the driver
    reads all responses."""


class LearningAgentConfig(Config):
    """How the rollouts of one agent train, in plays of several."""

    refused: ClassVar[Mapping[str, str]] = {
        "weight": "multiplies advantages, and this algorithm has none. Set `train` instead",
        "adv_estimator": "is for rewards, and this algorithm learns from teachers. Use algorithm: grpo",
        "opponent": "is a key of GRPO, whose rollouts may be played by other weights. Use algorithm: grpo",
    }
    """Keys that agents have in another algorithm, with the reason and the remedy."""

    train: bool = True
    """Train on the rollouts of this agent. Otherwise they are only recorded, like an opponent's."""

    @model_validator(mode="before")
    @classmethod
    def _fits(cls, written: Any) -> Any:
        keys = [key for key in cls.refused if isinstance(written, Mapping) and key in written]
        if keys:
            raise ProblemError(*(Problem(key, cls.refused[key], got=written[key]) for key in keys))
        return written


class LearningAgentsConfig(Config):
    """Settings of agents by their names, which the environment or the rollout program gives."""

    named: ClassVar[type[Config] | None] = LearningAgentConfig


class WeightedAgentConfig(LearningAgentConfig):
    """How the rollouts of one agent train, with advantages."""

    refused: ClassVar[Mapping[str, str]] = {
        "adv_estimator": "is a key of GRPO; here the critic's values make the advantages. Use algorithm: grpo",
        "opponent": LearningAgentConfig.refused["opponent"],
    }

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of this agent's advantages, applied after they are clipped."""


class WeightedAgentsConfig(Config):
    """Settings of agents by their names, which the environment or the rollout program gives."""

    named: ClassVar[type[Config] | None] = WeightedAgentConfig


class DemonstrationsConfig(Config):
    """Responses of a dataset that steps learn next to their rollouts, by the term `loss_fn.demonstrations`."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the rollouts of each prompt that are demonstrations: they take the response in the prompt's row, which
    supervised fine-tuning would learn (`solution`, or else the answer). The environment scores them, and they are
    compared with the other rollouts of the group (LUFFY, arXiv:2504.14945). A fraction of a rollout is a chance: with 8
    rollouts, 0.125 is one demonstration, and 0.1875 is one or two. All rollouts of a row without a response are
    sampled."""
    dataset: DatasetConfig | None = None
    """Dataset whose conversations steps learn in addition to their rollouts, as supervised fine-tuning would (CHORD,
    arXiv:2508.11408). Nothing is sampled for them, and no environment scores them."""
    rows_per_step: int = Field(default=0, ge=0)
    """Number of conversations of `dataset` that a step learns, spread over its updates."""

    @property
    def is_on(self) -> bool:
        """True if steps learn demonstrations."""
        return self.share > 0 or self.dataset is not None

    @model_validator(mode="after")
    def _has_rows(self) -> Self:
        if (self.dataset is None) != (self.rows_per_step == 0):
            remedy = "Set both or neither"
            raise ProblemError(Problem("rows_per_step", "must be set together with dataset", remedy=remedy))
        if self.dataset is None:
            return self
        problems = written_problems("dataset", self.dataset)
        for name in ("streaming", "split_validation_size", "env_name", "weight"):
            if is_changed(self.dataset, name):
                problems.append(
                    Problem.unused(f"dataset.{name}", "in demonstrations, which are read whole and unscored")
                )
        if problems:
            raise ProblemError(*problems)
        return self


class PolicyGradientConfig(RolloutConfig):
    """Base of the section of an algorithm that learns from the rewards of its rollouts, by `loss_fn`."""

    advantage_clip_low: float | None = None
    """Minimum advantage; lower ones are clipped. If unset, there is no minimum."""
    advantage_clip_high: float | None = None
    """Maximum advantage; higher ones are clipped. If unset, there is no maximum."""
    use_dynamic_sampling: bool = False
    """Train only on groups whose rewards differ, and sample more prompts to replace the other groups (DAPO)."""
    dynamic_sampling_max_gen_batches: int = Field(default=10, gt=0)
    """Maximum number of rounds of dynamic sampling per step."""
    batch_multiplier: float = Field(default=1.0, ge=1)
    """Number of prompts that a round of dynamic sampling rolls out per group that is still needed. A value above 1
    takes fewer rounds; surplus groups do not train, and their prompts are used up."""
    seq_logprob_error_threshold: float | None = Field(default=None, gt=1)
    """Exclude rollouts whose mean `exp|prev - generation|` (logprobs) is above this from all terms of the loss; they
    still count in the tokens and sequences that the loss is divided by. If unset, none is excluded."""
    reference_sync_period: int = Field(default=0, ge=0)
    """Number of steps between updates that move the reference policy of the KL penalty towards the policy; 0 keeps the
    initial weights."""
    reference_mixup_alpha: float = Field(default=1.0, gt=0, le=1)
    """Step size of an update of the reference policy (arXiv:2404.09656): `reference + alpha (policy - reference)` for
    every weight; 1 copies the policy. With LoRA, the adapters are mixed."""
    curriculum: CurriculumConfig = CurriculumConfig()
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: RewardShapingConfig = RewardShapingConfig()

    @property
    def passes_per_step(self) -> int:
        """Number of times that a step trains on each of its rollouts."""
        return 1

    @property
    def reads_reference(self) -> bool:
        """True if something other than the loss reads the reference policy."""
        return False

    @property
    def surrogate_by_environment(self) -> Mapping[str, Mapping[str, float]]:
        """Settings of the surrogate that environments have of their own, by their names."""
        return {}

    @property
    def demonstrated_share(self) -> float:
        return self.demonstrations.share

    @property
    def further_datasets(self) -> tuple[DatasetConfig, ...]:
        return () if self.demonstrations.dataset is None else (self.demonstrations.dataset,)

    @property
    def marks_demonstrations(self) -> bool:
        return self.demonstrations.is_on


class GeneratingPolicy(Protocol):
    """The keys of `policy` that an algorithm which trains on its own rollouts reads."""

    train_global_batch_size: int
    """Rollouts of one optimizer step."""
    max_total_sequence_length: int
    """Maximum number of tokens of a rollout."""
    generation: GenerationConfig
    """How completions are sampled."""
    tokenizer: TokenizerConfig
    """The tokenizer and its chat template."""
    draft_head: DraftHeadConfig | None
    """Draft head that trains with the policy; None without one."""
    vision: VisionConfig
    """Settings of images."""


class EvaluationRoot(Protocol):
    """The resolved config of an evaluation, and of a run that can be evaluated."""

    eval: EvaluationConfig
    """Settings of the evaluation."""
    env: Config
    """Settings of environments by name."""
    judges: Config
    """Judges by name."""
    policy: GeneratingPolicy
    """The model that generates."""


class RolloutRoot(EvaluationRoot, DataRoot, Protocol):
    """The resolved config of a run that trains on its own rollouts. One of its sections extends `RolloutConfig`."""


def rollout_config(config: RolloutRoot) -> RolloutConfig:
    """Return the section of a resolved config that extends `RolloutConfig`: the section of its algorithm."""
    found = [section for section in vars(config).values() if isinstance(section, RolloutConfig)]
    assert len(found) == 1, f"an algorithm that trains on its rollouts has one RolloutConfig, this has {len(found)}"
    return found[0]


def drafter_section(config: RolloutRoot) -> ModelConfig | None:
    """Return the section of the draft model; None if none trains."""
    found: ModelConfig | None = getattr(config, DRAFTER, None)
    return found
