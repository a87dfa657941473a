"""Settings that every environment has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rl_core.config import Config, EnvVars, PathText, Problem, ProblemError, WhenChanged, is_changed


class JudgedRewardConfig(Config):
    """A reward by a judge, an entry of `env.<name>.rewards`."""

    judge: str
    """Name of the judge, a section of `judges`."""
    rubric: PathText | None = None
    """How to judge: a text file (`rubric.md`), or the rubric itself. `{answer}` and the like stand for fields of the
    prompt's row. If unset, a response is judged by how well it does the task of its prompt. A reward model has none."""
    form: Literal["number", "ranking", "pairwise"] = "number"
    """Form of a verdict of a language model. `number`: a number in `range` for each response. `ranking`: an order of
    all responses to a prompt, with ties, asked in both orders of the responses. `pairwise`: the better one of two
    responses, asked in both orders."""
    range: tuple[float, float] = (0.0, 1.0)
    """Smallest and largest reward by a language model. The last response of a ranking, or one that is better than no
    other, earns the smallest."""
    compare: str = "group"
    """With `form: pairwise`, the responses that a response is compared with: `group`, all other responses to the
    prompt, or the name of the field of the row that has the text to compare with."""
    each: Literal["rollout", "turn", "token"] = "rollout"
    """What has a reward of its own: the `rollout`, each `turn` of the policy, or each `token` (reward models only).
    Rewards of turns add up to the reward of the rollout."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Weight in the sum of rewards. The reported value is not weighted."""

    @model_validator(mode="before")
    @classmethod
    def _range_is_a_pair(cls, written: object) -> object:
        # YAML has lists only.
        if isinstance(written, Mapping) and isinstance(written.get("range"), list):
            return {**written, "range": tuple(written["range"])}
        return written

    @model_validator(mode="after")
    def _fits(self) -> Self:
        low, high = self.range
        if not (abs(low) < float("inf") and abs(high) < float("inf") and low < high):
            allowed = "two finite numbers, the smaller one first"
            raise ProblemError(Problem("range", "is not a range", got=list(self.range), allowed=allowed))
        if self.form != "number" and self.each != "rollout":
            reason = f"cannot be combined with form: {self.form}, which compares whole rollouts"
            raise ProblemError(Problem("each", reason, got=self.each, allowed="rollout"))
        if self.form != "pairwise" and is_changed(self, "compare"):
            remedy = "Remove it, or set form: pairwise"
            raise ProblemError(Problem.unused("compare", f"with form: {self.form}", remedy=remedy))
        return self


class EnvironmentConfig(Config):
    """Base of an environment's settings, `env.<name>`."""

    type: str | None = None
    """Environment to run: an installed environment, or your own as `file.py:function`, `package.module:function`, or a
    class instead of the function. If unset, the installed environment with the name of the section."""
    rewards: dict[str, str | JudgedRewardConfig] | list[str] = {}
    """Rewards that are added up, by reported name (`reward/<name>`). A function is written as `file.py:function` or
    `package.module:function`, such as `rl_core:thinking_format`, and scores the newest turn of a rollout that ends. In
    a list of functions, the function's name is the name. A reward by a judge has the keys of `JudgedRewardConfig`, such
    as `{judge: critic, rubric: rubric.md}`. With `type` they are added to the reward of that environment."""
    reward_weights: dict[str, float] | list[float] = {}
    """Weights of the functions in `rewards` by name, 1 if unset; for a list of functions, a list of all weights.
    Reported values are not weighted."""
    num_workers: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, ge=1)
    """Number of processes that run the environment; by default one per CPU of their node, up to 8. Answers that take up
    to the deadline are checked that many at a time."""
    deadline_s: Annotated[float, WhenChanged.RESUME] = Field(default=30.0, gt=0)
    """Timeout of a call in seconds. A rollout whose call takes longer fails, and the process that hangs is replaced. If
    the process that hosts the environment does not answer for 30 s more than this, it is restarted."""
    max_batch: Annotated[int, WhenChanged.RESUME] = Field(default=1, ge=1)
    """Maximum number of conversations in one call of the environment's `step`, which share its deadline. Increase it
    for an environment that answers many at once faster than one after the other, such as one that calls a server."""
    max_concurrent: Annotated[int | None, WhenChanged.RESUME] = Field(default=None, ge=1)
    """Maximum number of conversations in progress at a time on each node: those in a call, and those with several turns
    from their first turn to their end. Others wait before their first turn. Set it for an environment whose
    conversations each hold a scarce resource, such as a browser, or that calls a server with little capacity. If unset,
    only `num_workers` and `max_batch` limit the calls."""
    retries: Annotated[int, WhenChanged.RESUME] = Field(default=0, ge=0)
    """Number of times that a turn is retried after its call raised, passed the deadline or ended its process, for an
    environment whose calls can safely be repeated, such as one that calls a server. A conversation with state is
    retried only if the environment saves its states (`save` and `restore`), because its state may be only partly
    updated."""
    memory_limit_gib: Annotated[float | None, WhenChanged.RESUME] = Field(default=4.0, gt=0)
    """Maximum memory in GiB that a process may allocate (RLIMIT_DATA). A rollout whose call needs more fails. null sets
    no limit."""
    env_vars: Annotated[EnvVars, WhenChanged.RESUME] = {}
    """Environment variables of the processes. Of the driver's variables they see only paths, locale and caches, so pass
    the keys that an environment needs here: `{OPENAI_API_KEY: "${oc.env:OPENAI_API_KEY}"}`."""

    @property
    def judged_rewards(self) -> dict[str, JudgedRewardConfig]:
        """Rewards by judges, by reported name."""
        if not isinstance(self.rewards, Mapping):
            return {}
        return {name: reward for name, reward in self.rewards.items() if isinstance(reward, JudgedRewardConfig)}
