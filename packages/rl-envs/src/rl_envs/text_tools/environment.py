"""The environment `text_tools`, the corpus that it searches, and its check of the machine."""

from __future__ import annotations

import json
import re
import sqlite3
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rl_core import resolve
from rl_core.errors import DataError, InfrastructureFailed
from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.rollouts.rollout import Message
from rl_envs.math.extraction import extract, known_answers
from rl_envs.math.verdict import is_correct
from rl_envs.sandbox.remote import read_within
from rl_envs.sandbox.sandbox import Sandbox, machine_problem
from rl_envs.sandbox.session import Session
from rl_envs.text_tools.calculator import calculate
from rl_envs.text_tools.plugin import PARAMETERS, TextToolsConfig

_LIFETIME_S = 3600.0
"""Maximum number of seconds of a Python session; the settings limit each call."""


@dataclass(frozen=True)
class Progress:
    """A conversation in progress.

    Args:
        num_calls: Calls so far.
        session: Its Python; None before the first call.
    """

    num_calls: int = 0
    session: Session | None = None


class TextToolsEnvironment:
    """Answers the calls of a turn with the tools' output, and scores a turn without calls.

    If calls are tags, only the first call of a turn counts, and none that the token limit cut off.

    Raises:
        SandboxUnavailable: If Python is a tool and the machine does not offer its sandbox.
        DataError: If the corpus cannot be read.
    """

    def __init__(self, config: TextToolsConfig) -> None:
        self._config = config
        self._tagged = re.compile(rf"<({'|'.join(config.tools)})>(.*?)(?:</\1>|$)", re.DOTALL)
        limits = replace(config.sandbox.limits, wall_s=_LIFETIME_S)
        isolation, path = config.sandbox.isolation, config.sandbox.python_path
        self._sandbox = Sandbox(isolation, limits=limits, python_path=path) if "python" in config.tools else None
        self._corpus: Corpus | RetrievalServer | None = None
        if "search" in config.tools and config.corpus:
            is_server = config.corpus.startswith(("http://", "https://"))
            self._corpus = RetrievalServer(config.corpus) if is_server else Corpus(config.corpus)
        self.stop_strings: tuple[str, ...] | None = None
        if config.call_format == "tags":
            self.stop_strings = tuple(f"</{tool}>" for tool in config.tools)

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [self._turn(turn, state or Progress()) for turn, state in zip(conversations, states, strict=True)]

    def close(self, states: Sequence[Any]) -> None:
        for state in states:
            if state.session is not None:
                state.session.close()

    def save(self, states: Sequence[Progress]) -> list[bytes | None]:
        """Return the calls so far; Python calls run again in the session of the restored conversation."""
        saved: list[bytes | None] = []
        for state in states:
            session = None if state.session is None else state.session.save()
            # A session that cannot be saved makes the conversation impossible to save.
            is_lost = state.session is not None and not session
            text = json.dumps({"num_calls": state.num_calls, "session": session and session.decode()})
            saved.append(None if is_lost else text.encode())
        return saved

    def restore(self, saved: Sequence[bytes]) -> list[Progress]:
        """Return conversations as they were saved, each with a new session that has run their code."""
        restored = []
        for state in map(json.loads, saved):
            session = None
            if state["session"] is not None and self._sandbox is not None:
                session = Session.restore(self._sandbox, state["session"].encode())
            restored.append(Progress(state["num_calls"], session))
        return restored

    def _turn(self, turn: Conversation, progress: Progress) -> StepResult:
        known, kind = known_answers(turn.info, self._config.answer_format)
        calls = self._calls(turn)
        if not calls or progress.num_calls >= self._config.max_calls:
            self.close([progress])
            found = None if calls else extract(turn.final_text, kind)
            correct = found is not None and any(is_correct(found.text, answer, kind) for answer in known)
            return StepResult(reward=float(correct), info={"accuracy": float(correct), "calls": progress.num_calls})
        session = progress.session
        if session is None and self._sandbox is not None and any(call.name == "python" for call in calls):
            session = Session(self._sandbox, seed=turn.seed)
        limit, max_output, tag = self._config.max_calls, self._config.max_output, self._config.result_tag
        messages: list[Message] = []
        for number, call in enumerate(calls, progress.num_calls + 1):
            output = self._output(call, session) if number <= limit else f"error: the limit of {limit} calls is reached"
            if (num_left_out := len(output) - max_output) > 0:
                ends = output[: max_output // 2], output[len(output) - max_output // 2 :]
                output = f"{ends[0]}\n[{num_left_out} characters left out]\n{ends[1]}"
            if self._config.call_format == "model":
                messages.append({"role": "tool", "name": call.name, "content": output, "tool_call_id": call.id})
            else:
                messages.append({"role": "user", "content": f"<{tag}>\n{output}\n</{tag}>"})
        num_calls = progress.num_calls + len(calls)
        state, info = Progress(num_calls, session), {"calls": num_calls}
        return StepResult(
            done=False, observation=tuple(messages), state=state, stop_strings=self.stop_strings, info=info
        )

    def _calls(self, turn: Conversation) -> Sequence[ToolCall]:
        if self._config.call_format == "model":
            return () if turn.truncated else turn.tool_calls
        found = self._tagged.search(turn.final_text or turn.completion)
        # A stop string may have ended the turn at a call in thoughts, which do not end then.
        if found is not None and not turn.final_text and found.end() < len(turn.completion.rstrip()):
            return ()
        if found is None or (turn.truncated and not found[0].endswith(f"</{found[1]}>")):
            return ()
        name: Any = found[1]
        return (ToolCall(name, {PARAMETERS[name]: found[2].strip()}),)

    def _output(self, call: ToolCall, session: Session | None) -> str:
        name: Any = call.name
        if call.error:
            return f"error: the call cannot be read: {call.error}"
        if name not in self._config.tools:
            return f"error: there is no tool {name!r}; the tools are {', '.join(self._config.tools)}"
        parameter = PARAMETERS[name]
        text = call.arguments.get(parameter)
        if not isinstance(text, str) or len(call.arguments) != 1:
            got = ", ".join(each[:40] for each in list(call.arguments)[:4]) or "nothing"
            return f"error: {name} takes one text, as {parameter!r}; got {got}"
        match name:
            case "calculator":
                return calculate(text)
            case "python":
                assert session is not None
                return session.execute(text, timeout_s=self._config.sandbox.wall_s).rstrip() or "(no output)"
        assert self._corpus is not None
        found = self._corpus.search(text, self._config.num_results)
        return "\n\n".join(f"{title}\n{body}".strip() for title, body in found) or "nothing was found"


_WORD = re.compile(r"\w+")
MAX_WORDS = 32
"""Maximum number of words of a query that count."""
TIMEOUT_S = 60.0
"""Timeout in seconds of a request to a retrieval server."""
MAX_ANSWER = 4 * 2**20
"""Maximum number of bytes of an answer of a retrieval server."""


class Corpus:
    """Documents of a JSON Lines file or of a function, each with a `text` and perhaps a `title`, indexed in memory.

    Raises:
        DataError: If the file or a document cannot be read, naming the line.
    """

    def __init__(self, source: str | Path) -> None:
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        is_function = ":" in str(source) and not Path(source).exists()
        rows = resolve(str(source))() if is_function else _lines(Path(source))
        with self._index:
            documents = (_document(f"{source}:{number}", row) for number, row in enumerate(rows, 1) if row is not None)
            self._index.executemany("INSERT INTO documents VALUES (?, ?)", documents)
        [(self.num_documents,)] = self._index.execute("SELECT count(*) FROM documents")
        if not self.num_documents:
            raise DataError(f"the corpus {source} has no documents")

    def search(self, query: str, num_results: int) -> list[tuple[str, str]]:
        """Return title and text of the best documents, best first; any word of the query may be in them."""
        words = _WORD.findall(query)[:MAX_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        select = "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?"
        return [(title, text) for title, text in self._index.execute(select, (match, num_results))]


def _lines(path: Path) -> Iterator[Any]:
    """Yield the objects of a JSON Lines file, and None for an empty line."""
    try:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield json.loads(line) if line.strip() else None
                except ValueError:
                    yield line
    except OSError as error:
        raise DataError(f"the corpus {path} cannot be read: {error.strerror or error}") from None


def _document(place: str, row: Any) -> tuple[str, str]:
    """Return title and text of a document, which may be in its field `document`; `contents` has the title in its first
    line."""
    try:
        found = row.get("document", row)
        if "contents" in found:
            title, _, text = found["contents"].partition("\n")
            return title.strip('"'), text
        if not isinstance(found["text"], str):
            raise TypeError
        return str(found.get("title") or ""), found["text"]
    except (AttributeError, KeyError, TypeError):
        raise DataError(f"{place}: a document must be an object with `text`, got {row!r:.60}") from None


class RetrievalServer:
    """A server that finds documents, with the requests and answers of Search-R1's.

    Args:
        url: Address that takes `POST`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        # The path and the query of an address may hold a key.
        self._shown = f"the retrieval server {urlsplit(url).netloc.rpartition('@')[2]}"

    def search(self, query: str, num_results: int) -> list[tuple[str, str]]:
        """Return title and text of the documents, in the order of the server.

        Raises:
            InfrastructureFailed: If the server cannot be reached, or its answer has no documents.
        """
        body = json.dumps({"queries": [query], "topk": num_results, "return_scores": False}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                [found] = json.loads(read_within(answer, MAX_ANSWER, time.monotonic() + TIMEOUT_S))["result"]
            return [_document(self._shown, each) for each in found[:num_results]]
        except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError, DataError) as error:
            raise InfrastructureFailed(f"{self._shown} has no answer: {error!r:.300}") from None


def check_machine(config: TextToolsConfig) -> str:
    """Return why the tool `python` cannot run here, and what to do; an empty string if it can, or is not offered."""
    return machine_problem(config.sandbox) if "python" in config.tools else ""
