"""The far side of an `EnvironmentPool`: a process with an environment and the states of its conversations."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fcntl
import inspect
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_type_hints

from rl_core.environments import messages
from rl_core.environments.judge_link import AskedJudge, JudgeLink
from rl_core.environments.messages import LENGTH, MAX_STATE_BYTES, Answer, plain_result
from rl_core.environments.observed_images import with_kept_images
from rl_core.environments.reward_function import ConversationEnvironment, as_environment, plays_one
from rl_core.environments.rewards import RewardSum, SummedRewards
from rl_core.errors import InfrastructureFailed, WorkerError
from rl_core.rollouts.environment import (
    Conversation,
    Environment,
    EnvironmentFailure,
    Fault,
    MissingField,
    SavingEnvironment,
    StepResult,
    UnusableAnswer,
)
from rl_core.rollouts.judging import Judge
from rl_core.tracing.stacks import write_stacks_of_child
from rl_core.user_code import FromFile, calls_of, place_of, raised_at, resolve

if TYPE_CHECKING:
    from rl_core.config import Config

TRACEBACK_FRAMES = 6
"""Maximum number of calls of a traceback that are printed, from the environment's own on."""


class EnvironmentProcess:
    """An environment and the states of its conversations.

    Args:
        environment: Its name, for messages.
        built: The environment.
        memory: The memory limit in words, for messages.
        place: File and line of its source, for messages; empty if it is not known.
    """

    def __init__(
        self, environment: str, built: Environment, *, memory: str = "its memory limit", place: str = ""
    ) -> None:
        self._name = environment
        self._environment = built
        self._memory = memory
        self._place = f" ({place})" if place else ""
        self._saving = built if isinstance(built, SavingEnvironment) else None
        self._states: dict[str, Any] = {}
        self._printed: set[str] = set()

    @property
    def saves(self) -> bool:
        """Return whether the environment saves states."""
        return self._saving is not None

    def step(self, payloads: Sequence[bytes], saved: Mapping[int, bytes] | None = None) -> list[Answer]:
        """Make one batched call of the environment; an exception in it is everybody's answer.

        Args:
            payloads: Pickled conversations.
            saved: States to restore first, by the index of their conversation.
        """
        conversations: list[Conversation] = []
        states: list[Any] = [None] * len(payloads)
        out_of_memory = False
        fault: Fault = "process"
        try:
            conversations = [pickle.loads(payload) for payload in payloads]
            states = [self._states.get(conversation.id) for conversation in conversations]
            if saved:
                self._restore({conversations[index].id: data for index, data in saved.items()})
            given = [self._states.get(conversation.id) for conversation in conversations]
            results: Any = self._environment.step(conversations, given)
            allowed = (StepResult, EnvironmentFailure)
            if not isinstance(results, list) or not all(isinstance(result, allowed) for result in results):
                raise UnusableAnswer(f"step must return a list of StepResult, got {results!r:.80}")
            if len(results) != len(conversations):
                raise UnusableAnswer(f"step returned {len(results)} results for {len(conversations)} conversations")
            answers = [self._settle(c, result) for c, result in zip(conversations, results, strict=True)]
            return self._with_saved(conversations, answers)
        except MemoryError:
            # The answers are made below, when the frames that hold the memory are gone.
            out_of_memory, reason = True, f"environment {self._name} needed more than {self._memory}"
        except UnusableAnswer as error:
            fault = "signature" if isinstance(error, MissingField) else "answer"
            reason = self._unusable(error)
        except SystemExit as error:
            reason = f"environment {self._name} ended its process with {_describe(error)}; return a reward instead"
        except Exception as error:  # noqa: BLE001 - an environment's failure becomes a report
            fault = "process" if isinstance(error, InfrastructureFailed) else "raised"
            reason = f"environment {self._name} raised {_describe(error)}"
            frames = calls_of(error)
            at = f" {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            lines = [*traceback.format_list(frames[:TRACEBACK_FRAMES]), *traceback.format_exception_only(error)]
            title = f"environment {self._name} raised:"
            self._print_once(f"{type(error).__qualname__}{at}", title, *"".join(lines).splitlines())
        shared = f", in a call that {len(payloads)} conversations shared" if len(payloads) > 1 else ""
        failure = EnvironmentFailure(f"{reason}{shared}", fault)
        self.abandon([conversation.id for conversation in conversations])
        return [Answer(failure, retry=state is None or self.saves, out_of_memory=out_of_memory) for state in states]

    def abandon(self, ids: Sequence[str]) -> str | None:
        """Close the states of these conversations, and return what went wrong."""
        states = [state for id in ids if (state := self._states.pop(id, None)) is not None]
        try:
            if states:
                self._environment.close(states)
        except Exception as error:  # noqa: BLE001 - an environment's failure becomes a report
            return f"environment {self._name} raised {_describe(error)} while closing states"
        return None

    def close(self) -> None:
        """Close every state."""
        self.abandon(list(self._states))

    def _restore(self, saved: Mapping[str, bytes]) -> None:
        if self._saving is None:
            raise UnusableAnswer("it has saved states of an earlier run, and no method `restore`; define it again")
        restored = list(self._saving.restore(list(saved.values())))
        if len(restored) != len(saved):
            raise UnusableAnswer(f"restore returned {len(restored)} states for {len(saved)}")
        self._states |= zip(saved, restored, strict=True)

    def _with_saved(self, conversations: Sequence[Conversation], answers: list[Answer]) -> list[Answer]:
        """Return the answers with the saved states of conversations that continue."""
        continuing = [index for index, answer in enumerate(answers) if answer.has_state]
        if self._saving is None or not continuing:
            return answers
        saved = list(self._saving.save([self._states[conversations[index].id] for index in continuing]))
        if len(saved) != len(continuing):
            raise UnusableAnswer(f"save returned {len(saved)} values for {len(continuing)} states")
        for index, data in zip(continuing, saved, strict=True):
            if data is None:
                continue
            if not isinstance(data, bytes | bytearray):
                raise UnusableAnswer(
                    f"save returned {data!r:.80} for a state; return bytes, or None if it cannot be saved"
                )
            if len(data) <= MAX_STATE_BYTES:
                answers[index] = dataclasses.replace(answers[index], saved=bytes(data))
            else:
                self._print_once(
                    "size",
                    f"environment {self._name}: a saved state has {len(data) / 2**20:.1f} MiB and is not kept; the "
                    f"limit is {MAX_STATE_BYTES / 2**20:.0f} MiB. Save less, such as a seed and the actions so far",
                )
        return answers

    def _settle(self, conversation: Conversation, result: StepResult | EnvironmentFailure) -> Answer:
        if isinstance(result, EnvironmentFailure):
            is_new = conversation.id not in self._states
            self.abandon([conversation.id])
            failure = dataclasses.replace(result, reason=f"environment {self._name}: {result.reason}")
            return Answer(failure, retry=is_new or self.saves)
        state = result.state
        if state is not None:
            self._states[conversation.id] = state
        else:
            self._states.pop(conversation.id, None)
        try:
            # Images stay in the run's store: an answer with their bytes would travel as far as the driver.
            answer = plain_result(dataclasses.replace(result, observation=with_kept_images(result.observation)))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - an environment's failure becomes a report
            self.abandon([conversation.id])
            return Answer(EnvironmentFailure(self._unusable(error), "answer"))
        if result.done and state is not None:
            self.abandon([conversation.id])
        return Answer(answer, has_state=state is not None and not result.done)

    def _unusable(self, error: Exception) -> str:
        return f"environment {self._name}{self._place}: {error}"

    def _print_once(self, key: str, *lines: str) -> None:
        """Print lines to the log, unless lines with this key were printed before."""
        if key not in self._printed:
            self._printed.add(key)
            print(*lines, sep="\n", file=sys.stderr, flush=True)  # noqa: T201 - its output is the log


def serve(connection: socket.socket) -> None:
    """Build the environment, then answer messages until the other side closes the stream."""
    own = os.getpid()

    def read(size: int) -> bytes:
        # Nothing is read ahead, so that an event loop sees when there is more.
        parts = []
        while size and (part := connection.recv(min(size, 2**20), socket.MSG_WAITALL)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def receive() -> Any:
        header = read(LENGTH.size)
        return pickle.loads(read(*LENGTH.unpack(header))) if len(header) == LENGTH.size else None

    def reply(data: bytes) -> None:
        # Only the process that was asked may answer, not one that the environment has forked.
        if os.getpid() != own:
            said = f"environment {name}: a process that it forked returned from the call, and was ended"
            os.write(2, f"{said}. End it with os._exit\n".encode())
            os._exit(0)
        connection.sendall(LENGTH.pack(len(data)) + data)

    if (build := receive()) is None:
        return
    _, environment, config, name, memory, gives_scores = build
    link = JudgeLink(connection, receive, reply)
    try:
        asked = {each: AskedJudge(each, link, gives_scores=scores) for each, scores in gives_scores.items()}
        target, built = _load(environment, name, pickle.loads(config), asked)
        _saves(built, type(built).__name__)
    except MemoryError:
        problem = WorkerError("MemoryError", f"building the environment needed more than {memory}", "")
    except SystemExit as error:
        problem = WorkerError("SystemExit", f"the process was ended with {_describe(error)}", traceback.format_exc())
    except Exception as error:  # noqa: BLE001 - a worker's failure becomes a report
        problem = WorkerError(type(error).__qualname__, f"{error}{_at(error)}", traceback.format_exc())
    else:
        process = EnvironmentProcess(name, built, memory=memory, place=place_of(target))
        reply(messages.write_built(process.saves))
        while (message := receive()) is not None:
            match message:
                case "step", conversations, saved:
                    link.begin()
                    reply(messages.write_answers(process.step(conversations, saved)))
                case "abandon", ids:
                    reply(messages.write_problem(process.abandon(ids)))
                case ("verdict", *_):
                    # The function that asked has returned without it.
                    continue
                case _:
                    break
        process.close()
        return
    reply(messages.write_built(problem))


def _load(
    environment: str | FromFile | RewardSum | None,
    name: str,
    config: Config | None,
    judges: Mapping[str, Judge] | None = None,
) -> tuple[Any, Environment]:
    """Return the object that an environment is named by, and the environment."""
    if not isinstance(environment, RewardSum):
        target = resolve(environment) if isinstance(environment, str) else environment and environment.load()
        return target, _built(target, name, config, judges)
    inner = None if environment.environment is None else _load(environment.environment, name, config, judges)[1]
    parts = [(part.name, _load(part.function, part.name, None, judges)[1], part.weight) for part in environment.parts]
    return None, SummedRewards(inner, parts)


def _built(target: Any, name: str, config: Config | None, judges: Mapping[str, Judge] | None = None) -> Environment:
    """Build the environment of a class, a function that makes one, a function that scores, or the environment itself.

    Raises:
        ValueError: If the config has its own settings, which a function would never see.
    """
    if isinstance(target, type):
        if plays_one(target):
            saves = _saves(target, target.__name__)
            return ConversationEnvironment(partial(_made, target, config), target.__name__, saves=saves, judges=judges)
        built: Environment = _made(target, config)
        if _has_steps(built):
            return built
        if callable(built):  # It is a reward that keeps something between calls.
            return as_environment(built, judges)
        lacks = "it lacks the method `step` or `close`, or, as a reward, `__call__`"
        raise ValueError(f"{target.__name__} is not an environment: {lacks}")
    if _has_steps(target):
        environment: Environment = target
        return environment
    if config is not None:
        # This imports pydantic, which is imported already if there is a config.
        from rl_core.environments.config import EnvironmentConfig

        unseen = sorted(set(type(config).model_fields) - set(EnvironmentConfig.model_fields))
        if unseen:
            raise ValueError(
                f"{name} is a function and takes no settings, but its config has {', '.join(unseen)}; make it a class "
                "that is built as Class(config), or remove these settings"
            )
    kind = None
    with contextlib.suppress(NameError, TypeError):
        kind = get_type_hints(target).get("return")
    # A function that is annotated to return an environment makes one.
    made: Environment = target() if _has_steps(kind) else as_environment(target, judges)
    return made


def _made(kind: type, config: Config | None) -> Any:
    """Make an object of a class, which takes its settings as one object or by keyword."""
    parameters = inspect.signature(kind).parameters.values()
    takes_one = any(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    if config is None or (takes_one and not dataclasses.is_dataclass(kind)):
        return kind(config) if takes_one else kind()
    # This imports pydantic, which is imported already if there is a config.
    from rl_core.config import settings_of

    return kind(**settings_of(config))


def _has_steps(target: Any) -> bool:
    return all(callable(inspect.getattr_static(target, name, None)) for name in ("step", "close"))


def _saves(target: Any, name: str) -> bool:
    """Return whether an environment or a class of one saves states. Raises `ValueError` if half of it is missing."""
    missing = [each for each in ("save", "restore") if not callable(getattr(target, each, None))]
    if len(missing) == 1:
        raise ValueError(
            f"{name} has no method `{missing[0]}`; an environment that saves its states has `save` and `restore`, any "
            "other has neither"
        )
    return not missing


def main(connection: int, parent_pipe: int, memory_bytes: int) -> None:
    """Run the process.

    Args:
        connection: Descriptor of the stream to the pool.
        parent_pipe: Descriptor of a pipe whose other end the pool holds as long as it lives.
        memory_bytes: Memory limit of this process, and of each that it starts, in bytes; 0 for no limit.
    """
    # The kernel ends this process by SIGIO as soon as nobody holds the other end of the pipe, so neither a hanging
    # environment nor one that holds the interpreter's lock outlives its parent. PR_SET_PDEATHSIG would follow the
    # thread that started the process instead.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(parent_pipe, 0)
    if poll.poll(0):
        sys.exit(1)
    # RLIMIT_DATA counts memory that was allocated, and not, as RLIMIT_AS, the address space that libraries reserve:
    # importing torch reserves 3 GiB, allocates 0.7 GiB and touches 0.5 GiB. No core files are written.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, limit = resource.getrlimit(resource.RLIMIT_DATA)
    if memory_bytes and (limit == resource.RLIM_INFINITY or memory_bytes < limit):
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    faulthandler.enable()
    # By this signal the pool asks where this process hangs: it writes its stacks and ends.
    faulthandler.register(messages.STACKS, all_threads=True, chain=True)
    write_stacks_of_child("process")
    with socket.socket(fileno=connection) as stream, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        serve(stream)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{_at(error)}"


def _at(error: BaseException) -> str:
    where = raised_at(error)
    return f" (at {where})" if where else ""
