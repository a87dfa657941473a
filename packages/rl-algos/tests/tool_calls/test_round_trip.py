"""Calls that a chat template writes are read as they were, whatever their strings hold."""

import random

import pytest
from offered_tools import FAMILIES, read, write

PIECES = [
    *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "<parameter=z>", "</parameter>"),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|start|>", "<|message|>", "<|channel|>final", "<|end|>", "<|call|>", "to=functions.add", "<think>", "</think>"),
    *(
        "```",
        "```json\n",
        "\n",
        "\n\n",
        " ",
        '"',
        "'",
        "\\",
        "\\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        ";",
        "null",
        "true",
        "3",
    ),
    *(
        '{"name": "add", "parameters": {"a": 2}}',
        '{"name": "add", "arguments": {"a": 2}}',
        "é",
        "世界",
        "🦕",
        "\u2028",
        "x",
    ),
]
"""Marks of all formats, what stands between them, and what JSON escapes."""
ONE_CALL = ("llama", "harmony")
"""Formats of one call a turn."""


def drawn_calls(draw, most):
    def text():
        return "".join(draw.choices(PIECES, k=draw.randint(0, 6)))

    def value(depth=0):
        kinds = [text, lambda: draw.randint(-9, 10**20), lambda: draw.choice([True, False, None, 0.5, -1e300])]
        if depth < 3:
            kinds += [
                lambda: [value(depth + 1) for _ in range(draw.randint(0, 3))],
                lambda: {text(): value(depth + 1) for _ in range(draw.randint(0, 3))},
            ]
        return draw.choice(kinds)()

    def call():
        possible = {
            "a": draw.randint(-9, 9),
            "note": text(),
            "of": [value()],
            "by": {text(): value()},
            "exact": draw.random() < 0.5,
            "share": draw.choice([0.25, 3, -1e300]),
        }
        return "add", {key: each for key, each in possible.items() if key == "a" or draw.random() < 0.6}

    return [call() for _ in range(draw.randint(1, most))]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_as_the_template_writes_them_or_are_malformed_and_never_others(name):
    """Formats of JSON leave nothing open. In the others, which escape nothing, a text may be malformed, and only calls
    that are written just alike may be taken for one another."""
    draw, num_read = random.Random(name), 0
    for _ in range(150):
        calls = drawn_calls(draw, most=1 if name in ONE_CALL else 3)
        text = write(name, calls)
        found = read(name, text, opened="<think>" if name == "qwen_coder" else "").calls
        same = [(call.name, call.arguments) for call in found] == calls
        if name not in ("qwen_coder", "glm"):
            assert same, text
        if not same and not all(call.error for call in found):
            assert found, text
            assert write(name, [(call.name, call.arguments) for call in found]) == text
        num_read += same
    assert num_read > 60


@pytest.mark.parametrize("name", FAMILIES)
def test_text_with_random_marks_is_read_without_an_exception(name):
    draw = random.Random(name)
    for _ in range(2000):
        text = "".join(draw.choices(PIECES, k=draw.randint(1, 12)))
        for opened in ("", "<think>"):
            for call in read(name, text, opened=opened).calls:
                assert call.name or call.error
                assert not (call.error and call.arguments)
