"""Settings of judges by name, `judges.<name>`: a type for each kind, and the checks of the rewards that they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rl_algos.judges.answers import REQUEST_TOKENS
from rl_algos.judges.rubrics import Rubric
from rl_core.config import Config, PathText, Problem, ProblemError, WhenChanged, did_you_mean, is_changed
from rl_core.environments.config import EnvironmentConfig
from rl_core.environments.instance import instance_of, problem_with
from rl_core.environments.reward_function import OFFERED
from rl_core.environments.rewards import RewardPart, RewardSum
from rl_core.model_config import ModelConfig
from rl_core.user_code import parameters_of

JUDGES = "judges"
"""Section of the judges."""

MODELS = "judges.*"
"""Sections of the judges that are models of the run, as `AlgorithmPlugin.optional_models` has them."""


class RewardModelJudgeConfig(ModelConfig):
    """A model with a score for a conversation, such as `rl train` makes with `algorithm: rm`."""

    has_own_tokens: ClassVar[bool] = True

    kind: Literal["reward_model"]
    """Kind of the judge: `reward_model`, a model with a score for a conversation; `generator`, a language model in an
    engine of the run; `endpoint`, a language model behind a URL."""
    logprob_batch_size: Annotated[int, WhenChanged.RESUME] = Field(default=16, gt=0)
    """Number of rows in one forward pass, unless packing or dynamic batching sets a token budget. Rows of one group
    only are computed together, and the tokens that they begin with once, if rows are packed."""
    max_total_sequence_length: int = Field(default=2048, gt=1)
    """Maximum number of tokens in a conversation, by the tokenizer of this model. Of longer conversations the last ones
    are scored."""
    step_end: str | None = Field(default=None, min_length=1)
    """String that ends a step of a turn, such as a blank line, for rewards with `each: token`: the scores at the ends
    of steps and of the turn count. If unset, the scores at all tokens of the turn."""
    step_reward: Literal["min", "mean", "last", "product"] = "min"
    """Reward of a turn with `each: token`: the smallest, the mean, the last or the product of the scores that count;
    the product is of probabilities (`as_probability`)."""
    as_probability: bool = False
    """Take scores as logits and return their probabilities, from 0 to 1, as process reward models have them."""


class GeneratorJudgeConfig(Config):
    """A language model that judges, in an engine of the run."""

    kind: Literal["generator"]
    """Kind of the judge: `reward_model`, a model with a score for a conversation; `generator`, a language model in an
    engine of the run; `endpoint`, a language model behind a URL."""
    model_name: PathText
    """Folder or hub name of the model, or `policy` for the policy itself, with the weights that it has at the time."""
    update_every: int | None = Field(default=None, gt=0)
    """With `model_name: policy`, the number of weight versions after which the judge takes over the policy's weights;
    if unset, it always has the newest."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Maximum number of tokens of a verdict, including thoughts."""
    max_total_sequence_length: int | None = Field(default=None, gt=0)
    """Maximum number of tokens of a question with its verdict, which the engine of the judge is made for; if unset,
    `policy.max_total_sequence_length`."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Sampling temperature of verdicts; 0 is greedy. If a verdict cannot be read, the question is asked once more with
    at least 1."""
    cache: Annotated[bool, WhenChanged.RESUME] = True
    """Keep verdicts on disk, so that no question is asked twice, also not by another run. Verdicts of the policy itself
    are not kept while its weights may change during rollouts (`async_grpo`)."""

    @model_validator(mode="after")
    def _follows_the_policy(self) -> Self:
        if self.update_every is not None and self.model_name != "policy":
            because = "because only the policy has weights that change"
            raise ProblemError(Problem.unused("update_every", because, remedy="Remove it, or set model_name=policy"))
        if self.model_name == "policy" and self.update_every is None and self.max_total_sequence_length is not None:
            because = "because the policy's own engine answers"
            remedy = "Remove it, and set policy.max_total_sequence_length"
            raise ProblemError(Problem.unused("max_total_sequence_length", because, remedy=remedy))
        return self


class JudgeLimitsConfig(Config):
    """Limits of the requests to an endpoint. Retries count like first requests."""

    when_changed: ClassVar[WhenChanged | None] = WhenChanged.RESUME

    concurrent: int = Field(default=32, gt=0)
    """Maximum number of requests in progress."""
    requests_per_minute: int | None = Field(default=None, gt=0)
    """Maximum number of requests in any 60 seconds; no limit if unset."""
    tokens_per_minute: int | None = Field(default=None, gt=0)
    """Maximum number of tokens, of questions and answers, in any 60 seconds; no limit if unset. Before a request is
    sent, an upper bound of its tokens is reserved; the rest of it is free again when the answer has come."""
    max_total_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens, of questions and answers, of the whole run, over all its resumes. A run that has spent
    them ends and can be resumed with a larger number; no limit if unset."""


class EndpointJudgeConfig(Config):
    """A language model that judges, behind a URL that understands OpenAI's chat completions."""

    kind: Literal["endpoint"]
    """Kind of the judge: `reward_model`, a model with a score for a conversation; `generator`, a language model in an
    engine of the run; `endpoint`, a language model behind a URL."""
    base_url: Annotated[str, WhenChanged.RESUME]
    """URL of the API, such as `https://api.openai.com/v1`; `/chat/completions` is added to it."""
    api_key: Annotated[str | None, WhenChanged.RESUME] = Field(default=None, repr=False)
    """Key of the API, from an environment variable: `${oc.env:JUDGE_KEY}`; none is sent if unset."""
    model: str = Field(min_length=1)
    """Name of the model in requests. Verdicts in the cache belong to this name, so change it when the model behind it
    changes."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Maximum number of tokens of a verdict, including thoughts."""
    temperature: float | None = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Sampling temperature of verdicts; 0 is greedy, and null sends none, for models that refuse it. A verdict that
    cannot be read is asked for once more with a temperature of at least 1."""
    tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Field of requests with `max_new_tokens`. OpenAI's newer models know only `max_completion_tokens`."""
    structured_output: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How requests ask for a verdict in its form: by its JSON schema, as any JSON, or only by the words of the rubric.
    """
    request: dict[str, Any] = {}
    """Further fields of requests, such as `{reasoning_effort: low}`. `{seed: null}` leaves out the seed, which follows
    from the question, for services that refuse it."""
    limits: JudgeLimitsConfig = JudgeLimitsConfig()
    timeout_s: Annotated[float, WhenChanged.RESUME] = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Timeout of one request in seconds, from its start to the last byte of its answer."""
    max_tries: Annotated[int, WhenChanged.RESUME] = Field(default=10, gt=0)
    """Maximum number of times that a request is sent if the endpoint fails (HTTP 408, 425 and 5xx, connections that
    end, timeouts), after growing waits. HTTP 429 and `Retry-After` let all questions of the judge wait, for up to an
    hour, and do not count."""
    cache: Annotated[bool, WhenChanged.RESUME] = True
    """Keep verdicts on disk, so that no question is asked twice, also not by another run."""

    @model_validator(mode="after")
    def _can_be_called(self) -> Self:
        problems = []
        try:
            parts = urlsplit(self.base_url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            problems.append(Problem("base_url", "is not a URL", got=self.base_url, allowed="http://... or https://..."))
        elif parts.username or parts.password or parts.query or parts.fragment:
            reason = "must not contain a user, a password or a query, because the config is stored with the run"
            problems.append(Problem("base_url", reason, remedy="Remove them, and set api_key: ${oc.env:JUDGE_KEY}"))
        per_minute = self.limits.tokens_per_minute
        if per_minute is not None and per_minute <= (needed := self.max_new_tokens + REQUEST_TOKENS):
            reason = f"is too small for a single question, which may take {needed} tokens and those of its text"
            remedy = "Increase it, or lower max_new_tokens"
            problems.append(Problem("limits.tokens_per_minute", reason, got=per_minute, remedy=remedy))
        for name in sorted(_OWN_FIELDS & self.request.keys()):
            if name != "seed" or self.request[name] is not None:
                reason = "is set from other keys of the judge"
                problems.append(Problem(f"request.{name}", reason, remedy="Remove it"))
        if problems:
            raise ProblemError(*problems)
        return self


_OWN_FIELDS = frozenset(
    {
        "messages",
        "model",
        "n",
        "response_format",
        "seed",
        "stream",
        "temperature",
        "max_tokens",
        "max_completion_tokens",
    }
)
"""Fields of requests that a judge sets itself."""


def judge_role(name: str) -> str:
    """Return the role of the model of a judge."""
    return f"judge_{name}"


JudgeConfig = RewardModelJudgeConfig | GeneratorJudgeConfig | EndpointJudgeConfig
"""Settings of a judge."""

KINDS: Mapping[str, type[Config]] = {
    "reward_model": RewardModelJudgeConfig,
    "generator": GeneratorJudgeConfig,
    "endpoint": EndpointJudgeConfig,
}
"""Types of judges by their kind."""


class JudgesConfig(Config):
    """Judges by name: models that score rollouts, by the entries of `env.<name>.rewards` and in reward functions."""

    named: ClassVar[tuple[type[Config], ...]] = tuple(KINDS.values())


def judge_type(name: str, written: Any) -> type[Config]:
    """Return the type of the section of a judge.

    Args:
        name: Name of the judge.
        written: Plain value of its section, as the user wrote it.

    Raises:
        ProblemError: If it has no kind that exists.
    """
    kind = written.get("kind") if isinstance(written, Mapping) else None
    if isinstance(kind, str) and kind in KINDS:
        return KINDS[kind]
    allowed, reason = ", ".join(KINDS), "must be set" if kind is None else "is not a kind of judges"
    raise ProblemError(Problem(f"{name}.kind", reason, got=kind, allowed=allowed))


class JudgesRoot(Protocol):
    """The resolved config of a run with judges, as far as it reads it."""

    judges: Config
    """Judges by name."""
    env: Config
    """Settings of environments by name."""


def judge_sections(config: JudgesRoot) -> dict[str, JudgeConfig]:
    """Return the settings of the judges by name; none if the config has no such section."""
    return dict(getattr(config, JUDGES, ()))


def judge_problems(config: JudgesRoot) -> Iterator[Problem]:
    """Yield the problems of rewards by judges with the judges."""
    judges = judge_sections(config)
    for name in [name for name in judges if name in OFFERED]:
        reason = "is the name of a parameter that every reward function may have"
        yield Problem(f"judges.{name}", reason, remedy="Give the judge another name")
    for name, section in dict(config.env).items():
        if not isinstance(section, EnvironmentConfig):
            continue
        for part, reward in section.judged_rewards.items():
            key = f"env.{name}.rewards.{part}"
            judge = judges.get(reward.judge)
            if judge is None:
                allowed = ", ".join(judges) or "none, because the config has no `judges`"
                remedy = f"Add judges.{reward.judge} with its kind{did_you_mean(reward.judge, judges)}"
                yield Problem(f"{key}.judge", "is not a judge", got=reward.judge, allowed=allowed, remedy=remedy)
            elif isinstance(judge, RewardModelJudgeConfig):
                for unread in ("rubric", "form", "range"):
                    if is_changed(reward, unread):
                        because = f"with judges.{reward.judge}, a reward model, which gives a score without a question"
                        yield Problem.unused(f"{key}.{unread}", because)
            else:
                if reward.each == "token":
                    reason = f"needs a reward model, but judges.{reward.judge} is a {judge.kind}"
                    yield Problem(f"{key}.each", reason, got=reward.each, allowed="rollout, turn")
                try:
                    Rubric.read(reward)
                except ValueError as error:
                    yield Problem(f"{key}.rubric", str(error), got=reward.rubric)
    yield from _functions_that_cannot_ask(config)
    yield from _unread_keys(config)


def functions_of_models(config: JudgesRoot) -> dict[str, frozenset[str]]:
    """Return the functions of `env.<name>.rewards` that take a reward model by the name of a parameter, by environment;
    environments without any are left out. Files are read, and not run."""
    models = {name for name, judge in judge_sections(config).items() if isinstance(judge, RewardModelJudgeConfig)}
    if not models:
        return {}
    found = {
        name: frozenset(part.name for part in parts if parameters_of(part.function) & models)
        for name, parts in _functions(config)
    }
    return {name: parts for name, parts in found.items() if parts}


def _functions(config: JudgesRoot) -> Iterator[tuple[str, tuple[RewardPart, ...]]]:
    """Yield the environments with functions under `rewards`, and these; problems with them are found elsewhere."""
    for name, section in dict(config.env).items():
        if isinstance(section, EnvironmentConfig) and section.rewards and not problem_with(name, config.env):
            environment = instance_of(config.env, name).environment
            yield name, environment.parts if isinstance(environment, RewardSum) else ()


def _functions_that_cannot_ask(config: JudgesRoot) -> Iterator[Problem]:
    """Yield functions that ask reward models and need what there is only while rollouts are sampled."""
    later, judges = functions_of_models(config), judge_sections(config)
    others = {name for name, judge in judges.items() if not isinstance(judge, RewardModelJudgeConfig)}
    agent = next((each for each in vars(config).values() if getattr(each, "agent", None) is not None), None)
    for name, parts in _functions(config):
        for part in parts:
            if part.name not in later.get(name, ()):
                continue
            key, parameters = f"env.{name}.rewards.{part.name}", parameters_of(part.function)
            if asked := sorted(parameters & others):
                reason = f"takes the judge {asked[0]}, a language model, and a reward model"
                remedy = "Write two functions: reward models are asked later than language models"
                yield Problem(key, reason, got=str(part.function), remedy=remedy)
            if agent is not None:
                reason = "asks a reward model, which functions that score agents cannot do"
                remedy = f"Use the score itself: env.{name}.rewards.{part.name}={{judge: NAME}}"
                yield Problem(key, reason, got=str(part.function), remedy=remedy)


def _unread_keys(config: JudgesRoot) -> Iterator[Problem]:
    """Yield keys of reward models that have no effect."""
    sections = [section for section in dict(config.env).values() if isinstance(section, EnvironmentConfig)]
    rewards = [reward for section in sections for reward in section.judged_rewards.values()]
    by_token = {reward.judge for reward in rewards if reward.each == "token"}
    for name, judge in judge_sections(config).items():
        if not isinstance(judge, RewardModelJudgeConfig):
            continue
        if is_changed(judge.tokenizer, "split_special_tokens"):
            because = "because judges read special tokens in all content as text"
            yield Problem.unused(f"judges.{name}.tokenizer.split_special_tokens", because)
        if judge.step_reward == "product" and not judge.as_probability:
            remedy = f"Set judges.{name}.as_probability=true, or use another step_reward"
            yield Problem(f"judges.{name}.step_reward", "needs probabilities", got="product", remedy=remedy)
        for key in ("step_end", "step_reward"):
            if is_changed(judge, key) and name not in by_token:
                because = f"without a reward {{judge: {name}, each: token}}"
                yield Problem.unused(f"judges.{name}.{key}", because)


def turn_problems(
    config: JudgesRoot, turn_limit: int, reads_turns: Callable[[str], bool], *, allowed: str
) -> Iterator[Problem]:
    """Yield rewards of turns by judges that would only be read as their sum.

    Args:
        config: Resolved config of the run.
        turn_limit: Maximum number of turns of a rollout.
        reads_turns: Returns whether the rewards of turns are read, by the name of an environment.
        allowed: Settings that read them.
    """
    sections = dict(config.env).items() if turn_limit > 1 else ()
    for name, section in sections:
        parts = section.judged_rewards if isinstance(section, EnvironmentConfig) and not reads_turns(name) else {}
        for part, reward in parts.items():
            if reward.each != "rollout":
                reason = "gives every turn a reward of its own, but only their sum would be read"
                remedy = f"Set {allowed}, or each: rollout"
                yield Problem(f"env.{name}.rewards.{part}.each", reason, got=reward.each, remedy=remedy)


def judged_rewards(config: JudgesRoot) -> dict[str, dict[str, Rubric]]:
    """Return the rewards by judges with their texts, by environment and reported name. Files of rubrics are read here,
    on the driver."""
    sections = {name: section for name, section in dict(config.env).items() if isinstance(section, EnvironmentConfig)}
    return {
        name: {part: Rubric.read(reward) for part, reward in section.judged_rewards.items()}
        for name, section in sections.items()
        if section.judged_rewards
    }
