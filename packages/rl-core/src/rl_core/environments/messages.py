"""Messages between an `EnvironmentPool` and its processes.

The pool is trusted and sends pickled tuples. A process runs whatever the environment imports, so nothing that it sends
is unpickled: replies are msgpack, read into plain values and checked field by field.

A message is answered with:

- `"build", environment, config, title, memory`: whether the environment saves states, or a `WorkerError`, and then the
  process ends.
- `"step", conversations, saved`: a list of `Answer`. The conversations are pickled; `saved` has the states to restore
  first, by the index of their conversation. Before it, the process may send questions to judges (`Ask`), and each is
  answered by `"verdict", number, value, failure, is_cached`, in the order in which the answers come.
- `"abandon", ids`: None, or a string if closing the states of these conversations raised.
- `"close"`: the end of the stream, after every state was closed.
"""

from __future__ import annotations

import json
import math
import re
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat, SupportsIndex, get_args

import msgpack
import numpy as np

from rl_core.errors import WorkerError
from rl_core.rollouts.environment import EnvironmentFailure, Fault, KeptState, StepResult
from rl_core.rollouts.judging import Question

LENGTH = struct.Struct("!Q")
"""Before every message: its number of bytes."""
STACKS = signal.SIGUSR1
"""Has a process write its stacks and end."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum number of bytes of one conversation's answer."""
OVERHEAD_BYTES = 2**16
"""Maximum number of bytes of a reply in addition to the answers in it."""
MAX_STATE_BYTES = 4 * 2**20
"""Maximum number of bytes of a saved state."""
MAX_ASKS = 256
"""Maximum number of questions to judges for each conversation of a call."""
MAX_ASK_BYTES = 2**20
"""Maximum number of bytes of a question to a judge."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles of the messages of a question."""
MAX_NESTING = 32
"""Maximum number of containers around a value."""
MAX_INTEGER_BITS = 512
"""Largest integer; it fits a float, and JSON writes it."""

_TUPLE, _ARRAY, _INTEGER = 1, 2, 3
_FAULTS: Mapping[str, Fault] = {fault: fault for fault in get_args(Fault)}
_ARRAY_TYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\w{1,8}\])?")

Message = tuple[Any, ...]


class MalformedAnswer(ValueError):
    """Bytes from an environment's process that are not a reply to what it was asked."""


@dataclass(frozen=True)
class Answer:
    """One conversation's outcome.

    Args:
        result: Its state is None, the process keeps it.
        has_state: True if the process keeps one for the next turn.
        retry: A failure of the whole batched call, which this conversation may not be to blame for.
        out_of_memory: The process reached its memory limit and is to be replaced.
        saved: The state as bytes; None if it is not saved.
    """

    result: StepResult | EnvironmentFailure
    has_state: bool = False
    retry: bool = False
    out_of_memory: bool = False
    saved: bytes | None = None


@dataclass(frozen=True)
class Ask:
    """A question of an environment's process to a judge.

    Args:
        call: Number of the call of `step` that it belongs to, counted from 1 in each process.
        number: Number of the question, unique in the process.
        judge: Name of the judge.
        question: The question.
    """

    call: int
    number: int
    judge: str
    question: Question


def max_reply_bytes(message: Message) -> int:
    """Return the maximum number of bytes that the reply to a message may have."""
    match message:
        case ("build", *_):
            return 2**22
        case ("step", conversations, _):
            return (MAX_ANSWER_BYTES + MAX_STATE_BYTES + OVERHEAD_BYTES) * len(conversations)
    return OVERHEAD_BYTES


def read_reply(message: Message, data: bytes) -> Any:
    """Return the reply to a message from its bytes, or an `Ask`. Raises `MalformedAnswer` if they are not one."""
    match message, read_value(data):
        case ("build", *_), bool(saves):
            return saves
        case ("build", *_), [str(kind), str(text), str(traceback)]:
            return WorkerError(kind, text, traceback)
        case ("step", conversations, _), list(found) if len(found) == len(conversations):
            return [_read_answer(fields) for fields in found]
        case ("step", *_), {"ask": list(fields)} if len(data) <= MAX_ASK_BYTES:
            return _read_ask(fields)
        case ("abandon", _), None | str() as problem:
            return problem
    raise MalformedAnswer(f"it is not a reply to {message[0]!r}")


def write_built(built: WorkerError | bool) -> bytes:
    """Return the bytes that reply to "build"."""
    if isinstance(built, bool):
        return _pack(built)
    # A message and a traceback of any length fit the limit.
    return _pack([built.kind, built.message[:10_000], built.traceback[-100_000:]])


def write_answers(answers: Sequence[Answer]) -> bytes:
    """Return the bytes that reply to "step"; the results are plain (`plain_result`)."""
    return _pack([_fields(answer) for answer in answers])


def write_ask(ask: Ask) -> bytes:
    """Return the bytes of a question.

    Raises:
        TypeError, ValueError: If it holds something that is not a plain value, or is too long.
    """
    messages = [dict(message) for message in ask.question.messages]
    data = write_value({"ask": [ask.call, ask.number, ask.judge, messages, ask.question.form]})
    if len(data) > MAX_ASK_BYTES:
        raise ValueError(f"a question to a judge has {len(data):,} bytes; the limit is {MAX_ASK_BYTES:,}")
    return data


def write_problem(problem: str | None) -> bytes:
    """Return the bytes that reply to "abandon"."""
    return _pack(problem and problem[:10_000])


def write_value(value: Any) -> bytes:
    """Write a plain value as bytes: None, bools, numbers, strings, bytes, lists, tuples, dicts and arrays of these.

    Raises:
        TypeError, ValueError: If it holds something else.
    """
    return _pack(_plain(value, "it"))


def read_value(data: bytes) -> Any:
    """Return the plain value of bytes that may be anything. Raises `MalformedAnswer` if they are not one."""
    depth = 0

    def unpack(packed: bytes) -> Any:
        return msgpack.unpackb(packed, ext_hook=extension, strict_map_key=False, unicode_errors="surrogatepass")

    def extension(code: int, packed: bytes) -> Any:
        # Extended types may hold one another, to a bounded depth.
        nonlocal depth
        if depth > MAX_NESTING:
            raise MalformedAnswer("nested too deep")
        depth += 1
        try:
            if code == _INTEGER and len(packed) <= MAX_INTEGER_BITS // 8 + 1:
                return int.from_bytes(packed, "little", signed=True)
            held = unpack(packed) if code in (_TUPLE, _ARRAY) else None
            match held:
                case [str(kind), list(shape), bytes(values)] if code == _ARRAY:
                    return _read_array(kind, shape, values)
                case list() if code == _TUPLE:
                    return tuple(held)
            raise MalformedAnswer(f"extension {code} holds a value of another type")
        finally:
            depth -= 1

    try:
        value = unpack(data)
    except MalformedAnswer:
        raise
    # These are all errors of msgpack, numpy and Python for bytes that they cannot read.
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedAnswer(f"{type(error).__name__}: {error}") from None
    _check_plain(value, 0)
    return value


def write_results(results: Sequence[StepResult]) -> bytes:
    """Write results that were read from replies; each state becomes a flag and the bytes that were saved of it."""
    return write_answers(
        [Answer(each, each.state is not None, saved=each.state and each.state.saved) for each in results]
    )


def read_results(data: bytes) -> list[StepResult]:
    """Return the results that `write_results` wrote. Raises `MalformedAnswer` if it did not write these bytes."""
    found = read_value(data)
    if not isinstance(found, list):
        raise MalformedAnswer("expected a list of results")
    return [
        replace(answer.result, state=KeptState(answer.saved) if answer.has_state else None)
        for answer in map(_read_answer, found)
        if isinstance(answer.result, StepResult)
    ]


def plain_result(result: StepResult) -> StepResult:
    """Return the result without its state, in types that any process can read.

    Raises:
        TypeError, ValueError: If it holds something that may not leave the environment's process.
    """
    # Environments are code of users, so nothing is certain about these values.
    given: Sequence[Any] = result.observation
    stops: Any = result.stop_strings
    limit: Any = result.max_new_tokens
    observation = []
    for message in given:
        if not isinstance(message, Mapping):
            raise TypeError(f"observation holds a {type(message).__qualname__} instead of a message")
        observation.append({str(key): _plain(value, f"observation[{key!r}]") for key, value in message.items()})
    if stops is not None and (isinstance(stops, str) or not all(isinstance(text, str) for text in stops)):
        raise TypeError(f"stop_strings must be a tuple of strings, got {stops!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or int(limit) < 1):
        raise TypeError(f"max_new_tokens must be a number of tokens above 0, got {limit!r:.80}")
    agents: Sequence[Any] = (result.agent, result.next_agent, *result.agent_rewards)
    for name in agents:
        if not isinstance(name, str):
            raise TypeError(f"the name of an agent must be a string, got {name!r:.80}")
    plain = replace(
        result,
        reward=_plain_reward(result.reward),
        done=bool(result.done),
        observation=tuple(observation),
        state=None,
        stop_strings=None if stops is None else tuple(map(str.__str__, stops)),
        max_new_tokens=None if limit is None else _bounded(int(limit), "max_new_tokens"),
        info={str(key): _plain(value, f"info[{key!r}]") for key, value in dict(result.info).items()},
        agent=str.__str__(result.agent),
        next_agent=str.__str__(result.next_agent),
        agent_rewards={str.__str__(name): _plain_reward(reward) for name, reward in result.agent_rewards.items()},
    )
    size = len(_pack(_fields(Answer(plain))))
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has {size / 2**20:.0f} MiB; it may have {MAX_ANSWER_BYTES / 2**20:.0f} MiB")
    return plain


def _plain_reward(reward: float | Mapping[str, float]) -> float | dict[str, float]:
    named: Mapping[Any, Any] = reward if isinstance(reward, Mapping) else {"reward": reward}
    plain = {}
    for name, value in named.items():
        what = "the reward" if name == "reward" else f"the reward {str(name)!r}"
        # A string that reads as a number is refused, because the next one may not.
        if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat | SupportsIndex):
            raise TypeError(f"{what} is {value!r:.80}; return a number, such as 1.0")
        try:
            plain[str(name)] = number = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{what} is {value!r:.80}, which is not a single number: {error}") from None
        if not math.isfinite(number):
            raise ValueError(f"{what} is {number}; return a finite number")
    return plain if isinstance(reward, Mapping) else plain["reward"]


def _plain(value: Any, where: str, depth: int = 1) -> Any:
    """Return the value in plain types; a foreign subclass of a plain type becomes the plain type."""
    if depth > MAX_NESTING:
        raise ValueError(f"{where} is nested deeper than {MAX_NESTING} containers")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case bytes():
            return bytes(value)
        case int():
            return _bounded(int(value), where)
        case float():
            return float(value)
        case np.generic() if value.dtype.kind in "?biufSU":
            return _plain(value.item(), where, depth)
        case np.generic() | np.ndarray():
            array = np.array(value)
            if array.dtype.kind not in "biufcSUmM":
                raise TypeError(
                    f"{where} holds an array of {array.dtype}, which cannot leave the environment's process"
                )
            return array
        case Mapping():
            plain = {}
            for key, item in value.items():
                plain_key = _plain(key, where)
                if not isinstance(plain_key, str | int | float | bool | bytes | None):
                    raise TypeError(
                        f"{where} has a key of type {type(key).__qualname__}; keys must be strings or numbers"
                    )
                plain[plain_key] = _plain(item, f"{where}[{key!r}]", depth + 1)
            return plain
        case list() | tuple():
            items = [_plain(item, where, depth + 1) for item in value]
            return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"{where} holds a {type(value).__qualname__}, which cannot leave the environment's process")


def _bounded(value: int, where: str) -> int:
    if value.bit_length() > MAX_INTEGER_BITS:
        raise ValueError(f"{where} holds an integer of {value.bit_length()} bits; the limit is {MAX_INTEGER_BITS}")
    return value


def _fields(answer: Answer) -> list[Any]:
    flags = [answer.has_state, answer.retry, answer.out_of_memory, answer.saved]
    match answer.result:
        case EnvironmentFailure(reason, fault):
            return [[reason[:10_000], fault], *flags]
        case result:
            stop_strings = None if result.stop_strings is None else list(result.stop_strings)
            turn = [list(result.observation), stop_strings, result.max_new_tokens]
            agents = [result.agent, result.next_agent, dict(result.agent_rewards)]
            return [[result.reward, result.done, *turn, result.info, *agents], *flags]


def _read_answer(fields: Any) -> Answer:
    match fields:
        case [[str(reason), str(fault)], bool(has_state), bool(retry), bool(out_of_memory), None] if fault in _FAULTS:
            return Answer(EnvironmentFailure(reason, _FAULTS[fault]), has_state, retry, out_of_memory)
        case [[*result], bool(has_state), bool(retry), bool(out_of_memory), None | bytes() as saved]:
            if saved is not None and (not has_state or len(saved) > MAX_STATE_BYTES):
                raise MalformedAnswer("a saved state is too large, or of no state")
            return Answer(_read_result(result), has_state, retry, out_of_memory, saved)
    raise MalformedAnswer("an answer has unexpected fields")


def _read_ask(fields: list[Any]) -> Ask:
    match fields:
        case [int(call), int(number), str(judge), list(messages), None | dict() as form] if messages:
            for message in messages:
                match message:
                    case {"role": str(role), "content": str(), **rest} if role in ROLES and not rest:
                        continue
                raise MalformedAnswer("a question to a judge holds something other than messages of role and content")
            try:
                form = json.loads(json.dumps(form, allow_nan=False))
            except (TypeError, ValueError) as error:
                raise MalformedAnswer(f"the form of a verdict is not a JSON schema: {error}") from None
            return Ask(call, number, judge, Question(tuple(messages), form))
    raise MalformedAnswer("a question to a judge has unexpected fields")


def _read_result(fields: list[Any]) -> StepResult:
    match fields:
        case [
            reward,
            bool(done),
            list(observation),
            None | list() as stops,
            None | int() as limit,
            dict(info),
            str(agent),
            str(next_agent),
            dict(agent_rewards),
        ]:
            for each in (reward, *agent_rewards.values()):
                named = each if isinstance(each, dict) else {"reward": each}
                if not _has_texts(named) or not all(isinstance(v, float) and math.isfinite(v) for v in named.values()):
                    raise MalformedAnswer("a reward is not a finite number")
            if not _has_texts(agent_rewards):
                raise MalformedAnswer("the name of an agent is not a string")
            if not all(isinstance(message, dict) and _has_texts(message) for message in observation):
                raise MalformedAnswer("an observation is not a message")
            if not _has_texts(stops or ()):
                raise MalformedAnswer("a stop string is not a string")
            if limit is not None and (isinstance(limit, bool) or limit < 1):
                raise MalformedAnswer("max_new_tokens is not a number of tokens")
            if not _has_texts(info):
                raise MalformedAnswer("every key of `info` must be a string")
            stop_strings, turn = None if stops is None else tuple(stops), tuple(observation)
            return StepResult(reward, done, turn, None, stop_strings, info, limit, agent, next_agent, agent_rewards)
    raise MalformedAnswer("an answer has unexpected fields")


def _has_texts(names: Any) -> bool:
    return all(isinstance(name, str) for name in names)


def _pack(value: Any) -> bytes:
    def extend(value: Any) -> msgpack.ExtType:
        match value:
            case tuple():
                return msgpack.ExtType(_TUPLE, _pack(list(value)))
            case int():
                return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
            case np.ndarray():
                return msgpack.ExtType(_ARRAY, _pack([value.dtype.str, list(value.shape), value.tobytes()]))
        raise TypeError(f"{type(value).__qualname__} is not a plain value")

    packed: bytes = msgpack.packb(value, default=extend, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _read_array(kind: str, shape: list[Any], values: bytes) -> np.ndarray:
    if not _ARRAY_TYPE.fullmatch(kind) or not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedAnswer(f"an array of {kind[:20]!r} and shape {shape[:10]}")
    dtype = np.dtype(kind)
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(values):
        raise MalformedAnswer("an array whose size does not match its shape")
    return np.frombuffer(values, dtype).reshape(shape).copy()


def _check_plain(value: Any, depth: int) -> None:
    """Raise `MalformedAnswer` for nesting that others could not walk, and for values of further types."""
    # The fields of an answer are a few containers around the values of its result.
    if depth > MAX_NESTING + 8:
        raise MalformedAnswer("nested too deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | bool | bytes | None):
                raise MalformedAnswer(f"a key of type {type(key).__qualname__}")
            _check_plain(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_plain(item, depth + 1)
    elif not isinstance(value, str | int | float | bool | bytes | np.ndarray | None):
        raise MalformedAnswer(f"a value of type {type(value).__qualname__}")
