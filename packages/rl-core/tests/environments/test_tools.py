import pytest

from rl_core.environments.tool_environment import MalformedCall, Tool, as_text, schemas


def look_up(word: str, *, times: int = 1, exact: bool | None = None, state: dict, row) -> str:
    """Look up a word
    in the list.

    It is case-sensitive.

    Args:
        word: that is looked up,
            as it is.
        times (int): to look.

    Returns:
        What was found.
    """
    state["seen"] = state.get("seen", 0) + times
    return f"{word} {times} {row['answer']}"


def test_a_schema_follows_from_signature_and_docstring():
    assert Tool(look_up).schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word in the list.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "that is looked up, as it is."},
                    "times": {"type": "integer", "default": 1, "description": "to look."},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None},
                },
                "required": ["word"],
            },
        },
    }


def test_a_tool_without_parameters_has_an_empty_schema():
    def now() -> str:
        """Tell the time."""
        return "12:00"

    assert Tool(now).schema["function"]["parameters"] == {"type": "object", "properties": {}}
    assert Tool(now).call({}, {}) == "12:00"


def test_a_parameter_may_be_called_title():
    def rename(title: str) -> str:
        """Rename a page."""
        return title

    assert Tool(rename).schema["function"]["parameters"]["properties"] == {"title": {"type": "string"}}


def test_a_call_gives_the_arguments_their_types_and_what_is_offered():
    state = {}
    offered = {"state": state, "row": {"answer": "yes"}}
    assert Tool(look_up).call({"word": "a", "times": "3"}, offered) == "a 3 yes"
    assert state == {"seen": 3}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "word: Field required"),
        ({"word": "a", "times": "three"}, "times: Input should be a valid integer"),
        ({"word": "a", "state": {}}, "state: Extra inputs are not permitted"),
    ],
)
def test_arguments_that_are_not_the_tool_s_are_malformed(arguments, problem):
    with pytest.raises(MalformedCall, match=problem):
        Tool(look_up).call(arguments, {"state": {}, "row": {}})


def undocumented(word: str) -> str:
    return word


def untyped(word) -> str:
    """Repeat."""
    return word


def variadic(*words: str) -> str:
    """Join."""
    return "".join(words)


@pytest.mark.parametrize(
    ("function", "problem"),
    [(undocumented, "docstring"), (untyped, "no type for word"), (variadic, "one by one"), (str, "must be a function")],
)
def test_a_function_that_cannot_be_a_tool_says_why(function, problem):
    with pytest.raises(ValueError, match=problem):
        Tool(function)


def test_schemas_are_taken_from_functions_and_as_they_are():
    given = {"type": "function", "function": {"name": "x"}}
    assert [each["function"]["name"] for each in schemas([look_up, given])] == ["look_up", "x"]
    with pytest.raises(ValueError, match="a list of functions"):
        schemas("look_up")


def test_results_that_are_not_texts_are_json():
    assert [as_text(each) for each in ("3", 3, {"é": [1]}, {1, 2}.__class__)][:3] == ["3", "3", '{"é": [1]}']
