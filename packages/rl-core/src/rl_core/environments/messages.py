"""Messages between an `EnvironmentPool` and its processes.

The pool is trusted and sends pickles. A process runs whatever the environment imports, so nothing that it sends is
unpickled: answers are msgpack, read into plain values and checked field by field.
"""

from __future__ import annotations

import math
import re
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, SupportsFloat, SupportsIndex, get_args

import msgpack
import numpy as np

from rl_core.environments.rewards import RewardSum
from rl_core.errors import WorkerError
from rl_core.rollouts.environment import EnvironmentFailure, Fault, KeptState, StepResult
from rl_core.user_code import FromFile

LENGTH = struct.Struct("!Q")
"""Before every message: its number of bytes."""
STACKS = signal.SIGUSR1
"""Has a process write its stacks and end."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Maximum number of bytes of one conversation's answer."""
OVERHEAD_BYTES = 2**16
"""Maximum number of bytes of an answer in addition to those of its conversations."""
MAX_STATE_BYTES = 4 * 2**20
"""Maximum number of bytes of a saved state."""
MAX_NESTING = 32
"""Maximum number of containers around a value."""
MAX_INTEGER_BITS = 512
"""Largest integer; it fits a float, and JSON writes it."""

_TUPLE, _ARRAY, _INTEGER = 1, 2, 3
_FAULTS: Mapping[str, Fault] = {fault: fault for fault in get_args(Fault)}
_ARRAY_KINDS = frozenset("biufcSUmM")
_ARRAY_TYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\w{1,8}\])?")


class MalformedAnswer(ValueError):
    """Bytes from an environment's process that are not an answer to what it was asked."""


class Message(Protocol):
    """A request to an environment's process."""

    def max_answer_bytes(self) -> int:
        """Maximum number of bytes that the answer may have."""
        ...

    def read(self, data: bytes) -> Any:
        """The answer from its bytes. Raises `MalformedAnswer` if they are not one."""
        ...


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
class Build:
    """Build the environment: answered with whether it saves states, or a `WorkerError` after which the process ends.

    Args:
        environment: `"package.module:Class"`, or a class or function in a file of the user's.
        config: Its pickled settings.
        title: Its name, for messages.
        memory: The memory limit in words, for messages.
    """

    environment: str | FromFile | RewardSum
    config: bytes
    title: str
    memory: str = "its memory limit"

    def max_answer_bytes(self) -> int:
        return 2**22

    def read(self, data: bytes) -> WorkerError | bool:
        match _unpack(data):
            case bool(saves):
                return saves
            case [str(kind), str(message), str(traceback)]:
                return WorkerError(kind, message, traceback)
        raise MalformedAnswer("expected a flag or an error")


@dataclass(frozen=True)
class Step:
    """Step pickled conversations in one call: answered with a list of `Answer`.

    Args:
        conversations: Pickled conversations.
        saved: States to restore first, by the index of their conversation.
    """

    conversations: Sequence[bytes]
    saved: Mapping[int, bytes] = field(default_factory=dict)

    def max_answer_bytes(self) -> int:
        return (MAX_ANSWER_BYTES + MAX_STATE_BYTES + OVERHEAD_BYTES) * len(self.conversations)

    def read(self, data: bytes) -> list[Answer]:
        found = _unpack(data)
        if not isinstance(found, list) or len(found) != len(self.conversations):
            raise MalformedAnswer(f"expected {len(self.conversations)} answers")
        return [_read_answer(fields) for fields in found]


@dataclass(frozen=True)
class Abandon:
    """Close the states of these conversations: answered with None, or a string if closing raised."""

    ids: Sequence[str]

    def max_answer_bytes(self) -> int:
        return OVERHEAD_BYTES

    def read(self, data: bytes) -> str | None:
        found = _unpack(data)
        if found is not None and not isinstance(found, str):
            raise MalformedAnswer("expected nothing or a string")
        return found


@dataclass(frozen=True)
class Close:
    """Close every state and end: answered by the end of the stream."""


def write_built(built: WorkerError | bool) -> bytes:
    """Bytes that answer `Build`."""
    if isinstance(built, bool):
        return _pack(built)
    # a message and a traceback of any length fit the limit
    return _pack([built.kind, built.message[:10_000], built.traceback[-100_000:]])


def write_answers(answers: Sequence[Answer]) -> bytes:
    """Bytes that answer `Step`; the results are plain (`plain_result`)."""
    return _pack([_fields(answer) for answer in answers])


def write_problem(problem: str | None) -> bytes:
    """Bytes that answer `Abandon`."""
    return _pack(problem and problem[:10_000])


def write_value(value: Any) -> bytes:
    """A plain value as bytes: None, bools, numbers, strings, bytes, lists, tuples, dicts and arrays of these.

    Raises:
        TypeError, ValueError: if it holds something else.
    """
    return _pack(_plain(value, "it"))


def read_value(data: bytes) -> Any:
    """The value that `write_value` wrote. Raises `MalformedAnswer` if it did not write these bytes."""
    return _unpack(data)


def write_results(results: Sequence[StepResult]) -> bytes:
    """Results that were read from answers as bytes; of their states, whether there is one and what was saved."""
    return write_answers(
        [Answer(each, each.state is not None, saved=each.state and each.state.saved) for each in results]
    )


def read_results(data: bytes) -> list[StepResult]:
    """The results that `write_results` wrote. Raises `MalformedAnswer` if it did not write these bytes."""
    found = _unpack(data)
    if not isinstance(found, list):
        raise MalformedAnswer("expected a list of results")
    answers = [_read_answer(fields) for fields in found]
    return [
        replace(answer.result, state=KeptState(answer.saved) if answer.has_state else None)
        for answer in answers
        if isinstance(answer.result, StepResult)
    ]


def plain_result(result: StepResult) -> StepResult:
    """The result without its state, in types that any process can read.

    Raises:
        TypeError, ValueError: if it holds something that may not leave the environment's process.
    """
    plain = replace(
        result,
        reward=_plain_reward(result.reward),
        done=bool(result.done),
        observation=tuple(_plain_message(message) for message in result.observation),
        state=None,
        stop_strings=None if result.stop_strings is None else _plain_texts(result.stop_strings),
        max_new_tokens=None if result.max_new_tokens is None else _plain_limit(result.max_new_tokens),
        info={str(key): _plain(value, f"info[{key!r}]") for key, value in dict(result.info).items()},
        agent=_plain_name(result.agent),
        next_agent=_plain_name(result.next_agent),
        agent_rewards={_plain_name(name): _plain_reward(reward) for name, reward in result.agent_rewards.items()},
    )
    size = len(_pack(_fields(Answer(plain))))
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"the answer has {size / 2**20:.0f} MiB; it may have {MAX_ANSWER_BYTES / 2**20:.0f} MiB")
    return plain


def _plain_reward(reward: float | Mapping[str, float]) -> float | dict[str, float]:
    named = reward if isinstance(reward, Mapping) else {"reward": reward}
    plain = {str(name): _plain_number(str(name), value) for name, value in named.items()}
    return plain if isinstance(reward, Mapping) else plain["reward"]


def _plain_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of an agent must be a string, got {name!r:.80}")
    return str.__str__(name)


def _plain_number(name: str, value: Any) -> float:
    what = "the reward" if name == "reward" else f"the reward {name!r}"
    # a text that reads as a number is refused: the next one may not
    if isinstance(value, str | bytes) or not isinstance(value, SupportsFloat | SupportsIndex):
        raise TypeError(f"{what} is {value!r:.80}; return a number, such as 1.0")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{what} is {value!r:.80}, which is not a single number: {error}") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; return a finite number")
    return number


def _plain_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"observation holds a {type(message).__qualname__} instead of a message")
    return {str(key): _plain(value, f"observation[{key!r}]") for key, value in message.items()}


def _plain_texts(texts: Any) -> tuple[str, ...]:
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop_strings must be a tuple of strings, got {texts!r}")
    return tuple(str.__str__(text) for text in texts)


def _plain_limit(limit: Any) -> int:
    if isinstance(limit, bool) or not isinstance(limit, SupportsIndex) or int(limit) < 1:
        raise TypeError(f"max_new_tokens must be a number of tokens above 0, got {limit!r:.80}")
    return _bounded(int(limit), "max_new_tokens")


def _plain(value: Any, where: str, depth: int = 1) -> Any:
    """The value in plain types; a foreign subclass of a plain type becomes the plain type."""
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
        case np.generic():
            return _plain(value.item(), where, depth) if value.dtype.kind in "?biufSU" else _plain_array(value, where)
        case np.ndarray():
            return _plain_array(value, where)
        case Mapping():
            return {_plain_key(key, where): _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        case list():
            return [_plain(item, where, depth + 1) for item in value]
        case tuple():
            return tuple(_plain(item, where, depth + 1) for item in value)
        case _:
            raise TypeError(f"{where} holds a {type(value).__qualname__}, which cannot leave the environment's process")


def _plain_key(key: Any, where: str) -> Any:
    plain = _plain(key, where)
    if not isinstance(plain, str | int | float | bool | bytes | None):
        raise TypeError(f"{where} has a key of type {type(key).__qualname__}; keys must be strings or numbers")
    return plain


def _plain_array(value: Any, where: str) -> np.ndarray:
    array = np.array(value)
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(f"{where} holds an array of {array.dtype}, which cannot leave the environment's process")
    return array


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
        case [
            [
                reward,
                bool(done),
                list(observation),
                None | list() as stop_strings,
                None | int() as max_new_tokens,
                dict(info),
                str(agent),
                str(next_agent),
                dict(agent_rewards),
            ],
            bool(has_state),
            bool(retry),
            bool(out_of_memory),
            None | bytes() as saved,
        ]:
            if saved is not None and (not has_state or len(saved) > MAX_STATE_BYTES):
                raise MalformedAnswer("a saved state is too large, or of no state")
            _check_reward(reward)
            for of_agent in agent_rewards.values():
                _check_reward(of_agent)
            if not _has_texts(agent_rewards):
                raise MalformedAnswer("the name of an agent is not a string")
            if not all(isinstance(message, dict) and _has_texts(message) for message in observation):
                raise MalformedAnswer("an observation is not a message")
            if stop_strings is not None and not _has_texts(stop_strings):
                raise MalformedAnswer("a stop string is not a string")
            if max_new_tokens is not None and (isinstance(max_new_tokens, bool) or max_new_tokens < 1):
                raise MalformedAnswer("max_new_tokens is not a number of tokens")
            if not _has_texts(info):
                raise MalformedAnswer("every key of `info` must be a string")
            stops = None if stop_strings is None else tuple(stop_strings)
            result = StepResult(
                reward,
                done,
                tuple(observation),
                stop_strings=stops,
                info=info,
                max_new_tokens=max_new_tokens,
                agent=agent,
                next_agent=next_agent,
                agent_rewards=agent_rewards,
            )
            return Answer(result, has_state, retry, out_of_memory, saved)
    raise MalformedAnswer("an answer has unexpected fields")


def _check_reward(reward: Any) -> None:
    named = reward if isinstance(reward, dict) else {"reward": reward}
    if not _has_texts(named) or not all(isinstance(v, float) and math.isfinite(v) for v in named.values()):
        raise MalformedAnswer("a reward is not a finite number")


def _has_texts(names: Any) -> bool:
    return all(isinstance(name, str) for name in names)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_extend, strict_types=True, unicode_errors="surrogatepass")
    return packed


def _extend(value: Any) -> msgpack.ExtType:
    match value:
        case tuple():
            return msgpack.ExtType(_TUPLE, _pack(list(value)))
        case int():
            size = value.bit_length() // 8 + 1
            return msgpack.ExtType(_INTEGER, value.to_bytes(size, "little", signed=True))
        case np.ndarray():
            return msgpack.ExtType(_ARRAY, _pack([value.dtype.str, list(value.shape), value.tobytes()]))
    raise TypeError(f"{type(value).__qualname__} is not a plain value")


def _unpack(data: bytes) -> Any:
    """Plain values from bytes that may be anything."""
    try:
        value = _Reader().unpack(data)
    except MalformedAnswer:
        raise
    # whatever msgpack, numpy or Python object to
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise MalformedAnswer(f"{type(error).__name__}: {error}") from None
    _check_plain(value, 0)
    return value


class _Reader:
    """Unpacks extended types, which may hold one another to a bounded depth."""

    def __init__(self) -> None:
        self._depth = 0

    def unpack(self, data: bytes) -> Any:
        return msgpack.unpackb(data, ext_hook=self._extension, strict_map_key=False, unicode_errors="surrogatepass")

    def _extension(self, code: int, data: bytes) -> Any:
        if self._depth > MAX_NESTING:
            raise MalformedAnswer("nested too deep")
        self._depth += 1
        try:
            if code == _INTEGER and len(data) <= MAX_INTEGER_BITS // 8 + 1:
                return int.from_bytes(data, "little", signed=True)
            if code == _TUPLE and isinstance(items := self.unpack(data), list):
                return tuple(items)
            if code == _ARRAY:
                match self.unpack(data):
                    case [str(kind), list(shape), bytes(values)]:
                        return _read_array(kind, shape, values)
            raise MalformedAnswer(f"extension {code} holds a value of another type")
        finally:
            self._depth -= 1


def _read_array(kind: str, shape: list[Any], values: bytes) -> np.ndarray:
    if not _ARRAY_TYPE.fullmatch(kind) or not all(type(size) is int and size >= 0 for size in shape):
        raise MalformedAnswer(f"an array of {kind[:20]!r} and shape {shape[:10]}")
    dtype = np.dtype(kind)
    if not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(values):
        raise MalformedAnswer("an array whose size does not match its shape")
    return np.frombuffer(values, dtype).reshape(shape).copy()


def _check_plain(value: Any, depth: int) -> None:
    """Raise `MalformedAnswer` for nesting that others could not walk, and for values of further types."""
    # the fields of an answer are a few containers around the values of its result
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
