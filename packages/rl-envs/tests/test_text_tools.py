"""The environment `text_tools`: a calculator, Python and a search, called by tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from pydantic import ValidationError

from rl_core.config import Config
from rl_core.environments.instance import instance_of, tools_of
from rl_core.errors import DataError, InfrastructureFailed
from rl_core.rollouts.environment import Conversation, StepResult, ToolCall
from rl_core.testing.environment import EnvironmentSuite
from rl_envs.calculations import facts
from rl_envs.sandbox.program import Limits
from rl_envs.sandbox.sandbox import Sandbox, SandboxUnavailable
from rl_envs.sandbox.session import Session
from rl_envs.text_tools.calculator import calculate
from rl_envs.text_tools.environment import MAX_ANSWER, Corpus, RetrievalServer, TextToolsEnvironment
from rl_envs.text_tools.plugin import PLUGIN, TextToolsConfig

LONG_S = 120.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    for isolation in ("namespaces", "landlock"):
        try:
            with Sandbox(isolation, limits=Limits(cpu_s=30.0, wall_s=600.0)) as opened:
                yield opened
            return
        except SandboxUnavailable:
            continue
    pytest.skip("this machine offers no sandbox")


def _turn(completion: str, answer: Any = "84", id: str = "0") -> Conversation:
    return Conversation(id=id, messages=(), info={"answer": answer}, completion=completion)


def _play(environment: TextToolsEnvironment, completions: list[str]) -> list[StepResult]:
    results: list[StepResult] = []
    for completion in completions:
        results += environment.step([_turn(completion)], [results[-1].state if results else None])
    return results


def _said(result: StepResult) -> str:
    return str(result.observation[0]["content"])


class TestConformance(EnvironmentSuite):
    def environment(self) -> TextToolsEnvironment:
        return TextToolsEnvironment(TextToolsConfig())

    def conversations(self) -> list[Conversation]:
        return [_turn(text, id=text) for text in ("<calculator>12*7</calculator>", "84", "<calculator>1/0")]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 * 7", "84"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("2 ^ 10", "1024"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("-(3 - 5) % 3", "2"),
        ("gcd(12, 18) + sqrt(16)", "10"),
        ("round(10 / 3, 2)", "3.33"),
        ("round(1250, -2)", "1200"),
        ("round(5, -10**10)", "0"),
        ("10 ** 30", "1" + "0" * 30),
        ("1 / 0", "error: division by zero"),
        ("9 ** 9 ** 9", "error: the number is too large"),
        ("(-1) ** 0.5", "error: the result is not a real number"),
        ("1 +", "error: invalid syntax"),
    ],
)
def test_arithmetic_is_computed(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "open('/etc/passwd')", "(1).real", "[1]", "'a' * 9", "x", "True", "sqrt", "f(1)", "1" * 3000],
)
def test_what_is_not_arithmetic_is_refused(expression: str) -> None:
    assert calculate(expression).startswith("error:")


def test_a_call_is_answered_and_the_final_answer_scored() -> None:
    first, second = _play(TextToolsEnvironment(TextToolsConfig()), ["I use <calculator>12*7", "The answer is 84"])
    assert _said(first) == "<result>\n84\n</result>"
    assert first.stop_strings == ("</calculator>",)
    assert (first.done, second.done) == (False, True)
    assert second.rewards()["reward"] == 1.0
    assert second.info == {"accuracy": 1.0, "calls": 1}


def test_calls_come_to_an_end() -> None:
    environment = TextToolsEnvironment(TextToolsConfig(max_calls=1))
    results = _play(environment, ["<calculator>84</calculator>"] * 2)
    assert [result.done for result in results] == [False, True]
    assert results[-1].rewards()["reward"] == 0.0


def test_long_output_is_shortened_in_its_middle(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "word " * 1000}))
    config = TextToolsConfig(tools=["search"], corpus=str(corpus), max_output=100)
    [result] = _play(TextToolsEnvironment(config), ["<search>word</search>"])
    assert "characters left out" in _said(result)
    assert len(_said(result)) < 200


def test_the_best_documents_are_found_first(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    documents = [
        {"title": "Paris", "text": "The capital of France lies on the Seine."},
        {"title": "Rome", "text": "The capital of Italy."},
        {"text": "Bread is baked."},
    ]
    file.write_text("\n".join(map(json.dumps, documents)) + "\n\n")
    corpus = Corpus(file)
    assert corpus.num_documents == 3
    assert [title for title, _ in corpus.search('the "capital" of France?', 2)] == ["Paris", "Rome"]
    assert corpus.search("baking OR NOT (", 3)[0][1] == "Bread is baked."
    assert corpus.search("?", 3) == []
    assert corpus.search("zebra", 3) == []


def test_a_function_gives_the_documents_of_a_corpus() -> None:
    corpus = Corpus("rl_envs.calculations:facts")
    [(title, number)] = corpus.search("bab", 1)
    assert title == "bab"
    assert {"title": title, "text": number} in facts()
    assert corpus.num_documents == len(facts()) == 720


HOSTILE = {
    "nothing": b"{}",
    "no JSON": b"{",
    "deep": b"[" * 200_000,
    "huge": b"[" + b" " * MAX_ANSWER + b"]",
    "no list": b'{"result": [5]}',
    "no document": b'{"result": [[5]]}',
    "no text": b'{"result": [[{"text": 5}]]}',
}


@pytest.fixture
def retrieval_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server with the answers of Search-R1's, and the requests that it got."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            found = [{"document": {"contents": '"Paris"\nThe capital of France.'}, "score": 1.0}, {"text": "Bread."}]
            [query] = asked[-1]["queries"]
            body = HOSTILE.get(query, json.dumps({"result": [found]}).encode())
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/retrieve", asked
        server.shutdown()


def test_a_retrieval_server_answers_searches(retrieval_server: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = retrieval_server
    config = TextToolsConfig(tools=["search"], corpus=url, num_results=2, result_tag="information")
    [result] = _play(TextToolsEnvironment(config), ["<think>Hm</think><search> capital of France </search>"])
    assert asked == [{"queries": ["capital of France"], "topk": 2, "return_scores": False}]
    assert _said(result) == "<information>\nParis\nThe capital of France.\n\nBread.\n</information>"


@pytest.mark.parametrize("query", HOSTILE)
def test_a_hostile_retrieval_server_fails_the_search(
    retrieval_server: tuple[str, list[dict[str, Any]]], query: str
) -> None:
    with pytest.raises(InfrastructureFailed, match=r"^the retrieval server 127.0.0.1:\d+ has no answer") as found:
        RetrievalServer(f"{retrieval_server[0]}?key=secret").search(query, 3)
    assert len(str(found.value)) < 500
    assert "secret" not in str(found.value)


@pytest.mark.parametrize(("text", "says"), [("{}", ":1: a document"), ("[", ":1:"), ("", "no documents")])
def test_a_corpus_that_cannot_be_read_is_an_error(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(text)
    with pytest.raises(DataError, match=says):
        Corpus(file)
    with pytest.raises(DataError, match="cannot be read"):
        Corpus(tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tools": ["search"]}, "corpus"),
        ({"tools": []}, "at least one"),
        ({"tools": ["python"], "sandbox": {"url": "http://x"}}, "sandbox.url"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TextToolsConfig.model_validate(settings)


def test_variables_of_a_session_live_from_call_to_call(sandbox: Sandbox) -> None:
    with closing(Session(sandbox)) as session, closing(Session(sandbox)) as other:
        assert session.execute("x = 20\nx + 1", timeout_s=LONG_S) == "21\n"
        assert session.execute("print('x is', x)", timeout_s=LONG_S) == "x is 20\n"
        assert "NameError" in other.execute("x", timeout_s=LONG_S)
        assert session.execute("def f(:", timeout_s=LONG_S).rstrip().endswith("SyntaxError: invalid syntax")
        assert "EOFError" in session.execute("input()", timeout_s=LONG_S)
        assert session.execute("x * 2", timeout_s=LONG_S) == "40\n"


def test_a_call_that_takes_too_long_ends_its_session(sandbox: Sandbox) -> None:
    with closing(Session(sandbox)) as session:
        assert session.execute("1", timeout_s=LONG_S) == "1\n"
        assert "took longer than 0.5 s" in session.execute("while True: pass", timeout_s=0.5)
        assert "took longer" in session.execute("1", timeout_s=LONG_S)


@pytest.mark.parametrize(
    ("code", "says"), [("import os; os._exit(3)", "exit code 3"), ("x = 'a' * 5_000_000\nx", "wrote more than")]
)
def test_a_session_tells_how_it_ended(sandbox: Sandbox, code: str, says: str) -> None:
    with closing(Session(sandbox)) as session:
        assert says in session.execute(code, timeout_s=LONG_S)


def test_python_is_a_tool(sandbox: Sandbox) -> None:
    config = TextToolsConfig.model_validate(
        {"tools": ["python", "calculator"], "sandbox": {"isolation": sandbox.isolation, "wall_s": LONG_S}}
    )
    environment = TextToolsEnvironment(config)
    completions = ["<python>\nx = 12\n</python>", "<python>x * 7</python>", "<calculator>1+1", r"\boxed{84}"]
    results = _play(environment, completions)
    assert [_said(result) for result in results[:3]] == [
        f"<result>\n{text}\n</result>" for text in ("(no output)", "84", "2")
    ]
    assert results[-1].rewards()["reward"] == 1.0
    unfinished = _play(environment, ["<python>1</python>"])
    environment.close([unfinished[-1].state])
    environment.close([unfinished[-1].state])


def _calling(*calls: ToolCall, completion: str = "", answer: Any = "84") -> Conversation:
    return Conversation("0", (), {"answer": answer}, completion, tool_calls=calls)


def _model_format(**settings: Any) -> TextToolsEnvironment:
    return TextToolsEnvironment(TextToolsConfig(call_format="model", **settings))


def test_calls_in_the_format_of_the_model_are_answered_one_by_one() -> None:
    environment = _model_format()
    calls = [ToolCall("calculator", {"expression": text}, f"call0000{i}") for i, text in enumerate(("12*7", "1/0"))]
    [result] = environment.step([_calling(*calls)], [None])
    assert [message["tool_call_id"] for message in result.observation] == ["call00000", "call00001"]
    first, second = (str(message["content"]) for message in result.observation)
    assert first == "84"
    assert second.startswith("error: ")
    assert {message["role"] for message in result.observation} == {"tool"}
    assert (result.done, result.stop_strings) == (False, None)
    [final] = environment.step([_calling(completion="The answer is 84.")], [result.state])
    assert (final.done, final.rewards()["reward"], final.info["calls"]) == (True, 1.0, 2)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (ToolCall("", {}, error="not valid JSON"), "cannot be read: not valid JSON"),
        (ToolCall("python", {"code": "1"}), "there is no tool 'python'; the tools are calculator"),
        (ToolCall("calculator", {"text": "1"}), "takes one text, as 'expression'"),
        (ToolCall("calculator", {"expression": 1}), "takes one text, as 'expression'"),
        (ToolCall("calculator", {"expression": "1", "precision": "2"}), "takes one text, as 'expression'"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_its_error(call: ToolCall, says: str) -> None:
    [result] = _model_format().step([_calling(call)], [None])
    assert not result.done
    assert says in _said(result)


def test_calls_beyond_the_limit_are_refused_and_another_turn_of_calls_ends_the_rollout() -> None:
    environment = _model_format(max_calls=1)
    call = ToolCall("calculator", {"expression": "1+1"})
    [result] = environment.step([_calling(call, call)], [None])
    assert [message["content"] for message in result.observation] == ["2", "error: the limit of 1 calls is reached"]
    [final] = environment.step([_calling(call, completion="84")], [result.state])
    assert (final.done, final.rewards()["reward"]) == (True, 0.0)


def test_tags_are_plain_text_in_the_format_of_the_model_and_calls_are_none_with_tags() -> None:
    [plain] = _model_format().step([_calling(completion="<calculator>84</calculator>", answer="84")], [None])
    assert plain.done
    call = ToolCall("calculator", {"expression": "1+1"})
    [tagged] = TextToolsEnvironment(TextToolsConfig()).step([_calling(call, completion="84")], [None])
    assert (tagged.done, tagged.rewards()["reward"]) == (True, 1.0)


@pytest.mark.parametrize(
    ("completion", "truncated", "done"),
    [
        pytest.param("<calculator>12*7</calculator>", False, False, id="a call"),
        pytest.param("<calculator>12*7", False, False, id="a call that its stop string ended"),
        pytest.param("<think>Hm. <calculator>12*7</calculator>", False, False, id="a call that ends its thoughts"),
        pytest.param("<think><calculator>12*7</calculator>No.</think>84", False, True, id="one in thoughts that end"),
        pytest.param("<think><calculator>12*7</calculator>No.</think>", False, True, id="one in thoughts without more"),
        pytest.param("<calculator>12*7", True, True, id="a call that the token limit cut off"),
        pytest.param("<calculator>12*7</calculator> is", True, False, id="a call before the cut"),
    ],
)
def test_a_call_by_tags_that_was_cut_off_is_not_made(completion: str, truncated: bool, done: bool) -> None:
    turn = Conversation("c", (), {"answer": "84"}, completion, truncated)
    [result] = TextToolsEnvironment(TextToolsConfig()).step([turn], [None])
    assert result.done == done


def test_the_chat_template_is_given_the_tools_only_in_the_format_of_the_model() -> None:
    def tools(**settings: Any) -> list[str]:
        kind = type("Environments", (Config,), {"__annotations__": {"text_tools": TextToolsConfig}})
        found = tools_of(instance_of(kind(text_tools=TextToolsConfig(**settings)), PLUGIN.name))
        return [tool["function"]["name"] for tool in found]

    assert tools() == []
    assert tools(call_format="model", tools=["python", "calculator"]) == ["python", "calculator"]


def test_a_session_is_restored_from_its_calls(sandbox: Sandbox) -> None:
    def play(session: Session, *calls: str) -> list[str]:
        return [session.execute(code, timeout_s=LONG_S) for code in calls]

    begin = (
        "import random\nx = [random.random()]",
        "def f():\n    x.append(len(x))\n    return hash('word'), x",
        "f()",
    )
    rest = ("f()", "random.random()", "1 / 0", "x")
    with closing(Session(sandbox, seed=5)) as whole:
        expected = play(whole, *begin, *rest)
    with closing(Session(sandbox, seed=5)) as session:
        assert play(session, *begin) == expected[:3]
        saved = session.save()
    assert saved is not None
    with closing(Session.restore(sandbox, saved)) as restored:
        assert restored.save() == saved
        assert play(restored, *rest) == expected[3:]
    with closing(Session(sandbox, seed=6)) as other:
        assert play(other, *begin, *rest)[4] != expected[4]


def test_a_session_that_ended_is_restored_as_ended(sandbox: Sandbox) -> None:
    with closing(Session(sandbox)) as session:
        said = session.execute("import os\nos._exit(3)", timeout_s=LONG_S)
        saved = session.save()
    assert saved is not None
    with closing(Session.restore(sandbox, saved)) as restored:
        assert restored.execute("1", timeout_s=LONG_S) == said


def test_a_session_with_too_much_code_is_not_saved(sandbox: Sandbox) -> None:
    with closing(Session(sandbox)) as session:
        session.execute(f"x = {'a' * 2**20!r}", timeout_s=LONG_S)
        assert session.save() is None


def test_a_conversation_with_python_resumes_elsewhere(sandbox: Sandbox) -> None:
    config = TextToolsConfig.model_validate({"tools": ["python"], "sandbox": {"isolation": sandbox.isolation}})
    first, other = TextToolsEnvironment(config), TextToolsEnvironment(config)
    [result] = first.step([_turn("<python>y = 4</python>")], [None])
    [saved] = first.save([result.state])
    first.close([result.state])
    assert saved is not None
    states = other.restore([saved])
    [result] = other.step([_turn("<python>y * 21</python>")], states)
    assert _said(result) == "<result>\n84\n</result>"
    assert result.info == {"calls": 2}
    other.close([result.state])
