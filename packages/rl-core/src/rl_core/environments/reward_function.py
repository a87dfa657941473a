"""Plain functions and classes of a user, as environments."""

from __future__ import annotations

import difflib
import faulthandler
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import FrameType
from typing import Any

from rl_core.environments.judge_link import GIVEN
from rl_core.environments.messages import STACKS, read_value, write_value
from rl_core.environments.rewards import LOG_PARAMETERS, VERDICTS, RewardLog, merged_info
from rl_core.rollouts.environment import (
    Conversation,
    Environment,
    EnvironmentFailure,
    MissingField,
    StepResult,
    UnusableAnswer,
)
from rl_core.rollouts.judging import Judge, JudgeFailed
from rl_core.user_code import is_own


def _prompt(conversation: Conversation) -> str:
    """Return the text of the newest message before the policy's."""
    content = next((m.get("content") for m in reversed(conversation.messages) if m.get("role") != "assistant"), "")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _whole_completion(conversation: Conversation) -> Any:
    """Return the completion as TRL has it: messages, or the text if the prompt is one."""
    if conversation.is_text:
        return conversation.completion
    return [dict(message) for message in conversation.completion_messages]


def _whole_prompt(conversation: Conversation) -> Any:
    """Return the prompt as TRL has it: messages, or a string."""
    messages = conversation.prompt_messages
    return messages[-1]["content"] if conversation.is_text and messages else [dict(message) for message in messages]


_Reader = Callable[[Conversation], Any]
_OF_ONE: Mapping[str, _Reader] = {
    "response": attrgetter("completion"),
    "completion": attrgetter("completion"),
    "prompt": _prompt,
    "messages": attrgetter("messages"),
    "truncated": attrgetter("truncated"),
    "opened_thoughts": attrgetter("opened_thoughts"),
    "tool_calls": attrgetter("tool_calls"),
    "trainer_state": attrgetter("trainer_state"),
    "conversation_seed": attrgetter("seed"),
}
_RESPONSES = "responses"
_OF_MANY: Mapping[str, _Reader] = {
    _RESPONSES: attrgetter("completion"),
    "completions": _whole_completion,
    "prompts": _whole_prompt,
    "completion_ids": lambda each: None if each.completion_ids is None else each.completion_ids.tolist(),
}
_OF_TEXTS: Mapping[str, _Reader] = {"completions": attrgetter("completion"), "prompts": _prompt}
"""Parameters that have strings next to `responses`."""
_SHARED = ("trainer_state",)
"""Parameters that have one value for a call of lists."""
_KEYWORDS = ("prompts", "completions", "completion_ids")
"""Parameters that `**kwargs` takes too in a function of TRL's form."""

OFFERED = (*_OF_ONE, *_OF_MANY, *LOG_PARAMETERS)
"""Names of parameters that a reward function may have in addition to the fields of a row of the data."""


def as_environment(score: Callable[..., Any], judges: Mapping[str, Judge] | None = None) -> Environment:
    """Return an environment made of a function that scores a response.

    A parameter is given by its name: `response` (or `completion`), the text that the policy wrote; `prompt`, the text
    of the message that it answers; `messages`, the whole conversation; `truncated`, whether the response ran into the
    token limit; `opened_thoughts`, the prompt's mark that opened thoughts, such as `<think>` (`rl_core.final_text`
    returns the response after its thoughts); `trainer_state`, the progress of the training
    (`rl_core.rollouts.environment.TrainerState`); `conversation_seed`, the seed of the conversation, for a function
    that draws something at random; `log_metric` and `log_extra`, functions that record what a person should see
    (`rl_core.environments.rewards.RewardLog`); the name of a judge, that judge (`rl_core.rollouts.judging.Judge`), in
    an `async` function; any other name, that field of the prompt's row, such as `answer`. A
    parameter with a default may be missing from the row; `**row` takes the fields that no other parameter names. The
    function returns a number, or numbers by name: `reward` is trained on (their sum if it is absent). It may be
    `async`.

    A function with a parameter `responses`, `completions`, `prompts` or `completion_ids` scores several at once, up to
    `max_batch`: parameters are given lists with a value for each (`trainer_state`, `log_metric` and `log_extra` are for
    the call), and the function returns a list of rewards, with None for a row that it does not apply to. With
    `responses` these are strings. Otherwise the function has the form of TRL's `GRPOTrainer`:

    - `prompts` and `completions` are lists of messages; strings if the row gives its prompt as plain text.
    - `completion_ids` are the sampled token ids of the newest turns.
    - `**kwargs` takes `prompts`, `completions`, `completion_ids`, `trainer_state`, `log_metric` and `log_extra` too.

    Args:
        score: The function.
        judges: Judges that it may ask, by name.

    Raises:
        ValueError: If it cannot be called by names.
    """
    return _RewardFunction(score, judges)


class Arguments:
    """The values of a function's parameters, found by name.

    Args:
        function: Function of a user; a method that is bound to its object.
        name: Its name, for messages.
        judges: Judges that it may ask, by name.

    Raises:
        ValueError: If it cannot be called by names.
    """

    def __init__(self, function: Callable[..., Any], name: str, judges: Mapping[str, Judge] | None = None) -> None:
        self._name = name
        if not callable(function):
            raise ValueError(f"{function!r:.80} is not a function; a reward is one, such as score(response, **row)")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:
            raise ValueError(f"the parameters of {function!r} cannot be read; call it in your own function") from None
        unnamed = [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]
        if unnamed:
            raise ValueError(f"it takes {', '.join(unnamed)} by position only; remove the `/` from its parameters")
        self._takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = [each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
        self._names = [each.name for each in named]
        self._needs = frozenset(each.name for each in named if each.default is each.empty)
        self._judges = {each: found for each, found in (judges or {}).items() if each in {*self._names} - {*OFFERED}}
        if self._judges and not _is_async(function):
            raise ValueError(
                f"{name} takes the judge {next(iter(self._judges))}, which is asked with `await`; make it an async "
                "function"
            )
        self.are_lists = any(name in _OF_MANY for name in self._names)
        has_form_of_trl = self.are_lists and _RESPONSES not in self._names
        offered = {**_OF_MANY, **_OF_ONE, **({} if has_form_of_trl else _OF_TEXTS)}
        keywords = (*_KEYWORDS, *_SHARED) if has_form_of_trl and self._takes_rest else ()
        self._given = {name: offered[name] for name in (*self._names, *keywords) if name in offered}
        self._logs = LOG_PARAMETERS if keywords else tuple(name for name in LOG_PARAMETERS if name in self._names)

    def of(self, conversation: Conversation) -> dict[str, Any]:
        """Return the arguments for a conversation, by name.

        Raises:
            MissingField: If a parameter without a default is neither offered nor a field of the row.
        """
        row = conversation.info
        given: dict[str, Any] = {name: read(conversation) for name, read in self._given.items()}
        for name in self._names:
            if name in OFFERED:
                continue
            if name in self._judges and name in row:
                raise MissingField(
                    f"{self._name} asks for {name!r}, which is both a judge and a field of the row; rename the judge"
                )
            if name in self._judges:
                given[name] = self._judges[name]
            elif name in row:
                given[name] = row[name]
            elif name in self._needs:
                near = difflib.get_close_matches(name, [*row, *OFFERED], n=1)
                hint = f"; did you mean {near[0]}? The" if near else "; the"
                fields = ", ".join(map(str, row)) or "no fields"
                others = f"other parameters may be {', '.join(_OF_ONE)}"
                raise MissingField(f"{self._name} asks for {name!r}{hint} row has {fields}; {others}")
        if self._takes_rest:
            given |= {name: value for name, value in row.items() if name not in OFFERED and name not in given}
        return given

    def of_many(self, conversations: Sequence[Conversation]) -> dict[str, Any]:
        """Return the arguments for several conversations, by name: a list with a value of each, None for a field that
        its row does not have.

        Raises:
            MissingField: See `of`.
        """
        each = [self.of(conversation) for conversation in conversations]
        names = dict.fromkeys(name for arguments in each for name in arguments)
        shared = {*_SHARED, *self._judges}
        return {
            name: each[0][name] if name in shared else [arguments.get(name) for arguments in each] for name in names
        }

    def logs_of(self, log: RewardLog) -> dict[str, Any]:
        """Return the functions of a log that the function asks for, by name."""
        return {name: getattr(log, name) for name in self._logs}


class _RewardFunction:
    """A single-turn environment around a function."""

    def __init__(self, score: Callable[..., Any], judges: Mapping[str, Judge] | None = None) -> None:
        self._score = score
        self._name = getattr(score, "__name__", type(score).__name__)
        self._arguments = Arguments(score, self._name, judges)
        self._gather = GatherRunner() if _is_async(score) else None

    def step(
        self, conversations: Sequence[Conversation], states: Sequence[Any]
    ) -> list[StepResult | EnvironmentFailure]:
        if not conversations:
            return []
        arguments = self._arguments
        if not arguments.are_lists:
            logs = [RewardLog(self._name, 1) for _ in conversations]
            pairs = zip(conversations, logs, strict=True)
            given: list[list[dict[str, Any]]] = [[] for _ in conversations]
            rewards = self._called([arguments.of(each) | arguments.logs_of(log) for each, log in pairs], given)
            infos: list[Mapping[str, Any]] = [
                merged_info(log.infos()[0], {VERDICTS: own} if own else {})
                for log, own in zip(logs, given, strict=True)
            ]
        else:
            log = RewardLog(self._name, len(conversations))
            [returned] = self._called([arguments.of_many(conversations) | arguments.logs_of(log)])
            if isinstance(returned, str | Mapping) or not isinstance(returned, Iterable):
                raise UnusableAnswer(
                    f"{self._name} returned {returned!r:.80}; a function that is given lists returns a list of rewards"
                )
            listed, count = list(returned), len(conversations)
            if len(listed) != count:
                raise UnusableAnswer(
                    f"{self._name} returned {len(listed)} rewards for {count} responses; return one each"
                )
            # An empty reward does not apply to its row.
            rewards = [StepResult(reward={}) if reward is None else reward for reward in listed]
            infos = list(log.infos())
        results: list[StepResult | EnvironmentFailure] = []
        for reward, info in zip(rewards, infos, strict=True):
            if isinstance(reward, JudgeFailed):
                results.append(EnvironmentFailure(f"{self._name}: {reward}", "raised"))
                continue
            if isinstance(reward, Mapping) and not reward:
                raise UnusableAnswer("the reward has no parts: it is {}; return a number, or numbers by name")
            result = reward if isinstance(reward, StepResult) else StepResult(reward=reward, done=True)
            results.append(replace(result, info={**info, **result.info}) if info else result)
        return results

    def close(self, states: Sequence[Any]) -> None:
        pass

    def _called(self, arguments: Sequence[Mapping[str, Any]], given: Sequence[list[dict[str, Any]]] = ()) -> list[Any]:
        async def judged(call: Awaitable[Any], own: list[dict[str, Any]]) -> Any:
            # Each call is a task, whose context is its own.
            GIVEN.set(own)
            # A judge that fails costs this conversation, and not the others of the call.
            try:
                return await call
            except JudgeFailed as error:
                return error

        if self._gather is None:
            return [self._score(**each) for each in arguments]
        if self._arguments.are_lists:
            return self._gather(lambda: [self._score(**each) for each in arguments])
        return self._gather(
            lambda: [judged(self._score(**each), own) for each, own in zip(arguments, given, strict=True)]
        )


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def plays_one(kind: Any) -> bool:
    """Return whether a class has a method `step` that takes one conversation, rather than `conversations` and
    `states`."""
    step = inspect.getattr_static(kind, "step", None)
    return callable(step) and "conversations" not in inspect.signature(step).parameters


class ConversationEnvironment:
    """An environment that makes an object for every conversation, which keeps the state of that one.

    Its method `step` is given arguments by parameter name, as a reward function is: `response`, `prompt`, `messages`,
    `truncated`, `tool_calls`, `trainer_state`, `conversation_seed`, `log_metric`, `log_extra`, and the fields of the
    prompt's row. It may be `async`, and returns

    - a string: the next message to the policy, with reward 0;
    - a string and a reward: the same with that reward;
    - a number, or numbers by name: the reward; the rollout then ends;
    - a `StepResult`, for anything else.

    A method `close` without parameters, if there is one, is called when the conversation is over.

    With methods `save` and `restore`, conversations outlive the process. `save` takes nothing and returns what the
    object has to remember: numbers, strings, bytes, arrays, and lists, tuples and dicts of these; None if it cannot be
    saved now. `restore` is called with that on a new object.

    Args:
        make: Makes the object of a conversation.
        name: Name of the class, for messages.
        saves: True if the objects have `save` and `restore`.
        judges: Judges that an `async` method `step` may ask, by name.
    """

    def __init__(
        self, make: Callable[[], Any], name: str, *, saves: bool = False, judges: Mapping[str, Judge] | None = None
    ) -> None:
        self._make = make
        self._judges = judges
        self._name = name
        self._gather = GatherRunner()
        if saves:
            self.save, self.restore = self._save, self._restore

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        """Step the objects; the `async` methods run together."""
        # A state is the object that plays the conversation, with the arguments of its `step`.
        players: list[tuple[Any, Arguments]] = [state or self._begin() for state in states]
        logs = [RewardLog(f"{self._name}.step", 1) for _ in conversations]
        returned = [
            player.step(**arguments.of(conversation), **arguments.logs_of(log))
            for (player, arguments), conversation, log in zip(players, conversations, logs, strict=True)
        ]
        if any(inspect.isawaitable(each) for each in returned):
            returned = self._gather(lambda: returned)
        results = []
        for each, state, log in zip(returned, players, logs, strict=True):
            result, [info] = self._result(each), log.infos()
            # The object is kept even if the conversation is over, so that it is closed.
            results.append(replace(result, state=state, info=merged_info(info, result.info)))
        return results

    def close(self, states: Sequence[Any]) -> None:
        """Close the objects of conversations that are over."""
        players = [state[0] for state in states if state is not None]
        closed = [player.close() for player in players if callable(inspect.getattr_static(player, "close", None))]
        if any(inspect.isawaitable(each) for each in closed):
            self._gather(lambda: closed)

    def _save(self, states: Sequence[tuple[Any, Arguments]]) -> list[bytes | None]:
        saved = []
        for player, _ in states:
            value = player.save()
            try:
                saved.append(None if value is None else write_value(value))
            except (TypeError, ValueError) as error:
                raise UnusableAnswer(f"{self._name}.save returned {value!r:.80}: {error}") from None
        return saved

    def _restore(self, saved: Sequence[bytes]) -> list[tuple[Any, Arguments]]:
        states = [self._begin() for _ in saved]
        for (player, _), data in zip(states, saved, strict=True):
            player.restore(read_value(data))
        return states

    def _begin(self) -> tuple[Any, Arguments]:
        player = self._make()
        return player, Arguments(player.step, f"{self._name}.step", self._judges)

    def _result(self, returned: Any) -> StepResult:
        match returned:
            case StepResult():
                return returned
            case str() | (str(), _):
                text, reward = (returned, 0.0) if isinstance(returned, str) else returned
                return StepResult(reward=reward, done=False, observation=({"role": "user", "content": text},))
            case None | list() | tuple():
                raise UnusableAnswer(
                    f"{self._name}.step returned {returned!r:.80}; return a string to continue, a number to end with "
                    "that reward, a string and a number, or a StepResult"
                )
        return StepResult(reward=returned)


class GatherRunner:
    """Runs calls side by side and waits for all of them. They share one event loop, which is kept because clients that
    the user's code keeps belong to it."""

    def __init__(self) -> None:
        self._runner: Any = None

    def __call__(self, calls: Callable[[], Sequence[Awaitable[Any]]]) -> list[Any]:
        """Return the results, in order.

        Args:
            calls: Makes the calls; called on the loop.
        """
        # A process whose environment is not async need not import it.
        import asyncio

        async def gathered() -> list[Any]:
            tasks = [asyncio.ensure_future(call) for call in calls()]
            try:
                return await asyncio.gather(*tasks)
            finally:
                # Otherwise calls would continue in the next one after one of them has raised.
                for task in tasks:
                    task.cancel()

        if self._runner is None:
            self._runner = asyncio.Runner()
            _show_waits(lambda: asyncio.all_tasks(self._runner.get_loop()))
        results: list[Any] = self._runner.run(gathered())
        return results


def _show_waits(tasks: Callable[[], Iterable[Any]]) -> None:
    """Show where tasks wait when the pool asks where this process hangs: their frames are not on the stack of any
    thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if not faulthandler.unregister(STACKS):  # type: ignore[func-returns-value]  # it returns whether it was registered
        return

    def write(_signal: int, _frame: FrameType | None) -> None:
        for task in tasks():
            codes, awaited = [], task.get_coro()
            # Each coroutine has the one that it awaits; the innermost is shown first, as in other stacks.
            while (frame := getattr(awaited, "cr_frame", None)) is not None:
                codes.insert(0, (frame.f_code, frame.f_lineno))
                awaited = awaited.cr_await
            if any(is_own(code.co_filename) for code, _ in codes):
                lines = [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in codes]
                os.write(2, "\n".join(("Task (most recent call first):", *lines, "")).encode())
        os._exit(1)

    signal.signal(STACKS, write)
    # The stacks of threads come first, also if this thread never runs Python again.
    faulthandler.register(STACKS, all_threads=True, chain=True)
