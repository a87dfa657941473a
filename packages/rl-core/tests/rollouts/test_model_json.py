import json
import random

import pytest

from rl_core.rollouts.model_json import MAX_DEPTH, MalformedJson, read_model_json, read_model_json_at


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("", "no JSON value", id="nothing"),
        pytest.param(" \n", "no JSON value", id="white space"),
        pytest.param('{"a": 1', "not valid JSON", id="an object that is cut off"),
        pytest.param('{"a": "x', "Unterminated string", id="a string that is cut off"),
        pytest.param('{"a": "x\\', "not valid JSON", id="an escape that is cut off"),
        pytest.param("{'a': 1}", "not valid JSON", id="single quotes"),
        pytest.param('{"a": 1,}', "not valid JSON", id="a comma at the end"),
        pytest.param('{"a": "\\x"}', "Invalid \\escape", id="an unknown escape"),
        pytest.param('{"a": "\\u12"}', "Invalid \\uXXXX escape", id="half an escape"),
        pytest.param('{"a": "\n"}', "Invalid control character", id="a newline in a string"),
        pytest.param('{"a": 1} and', "text after the JSON value: 'and'", id="text after an object"),
        pytest.param("1 2", "text after the JSON value", id="two values"),
        pytest.param("[}", "not valid JSON", id="brackets that do not match"),
        pytest.param('{"a": NaN}', "NaN is not a number", id="NaN"),
        pytest.param("-Infinity", "-Infinity is not a number", id="Infinity"),
        pytest.param("1e999", "1e999 is too large", id="a float that would be infinite"),
        pytest.param("[" + "9" * 4301 + "]", "more than 4300 digits", id="an integer that Python does not read"),
        pytest.param('{"b": 1, "a": 1, "a": 2}', "the key 'a' twice", id="a key twice"),
        pytest.param('[{"a": {"b": 1, "b": 1}}]', "the key 'b' twice", id="a key twice, further in"),
        pytest.param('["\\ud83d"]', "half of a surrogate pair, \\ud83d", id="half a pair, escaped"),
        pytest.param('["\ude00"]', "half of a surrogate pair, \\ude00", id="half a pair, as it is"),
        pytest.param('{"\\uDE00": 1}', "half of a surrogate pair, \\ude00", id="half a pair in a key"),
        pytest.param("[" * 33 + "]" * 33, "nested more than 32 deep", id="a list one level too deep"),
        pytest.param('{"a":' * 33 + "1" + "}" * 33, "nested more than 32 deep", id="an object one level too deep"),
        pytest.param("[" * 200_000, "nested more than 32 deep", id="very deep"),
        pytest.param('[{"a":' * 100_000, "nested more than 32 deep", id="very deep, of both kinds"),
    ],
)
def test_what_is_not_json_within_bounds_is_refused_by_one_message(text, problem):
    with pytest.raises(MalformedJson) as raised:
        read_model_json(text)
    assert problem in str(raised.value)
    assert 0 <= raised.value.end <= len(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(' {"a": [1, 2.5, true, null, "x"]}\n', id="all kinds"),
        pytest.param('{"a": "[[[[{{{{\\"]]]"}', id="brackets and quotes in strings"),
        pytest.param('"' + "[" * 100 + '"', id="brackets in a string only"),
        pytest.param("[" * MAX_DEPTH + "]" * MAX_DEPTH, id="as deep as is allowed"),
        pytest.param('["\\ud83d\\ude00", "\\\\ud83d", "😀"]', id="whole pairs, and an escaped backslash"),
        pytest.param("[" + "9" * 4300 + "]", id="the longest integer"),
        pytest.param("-0", id="minus zero"),
    ],
)
def test_other_json_is_read_as_python_reads_it(text):
    assert read_model_json(text) == json.loads(text)


def test_a_value_ends_where_its_brackets_close():
    text = 'call {"a": "}"} [1] rest'
    value, end = read_model_json_at(text, 4)
    assert (value, text[end:]) == ({"a": "}"}, " [1] rest")
    value, end = read_model_json_at(text, end)
    assert (value, text[end:]) == ([1], " rest")


def test_a_reader_continues_where_a_value_could_not_be_read_further():
    text = '{"a": <end>'
    with pytest.raises(MalformedJson) as raised:
        read_model_json_at(text, 0)
    assert text[raised.value.end :] == "<end>"


def test_random_text_of_json_is_read_as_python_reads_it_or_refused():
    draw = random.Random(0)
    pieces = ["{", "}", "[", "]", '"', "\\", ":", ",", "1", "a", " ", "\\u00e9", "true", "<", '"a":', "{}"]
    for _ in range(20_000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 9)))
        try:
            expected = json.loads(text)
        except ValueError:
            with pytest.raises(MalformedJson):
                read_model_json(text)
            continue
        if '"a":' not in text:  # an object that may have a key twice
            assert read_model_json(text) == expected


@pytest.mark.parametrize(
    "unit", ["[]", "{", '"', '{"', '["\\"', '"",', "\\", "1", '"\\ud83d', "[[],", "a", " ", '{"\\"', '"\\\\']
)
def test_two_megabytes_of_one_mark_are_read_in_linear_time(unit):
    """Quadratic time would be minutes."""
    text = "[" + unit * (2_000_000 // len(unit))
    try:
        read_model_json(text)
    except MalformedJson:
        return
