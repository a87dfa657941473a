import asyncio

import pytest

from rl_core.environments.tool_environment import MAX_RESULT, ToolEnvironment
from rl_core.rollouts.environment import Conversation, ToolCall

NUMBERS = {"one": 1, "two": 2}


def look_up(word: str, state: dict) -> int:
    """Look up the number of a word."""
    state.setdefault("seen", []).append(word)
    return NUMBERS[word]


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(0)
    return f"{seconds}"


def score(response, answer, state):
    return {"right": float(answer in response), "calls": len(state.get("seen", []))}


def environment(**kwargs):
    return ToolEnvironment([look_up, wait], score, **kwargs)


def said(text="", *calls, id="c", truncated=False):
    return Conversation(id, (), {"answer": "2"}, text, truncated, tool_calls=calls)


def call(name, error="", **arguments):
    return ToolCall(name, arguments, id="call00000", error=error)


def test_calls_are_answered_in_order_and_the_last_turn_is_rewarded():
    made = environment()
    [first] = made.step([said("", call("look_up", word="two"), call("wait", seconds=1))], [None])
    assert first.observation == (
        {"role": "tool", "name": "look_up", "content": "2", "tool_call_id": "call00000"},
        {"role": "tool", "name": "wait", "content": "1.0", "tool_call_id": "call00000"},
    )
    assert (first.done, first.rewards()) == (False, {"reward": 0.0})
    [last] = made.step([said("it is 2")], [first.state])
    assert (last.done, last.rewards()) == (True, {"right": 1.0, "calls": 1, "reward": 2.0})
    assert last.info == {"tool_calls": 2, "tool_errors": 0}


def test_conversations_have_states_of_their_own_in_one_call():
    made = environment()
    both = [said("", call("look_up", word=word), id=word) for word in ("one", "two")]
    states = [result.state for result in made.step(both, [None, None])]
    mixed = made.step([said("2", id="one"), said("", call("look_up", word="one"), id="two")], states)
    assert [result.done for result in mixed] == [True, False]
    [last] = made.step([said("no", id="two")], [mixed[1].state])
    assert [mixed[0].rewards()["calls"], last.rewards()["calls"]] == [1, 2]


@pytest.mark.parametrize(
    ("bad", "answer"),
    [
        (call("", error="it is not valid JSON"), "cannot be read: it is not valid JSON"),
        (call("lookup", word="two"), "no tool 'lookup'; the tools are look_up, wait"),
        (call("look_up", words="two"), "word: Field required"),
        (call("look_up", word="ten"), "KeyError: 'ten'"),
    ],
)
def test_a_call_that_fails_is_answered_with_the_reason(bad, answer):
    [result] = environment().step([said("", bad)], [None])
    assert answer in result.observation[0]["content"]
    assert result.observation[0]["content"].startswith("Error: ")
    assert (result.done, result.info) == (False, {"tool_calls": 1, "tool_errors": 1})


def test_what_a_policy_is_told_of_a_call_is_bounded_however_many_arguments_it_makes_up():
    names = {f"made_up_{number}_{'x' * 500}": number for number in range(1000)}
    [result] = environment().step([said("", ToolCall("look_up", {"word": "two", **names}))], [None])
    told = result.observation[0]["content"]
    assert "made_up_0" in told
    assert told.endswith("and 992 more")
    assert len(told) < 5000


def echo(code: int) -> str:
    """Return a character."""
    if code < 0:
        raise ValueError(chr(-code))
    return f"x{chr(code)}"


@pytest.mark.parametrize(("code", "told"), [(0xD83D, "x?"), (-0xD83D, "Error: ValueError: ?"), (0xE9, "xé")])
def test_half_of_a_surrogate_pair_that_a_tool_returns_does_not_reach_the_tokenizer(code, told):
    [result] = ToolEnvironment([echo], score).step([said("", call("echo", code=code))], [None])
    assert result.observation[0]["content"] == told


def test_a_turn_that_was_cut_off_is_scored_though_it_has_calls():
    [result] = environment().step([said("2", call("look_up", word="two"), truncated=True)], [None])
    assert (result.done, result.rewards()["right"]) == (True, 1.0)


def test_long_results_are_cut():
    def flood() -> str:
        """Flood."""
        return "x" * (2 * MAX_RESULT)

    [result] = ToolEnvironment([flood], score).step([said("", call("flood"))], [None])
    assert len(result.observation[0]["content"]) == MAX_RESULT


def test_text_next_to_images_is_cut_too():
    image = {"type": "image", "image": b"bytes"}

    def look() -> list:
        """Look."""
        return ["x" * MAX_RESULT, image, "\ud83d" * 10]

    [result] = ToolEnvironment([look], score).step([said("", call("look"))], [None])
    assert result.observation[0]["content"] == [
        {"type": "text", "text": "x" * MAX_RESULT},
        image,
        {"type": "text", "text": ""},
    ]


def test_a_state_may_begin_from_the_row():
    made = environment(start=lambda row: {"seen": [row["answer"]]})
    [result] = made.step([said("2")], [None])
    assert result.rewards()["calls"] == 1


def test_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="one name"):
        ToolEnvironment([look_up, look_up], score)


def test_schemas_are_those_of_the_tools():
    assert [tool["function"]["name"] for tool in environment().tools] == ["look_up", "wait"]
