"""A plain function that scores responses, as an environment."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rl_core.environments.gather_runner import GatherRunner
from rl_core.environments.reward_log import LOG_PARAMETERS, RewardLog
from rl_core.rollouts.environment import Conversation, Environment, MissingField, StepResult, UnusableAnswer

_OF_ONE: Mapping[str, Callable[[Conversation], Any]] = {
    "response": lambda conversation: conversation.completion,
    "completion": lambda conversation: conversation.completion,
    "prompt": lambda conversation: _prompt(conversation),
    "messages": lambda conversation: conversation.messages,
    "truncated": lambda conversation: conversation.truncated,
    "opened_thoughts": lambda conversation: conversation.opened_thoughts,
    "tool_calls": lambda conversation: conversation.tool_calls,
    "trainer_state": lambda conversation: conversation.trainer_state,
    "conversation_seed": lambda conversation: conversation.seed,
}
_RESPONSES = "responses"
_OF_MANY: Mapping[str, Callable[[Conversation], Any]] = {
    _RESPONSES: lambda conversation: conversation.completion,
    "completions": lambda conversation: _completion(conversation),
    "prompts": lambda conversation: _whole_prompt(conversation),
    "completion_ids": lambda conversation: (
        None if conversation.completion_ids is None else conversation.completion_ids.tolist()
    ),
}
_OF_TEXTS: Mapping[str, Callable[[Conversation], Any]] = {
    "completions": _OF_ONE["completion"],
    "prompts": _OF_ONE["prompt"],
}
"""Parameters that have strings if they stand next to `responses`."""
_SHARED = ("trainer_state",)
"""Parameters that have one value for a call of lists."""
_KEYWORDS = ("prompts", "completions", "completion_ids")
"""Parameters that `**kwargs` takes too in a function of TRL's form."""

OFFERED = (*_OF_ONE, *_OF_MANY, *LOG_PARAMETERS)
"""Names of parameters that a reward function may have in addition to the fields of a row of the data."""


def as_environment(score: Callable[..., Any]) -> Environment:
    """Return an environment made of a function that scores a response.

    A parameter is given what its name says: `response` (or `completion`), the text that the policy wrote; `prompt`, the
    text of the message that it answers; `messages`, the whole conversation; `truncated`, whether the response ran into
    the token limit; `opened_thoughts`, the mark with which the prompt opened thoughts, such as `<think>`
    (`rl_core.final_text` returns the response after its thoughts); `trainer_state`, the progress of the training
    (`rl_core.rollouts.environment.TrainerState`); `conversation_seed`, the seed of the conversation, for a function
    that draws something at random; `log_metric` and `log_extra`, functions that record what a person should see
    (`rl_core.environments.reward_log.RewardLog`); any other name, that field of the prompt's row, such as `answer`. A
    parameter with a default may be missing from the row; `**row` takes the fields that no other parameter names. The
    function returns a number, or numbers by name, of which `reward` is trained on (their sum if it is absent). It may
    be `async`.

    A function with a parameter `responses`, `completions`, `prompts` or `completion_ids` scores several at once, up to
    `max_batch`: parameters are given lists with a value for each (`trainer_state`, `log_metric` and `log_extra` are for
    the call), and the function returns a list of rewards, with None for a row that it does not apply to. With
    `responses` these are strings. Otherwise the function has the form of TRL's `GRPOTrainer`:

    - `prompts` and `completions` are lists of messages; strings if the row gives its prompt as plain text.
    - `completion_ids` are the sampled token ids of the newest turns.
    - `**kwargs` takes `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_metric` and `log_extra` too.

    Raises:
        ValueError: If it cannot be called by names.
    """
    return _RewardFunction(score)


class Arguments:
    """The values that a function is given by the names of its parameters.

    Args:
        function: Function of a user; a method that is bound to its object.
        name: Its name, for messages.

    Raises:
        ValueError: If it cannot be called by names.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._name = name
        parameters = _parameters(function)
        self._takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        self.names = [each.name for each in named]
        self._needs = frozenset(each.name for each in named if each.default is each.empty)
        self.are_lists = any(name in _OF_MANY for name in self.names)
        self._has_form_of_trl = self.are_lists and _RESPONSES not in self.names
        offered = {**_OF_MANY, **_OF_ONE, **({} if self._has_form_of_trl else _OF_TEXTS)}
        keywords = (*_KEYWORDS, *_SHARED) if self._has_form_of_trl and self._takes_rest else ()
        self._given = {name: offered[name] for name in (*self.names, *keywords) if name in offered}
        self._logs = LOG_PARAMETERS if keywords else tuple(name for name in LOG_PARAMETERS if name in self.names)

    def of(self, conversation: Conversation) -> dict[str, Any]:
        """The arguments for a conversation, by name.

        Raises:
            MissingField: If a parameter without a default is neither offered nor a field of the row.
        """
        row = conversation.info
        given: dict[str, Any] = {name: read(conversation) for name, read in self._given.items()}
        for name in self.names:
            if name in OFFERED:
                continue
            if name in row:
                given[name] = row[name]
            elif name in self._needs:
                raise MissingField(f"{self._name} asks for {name!r}{_instead(name, row)}")
        if self._takes_rest:
            given |= {name: value for name, value in row.items() if name not in OFFERED and name not in given}
        return given

    def of_many(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        """The arguments for several conversations, by name: a list with a value of each, None for a field that its row
        does not have.

        Raises:
            MissingField: As `of`.
        """
        each = [self.of(conversation) for conversation in conversations]
        names = dict.fromkeys(name for arguments in each for name in arguments)
        return {
            name: each[0][name] if name in _SHARED else [arguments.get(name) for arguments in each] for name in names
        }

    def logs_of(self, log: RewardLog) -> dict[str, Any]:
        """The functions of a log that the function asks for, by name."""
        return {name: getattr(log, name) for name in self._logs}


class _RewardFunction:
    """A single-turn environment around a function."""

    def __init__(self, score: Callable[..., Any]) -> None:
        self._score = score
        self._name = getattr(score, "__name__", type(score).__name__)
        self._arguments = Arguments(score, self._name)
        self._gather = (
            GatherRunner()
            if (inspect.iscoroutinefunction(score) or inspect.iscoroutinefunction(type(score).__call__))
            else None
        )

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        if not conversations:
            return []
        if self._arguments.are_lists:
            log = RewardLog(self._name, len(conversations))
            [returned] = self._called([self._arguments.of_many(conversations) | self._arguments.logs_of(log)])
            rewards = self._listed(returned, len(conversations))
            results = [StepResult(reward={}) if reward is None else _result(reward) for reward in rewards]
            return [_with_info(result, info) for result, info in zip(results, log.infos(), strict=True)]
        logs = [RewardLog(self._name, 1) for _ in conversations]
        pairs = list(zip(conversations, logs, strict=True))
        returned = self._called([self._arguments.of(each) | self._arguments.logs_of(log) for each, log in pairs])
        return [_with_info(_result(one), *log.infos()) for one, log in zip(returned, logs, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _called(self, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        def calls() -> list[Any]:
            return [self._score(**each) for each in arguments]

        return calls() if self._gather is None else self._gather(calls)

    def _listed(self, returned: Any, count: int) -> list[Any]:
        if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
            raise UnusableAnswer(
                f"{self._name} returned {_shown(returned)}; a function that is given lists returns a list of rewards"
            )
        rewards = list(returned)
        if len(rewards) != count:
            raise UnusableAnswer(f"{self._name} returned {len(rewards)} rewards for {count} responses; return one each")
        return rewards


def _parameters(score: Callable[..., Any]) -> list[inspect.Parameter]:
    if not callable(score):
        raise ValueError(f"{_shown(score)} is not a function; a reward is one, such as score(response, **row)")
    try:
        parameters = list(inspect.signature(score).parameters.values())
    except ValueError:
        raise ValueError(f"the parameters of {score!r} cannot be read; call it in your own function") from None
    unnamed = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
    if unnamed:
        raise ValueError(f"it takes {', '.join(unnamed)} by position only; remove the `/` from its parameters")
    return parameters


def _shown(value: Any) -> str:
    return f"{value!r:.80}"


def _result(returned: Any) -> StepResult:
    if isinstance(returned, Mapping) and not returned:
        raise UnusableAnswer("the reward has no parts: it is {}; return a number, or numbers by name")
    return returned if isinstance(returned, StepResult) else StepResult(reward=returned, done=True)


def _with_info(result: StepResult, info: Mapping[str, Any]) -> StepResult:
    return replace(result, info={**info, **result.info}) if info else result


def _completion(conversation: Conversation) -> Any:
    """The completion as TRL has it: messages, or the text if the prompt is one."""
    if conversation.is_text:
        return conversation.completion
    return [dict(message) for message in conversation.completion_messages]


def _whole_prompt(conversation: Conversation) -> Any:
    """The prompt as in TRL: messages, or a string."""
    messages = conversation.prompt_messages
    return messages[-1]["content"] if conversation.is_text and messages else [dict(message) for message in messages]


def _prompt(conversation: Conversation) -> str:
    """Text of the newest message before the policy's."""
    content = next((m.get("content") for m in reversed(conversation.messages) if m.get("role") != "assistant"), "")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _instead(name: str, row: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, [*row, *OFFERED], n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    fields = f"{'The' if near else 'the'} row has {', '.join(map(str, row)) or 'no fields'}"
    return f"{hint} {fields}; other parameters may be {', '.join(_OF_ONE)}"
