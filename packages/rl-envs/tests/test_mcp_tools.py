"""The environment `mcp_tools`: a server by its settings, and answers after its tools' results."""

import pytest

pytest.importorskip("mcp")

from rl_core import Conversation, ToolCall
from rl_envs.calculations import CALL, facts, load
from rl_envs.mcp_tools.environment import MCPToolsEnvironment, check_machine
from rl_envs.mcp_tools.plugin import MCPToolsConfig

FILES = {"command": ["{python}", "-m", "rl_envs.mcp_tools.files"], "is_shared": True, "answer_format": "numeric"}


def turn(text="", calls=(), id="0"):
    return Conversation(id, (), {"answer": facts()[0]["text"]}, text, tool_calls=tuple(calls))


def test_a_policy_reads_a_file_and_answers():
    environment = MCPToolsEnvironment(MCPToolsConfig(**FILES))
    [tool] = environment.tools
    assert tool["function"]["name"] == "read_text_file"
    assert list(tool["function"]["parameters"]["properties"]) == ["path"]
    name, number = facts()[0]["title"], facts()[0]["text"]
    turns = [
        turn(calls=[ToolCall("read_text_file", {"path": name}, "a")], id="a"),
        turn(calls=[ToolCall("read_text_file", {"path": "../etc"}, "b")], id="b"),
    ]
    a, b = environment.step(turns, [None, None])
    assert a.observation[0]["content"] == number
    assert "Error executing tool read_text_file" in b.observation[0]["content"]
    ends = environment.step([turn(f"{number}", id="a"), turn("x", id="b")], [a.state, b.state])
    assert [end.reward for end in ends] == [1.0, 0.0]
    assert [end.info["accuracy"] for end in ends] == [1.0, 0.0]


def test_settings_that_start_no_server_are_reported():
    assert check_machine(MCPToolsConfig()) == "env.mcp_tools: an MCP server needs either a command or a url"
    assert "does not start" in check_machine(MCPToolsConfig(command=["{python}", "-c", "1"]))
    assert "`variables` are those of a command" in check_machine(MCPToolsConfig(url="http://h", variables={"A": "b"}))


def test_demonstrations_call_the_tool_or_guess():
    rows = load({"form": "file", "demonstrations": True, "size": 40}, "train")
    called = [row["messages"] for row in rows if len(row["messages"]) == 4]
    assert 10 < len(called) < 30
    for asked, call, result, answer in called:
        name = asked["content"].removesuffix("=")
        assert call["content"] == CALL % name
        assert result == {"role": "tool", "content": answer["content"]}
        assert answer["content"] == next(each["text"] for each in facts() if each["title"] == name)
    [row] = load({"form": "file", "size": 1}, "validation")
    assert row["environment"] == "mcp_tools"
    assert row["answer"].isdigit()
