"""Milliseconds to read hostile turns for tool calls, by format.

    uv run benchmarks/tool_call_parsing.py [--quick]

A turn repeats the marks of a format: each alone, without its last character, in turn with another one, and many after
as many others; at the beginning of a turn and within a call. Every format reads every turn. The slowest of each is
measured at three lengths, each twice the one before, in milliseconds of the processor: the least of five readings.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator

from measurement import surroundings, table

from rl_algos.tool_calls.formats import FORMATS
from rl_algos.tool_calls.parsed import Parser, schemas_of

TOOL = {
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["array", "null"]}}},
}
SCHEMAS = schemas_of([{"type": "function", "function": TOOL}])

MARKS = {
    "hermes": ("<tool_call>", "</tool_call>", "{", '{"', '\\"', "}"),
    "qwen_coder": ("<tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>"),
    "glm": ("<tool_call>f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function<｜tool▁sep｜>",
        "f\n```json\n{}\n```",
        "<｜tool▁call▁end｜>",
    ),
    "mistral": ("[TOOL_CALLS]", "f[ARGS]", "[CALL_ID]a", "[{", '"', "{}"),
    "llama": ("<|python_tag|>", '{"name": "f", "parameters": {}}', ";", '{"name": "', "["),
    "harmony": ("<|start|>", "to=functions.f", "<|channel|>final", "<|message|>", "{}", "<|end|>"),
}
THOUGHTS = ("<think>", "</think>")
CALLS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen_coder": ("<tool_call><function=f>", "</function></tool_call>"),
    "glm": ("<tool_call>f", "</tool_call>"),
}
"""By format, what stands around marks within a call."""


def turns(size: int) -> Iterator[tuple[str, str, str]]:
    """Yield the format whose marks a turn has, what it repeats, and the turn."""
    for name, marks in MARKS.items():
        units = {unit for mark in (*marks, *THOUGHTS) for unit in (mark, mark[:-1] or mark)}
        units |= {"".join(pair) for pair in itertools.permutations((*marks, *THOUGHTS), 2)}
        begin, end = CALLS.get(name, ("", ""))
        for unit in sorted(units):
            repeated = unit * (size // len(unit))
            yield name, unit, repeated
            yield name, f"{begin} {unit}".strip(), begin + repeated + end
        for first, last in itertools.permutations(marks, 2):
            half = size // 2
            yield name, f"{first} then {last}", first * (half // len(first)) + last * (half // len(last))


def milliseconds(parse: Parser, turn: str, repeats: int) -> float:
    """Return the least of several readings."""
    spent = []
    for _ in range(repeats):
        begin = time.process_time()
        parse(turn, SCHEMAS, "<think>")
        spent.append(time.process_time() - begin)
    return min(spent) * 1000


def slowest(name: str, length: int, repeats: int) -> list[str]:
    """Return the row of a format: the turn that takes the longest at the middle length."""
    parse = FORMATS[name].parse
    measured = [
        (milliseconds(parse, turn, 1), written, unit, index)
        for index, (written, unit, turn) in enumerate(turns(length))
    ]
    _, written, unit, index = max(measured)
    sizes = (length // 2, length, length * 2)
    spent = [milliseconds(parse, next(itertools.islice(turns(size), index, None))[2], repeats) for size in sizes]
    shown = unit.replace("\n", "\\n").replace("|", "\\|")
    return [
        name,
        str(len(measured)),
        f"{written}: `{shown}`",
        *(f"{each:.1f}" for each in spent),
        f"{spent[2] / spent[1]:.2f}",
    ]


def main() -> None:
    """Print the slowest turn of every format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short turns, once")
    parser.add_argument("--length", type=int, default=200_000, help="characters of the middle length")
    arguments = parser.parse_args()
    length = 2000 if arguments.quick else arguments.length
    rows = [slowest(name, length, 1 if arguments.quick else 5) for name in FORMATS]
    kilobytes = [f"ms at {each // 1000} kB" for each in (length // 2, length, length * 2)]
    head = ["format", "turns", "marks of the slowest turn", *kilobytes, "doubling"]
    sys.stdout.write(f"{surroundings('rl-algos', 'rl-core')}\n\n{table(head, rows)}\n")


if __name__ == "__main__":
    main()
