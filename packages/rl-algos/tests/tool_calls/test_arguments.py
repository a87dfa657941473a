"""Arguments of calls: none is lost, and each has the type that the schema of its tool asks for."""

from typing import Literal

import pytest
from offered_tools import read
from pydantic import BaseModel, Field

from rl_algos.tool_calls.formats import typed
from rl_algos.tool_calls.parsed import schemas_of
from rl_core.environments.tool_environment import Tool

HERMES, LLAMA = "<tool_call>%s</tool_call>", "%s"


@pytest.mark.parametrize(
    ("name", "call", "problem"),
    [
        pytest.param(
            "hermes", '{"name": "add", "parameters": {"a": 5}}', "`parameters`",
            id="the key of Llama [ahwurm/localharness#104]",
        ),
        pytest.param("llama", '{"name": "add", "arguments": {"a": 5}}', "`arguments`", id="the key of Hermes"),
        pytest.param("hermes", '{"name": "add", "args": {"a": 5}}', "`args`", id="a short key"),
        pytest.param("hermes", '{"name": "add", "input": {"a": 5}}', "`input`", id="the key of Anthropic"),
        pytest.param("hermes", '{"name": "add", "a": 5}', "`a`", id="no key"),
        pytest.param("hermes", '{"name": "add", "Arguments": {"a": 5}}', "`Arguments`", id="another case"),
        pytest.param(
            "hermes", '{"name": "add", "arguments": {"a": 5}, "parameters": {"a": 6}}', "`parameters`", id="two keys"
        ),
        pytest.param(
            "hermes", '{"type": "function", "function": {"name": "add", "arguments": {"a": 5}}}', "its keys are `type`",
            id="nested, as in OpenAI's API",
        ),
        pytest.param("hermes", '{"function": "add", "arguments": {"a": 5}}', "text `name`", id="none given"),
        pytest.param("hermes", '{"name": ["add"], "arguments": {}}', "text `name`", id="a name that is a list"),
        pytest.param("hermes", '{"name": "add"}', "has no `arguments`; add requires a", id="none that it needs"),
        pytest.param("llama", '{"name": "add"}', "has no `parameters`; add requires a", id="none of Llama"),
        pytest.param("hermes", '{"name": "add", "arguments": null}', "must be a JSON object", id="null"),
        pytest.param("hermes", '{"name": "add", "arguments": [5]}', "must be a JSON object", id="a list"),
        pytest.param("hermes", '{"name": "add", "arguments": "5"}', "must be a JSON object", id="a text of a number"),
        pytest.param("hermes", '{"name": "add", "arguments": "\\"x\\""}', "must be a JSON object", id="a quoted text"),
        pytest.param("hermes", '{"name": "add", "arguments": "a=5"}', "must be a JSON object", id="a text"),
        pytest.param("hermes", '{"name": "add", "arguments": {"a": 1, "a": 2}}', "'a' twice", id="an argument twice"),
        pytest.param("hermes", "[1]", "text `name`", id="no object"),
        pytest.param(
            "hermes", '{"name": "add", "arguments": {"a": 1, "note": "x\ny"}}', "not valid JSON",
            id="a line end in a text [minpeter/ai-sdk-tool-call-middleware#298]",
        ),
        pytest.param(
            "hermes", '{"name": "add", "arguments": {"a": 1, "note": "so "x""}}', "not valid JSON",
            id="quotes in a text [minpeter/ai-sdk-tool-call-middleware#306]",
        ),
        pytest.param(
            "hermes", '{"name": "add", "arguments": {"a": 1, "note": "C:\\path"}}', "not valid JSON",
            id="a bad escape [NousResearch/hermes-agent#110436]",
        ),
    ],
)  # fmt: skip
def test_arguments_that_would_be_lost_are_an_error_that_names_their_key(name, call, problem):
    [found] = read(name, (HERMES if name == "hermes" else LLAMA) % call).calls
    assert problem in found.error
    assert not found.arguments


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        pytest.param(
            '{"name": "add", "arguments": "{\\"a\\": 5}"}',
            {"a": 5},
            id="a text of JSON, as in OpenAI's API [huggingface/smolagents#1003]",
        ),
        pytest.param('{"id": "x", "type": "function", "name": "add", "arguments": {"a": 5}}', {"a": 5}, id="an id"),
        pytest.param('{"arguments": {"a": 5}, "name": "add"}', {"a": 5}, id="another order"),
        pytest.param('{"name": "add", "arguments": {}}', {}, id="an empty object, which the tool answers"),
        pytest.param('{"name": "add", "arguments": {"b": 5}}', {"b": 5}, id="an unknown one, which the tool answers"),
        pytest.param('{"name": "now"}', {}, id="none that are required"),
    ],
)
def test_arguments_of_a_json_call_are_read(call, arguments):
    [found] = read("hermes", HERMES % call).calls
    assert (found.arguments, found.error) == (arguments, "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek", "<｜tool▁call▁begin｜>add<｜tool▁sep｜><｜tool▁call▁end｜>"),
        ("mistral", "[TOOL_CALLS]add[ARGS]"),
        ("harmony", "<|channel|>commentary to=functions.add<|message|>"),
    ],
)
def test_a_named_call_without_arguments_is_malformed_if_its_tool_requires_some(name, text):
    [call] = read(name, text).calls
    assert "requires a" in call.error
    [call] = read(name, text.replace("add", "now")).calls
    assert (call.name, call.arguments, call.error) == ("now", {}, "")


ROOT = {
    "$defs": {
        "Count": {"type": "integer"},
        "Point": {"properties": {"x": {"type": "number"}}, "type": "object"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Wide": {"anyOf": [{"$ref": "#/$defs/Wide"}, {"$ref": "#/$defs/Wide"}, {"type": "integer"}]},
    }
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        pytest.param({"type": "string"}, "3", "3", id="a text that looks like a number [antirez/ds4#1016]"),
        pytest.param({"type": "string"}, " x\n", " x\n", id="a text with white space"),
        pytest.param({"type": "string"}, '{"x": 1}', '{"x": 1}', id="a text of JSON [ai-dynamo/frontend-crates#215]"),
        pytest.param({"type": "string"}, "[1, 2]", "[1, 2]", id="a text of a list [ai-dynamo/frontend-crates#215]"),
        pytest.param({"type": "integer"}, "\n3 ", 3, id="a number with white space"),
        pytest.param({"type": "integer"}, "three", "three", id="a text in place of a number"),
        pytest.param({"type": "integer"}, "3.0", 3.0, id="an integer with a point"),
        pytest.param({"type": "integer"}, "3.5", "3.5", id="a fraction in place of an integer"),
        pytest.param({"type": "integer"}, "true", "true", id="a boolean in place of an integer"),
        pytest.param({"type": "integer"}, "9" * 5000, "9" * 5000, id="an integer that Python does not read"),
        pytest.param({"type": "number"}, "3", 3, id="a number without a point [antirez/ds4#569]"),
        pytest.param({"type": "number"}, "NaN", "NaN", id="NaN"),
        pytest.param({"type": "number"}, "1e999", "1e999", id="a number that would be infinite"),
        pytest.param({"type": "boolean"}, "True", True, id="a boolean of Python [Neroued/ninfer#138]"),
        pytest.param({"type": "boolean"}, "1", "1", id="a number in place of a boolean"),
        pytest.param({"type": "object"}, '{"x": 1}', {"x": 1}, id="an object"),
        pytest.param({"type": "array"}, "x", "x", id="a text in place of a list"),
        pytest.param({"type": ["integer", "null"]}, "3", 3, id="a list of types"),
        pytest.param({"type": ["integer", "null"]}, "null", None, id="null of a list of types"),
        pytest.param({"type": ["string", "null"]}, "null", None, id="null or a text"),
        pytest.param({"type": ["string", "null"]}, "NULL", "NULL", id="a text or null"),
        pytest.param({"type": ["string", "null"]}, '"x"', '"x"', id="a text with quotes"),
        pytest.param({"type": ["string", "integer"]}, "3", 3, id="a number or a text"),
        pytest.param({"type": ["string", "array"]}, "[1", "[1", id="a text that is no list"),
        pytest.param({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3, id="anyOf [vllm-project/vllm#37831]"),
        pytest.param(
            {"anyOf": [{"type": "array"}, {"type": "null"}]}, "[1]", [1], id="anyOf [sgl-project/sglang#30832]"
        ),
        pytest.param({"oneOf": [{"type": "string"}, {"type": "object"}]}, '{"x": 1}', {"x": 1}, id="oneOf"),
        pytest.param({"allOf": [{"type": "integer"}, {"minimum": 0}]}, "3", 3, id="allOf"),
        pytest.param({"allOf": [{"type": ["string", "integer"]}, {"type": "string"}]}, "3", "3", id="allOf of unions"),
        pytest.param({"type": "integer", "nullable": True}, "null", None, id="nullable"),
        pytest.param({"$ref": "#/$defs/Count"}, "3", 3, id="a reference"),
        pytest.param({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}, id="one in anyOf"),
        pytest.param({"$ref": "#/$defs/None"}, "3", "3", id="a reference to nothing"),
        pytest.param({"$ref": "http://x/y"}, "3", "3", id="a reference elsewhere"),
        pytest.param({"$ref": "#/$defs/Loop"}, "3", "3", id="a reference to itself"),
        pytest.param({"$ref": "#/$defs/Wide"}, "3", 3, id="a union of itself"),
        pytest.param({"enum": [1, 2]}, "2", 2, id="choices of numbers"),
        pytest.param({"enum": ["1", "2"]}, "2", "2", id="choices of texts"),
        pytest.param({"enum": ["1", 2]}, "1", "1", id="a choice as it stands"),
        pytest.param({"const": 3}, "3", 3, id="const"),
        pytest.param({"const": None}, "null", None, id="const null"),
        pytest.param({"items": {"type": "integer"}}, "[1]", [1], id="items without a type"),
        pytest.param({}, "3", "3", id="no type"),
        pytest.param(True, "3", "3", id="a schema that allows anything"),
        pytest.param(None, "3", "3", id="no schema"),
        pytest.param([{"type": "integer"}], "3", "3", id="a schema that is a list"),
        pytest.param({"type": {"a": 1}, "enum": 3, "anyOf": 1, "allOf": "x"}, "3", "3", id="values of no schema"),
        pytest.param({"type": [["integer"], None]}, "3", "3", id="types that are none"),
        pytest.param({"type": "Any"}, "3", "3", id="an unknown type"),
    ],
)
def test_a_text_is_read_as_its_schema_asks(schema, text, value):
    found = typed(text, schema, ROOT)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[" * 600 + "]" * 600, "nested more than 32 deep"),
        ('[{"x": 1, "x": 2}]', "'x' twice"),
        ("[1, 2", "not valid JSON"),
        ('["\\ud83d"]', "\\ud83d"),
    ],
)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("qwen_coder", "<tool_call><function=add><parameter=of>%s</parameter></function></tool_call>"),
        ("glm", "<tool_call>add<arg_key>of</arg_key><arg_value>%s</arg_value></tool_call>"),
    ],
)
def test_a_list_that_cannot_be_read_is_a_malformed_call_that_names_the_argument(name, call, value, problem):
    [found] = read(name, call % value).calls
    assert "'of'" in found.error
    assert problem in found.error


class Point(BaseModel):
    x: float


def tool(
    count: int | None = None,
    point: Point | None = None,
    mode: Literal["a", "b"] = "a",
    share: float | str = 0.5,
    tags: list[str] | None = None,
    even: bool = False,
    size: int = Field(default=1, ge=1),
) -> str:
    """Show what arrives."""
    return repr((count, point and point.x, mode, share, tags, even, size))


@pytest.mark.parametrize(
    ("written", "arrived"),
    [
        ({"count": "3"}, (3, None, "a", 0.5, None, False, 1)),
        ({"count": "null", "point": '{"x": 2}'}, (None, 2.0, "a", 0.5, None, False, 1)),
        ({"mode": "b", "share": "half"}, (None, None, "b", "half", None, False, 1)),
        ({"share": "0.25", "tags": '["x"]'}, (None, None, "a", 0.25, ["x"], False, 1)),
        ({"even": "true", "size": "4"}, (None, None, "a", 0.5, None, True, 4)),
    ],
)
@pytest.mark.parametrize("name", ["qwen_coder", "glm"])
def test_a_function_gets_what_was_written_as_text(name, written, arrived):
    made = Tool(tool)
    if name == "glm":
        body = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in written.items())
        text = f"<tool_call>tool{body}</tool_call>"
    else:
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
        text = f"<tool_call>\n<function=tool>\n{body}</function>\n</tool_call>"
    [call] = read(name, text, schemas_of([made.schema])).calls
    assert call.error == ""
    assert made.call(call.arguments, {}) == repr(arrived)


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        pytest.param(None, {"a": "1"}, id="none"),
        pytest.param([], {"a": "1"}, id="a list"),
        pytest.param({"properties": [{"name": "a"}]}, {"a": "1"}, id="properties that are a list"),
        pytest.param({"properties": {"a": None}, "required": "a"}, {"a": "1"}, id="an argument without a schema"),
        pytest.param({"allOf": [{"properties": {"a": {"type": "integer"}}}]}, {"a": 1}, id="properties in allOf"),
        pytest.param(
            {"$ref": "#/$defs/All", "$defs": {"All": {"properties": {"a": {"type": "integer"}}}}}, {"a": 1},
            id="a reference",
        ),
    ],
)  # fmt: skip
def test_schemas_of_any_form_are_taken(parameters, arguments):
    schemas = schemas_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    text = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    [call] = read("qwen_coder", text, schemas).calls
    assert (call.arguments, call.error) == (arguments, "")
