"""Hostile completions through every format of tool calls and every grader, in real environment processes.

    uv run --group cpu benchmarks/hostile_completions.py [--completions 10000] [--quick]

Every completion is read by every parser of tool calls, and scored by each grader in a process pool as a run has it,
eight at a time with an ordinary completion among them. Prints, for each, exceptions, time-outs (deadline 30 s),
neighbours whose score changed, and hostile completions that were paid.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_algos.tool_calls.formats import FORMATS
from rl_algos.tool_calls.parsed import schemas_of
from rl_core.environments.pool import EnvironmentPool
from rl_core.plugins import ENVIRONMENTS, plugin
from rl_core.rollouts.environment import Conversation, EnvironmentFailure

BATCH = 8
MARKS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "<arg_key>", "<arg_value>"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<|channel|>",
        "<|message|>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
    ),
    *("<think>", "</think>", r"\boxed{", "}", "{", "[", "(", ")", '"', "\\", "```python\n", "```", "~~~", "####"),
    *(
        "answer is ",
        "Answer: ",
        "(B)",
        "9^{9^{9",
        "!",
        "\\frac{",
        "\\sqrt{",
        "1,111",
        "x",
        " ",
        "\n",
        "\ud83d",
        "\0",
        "\u202e",
    ),
)


@dataclass(frozen=True)
class Grader:
    """An environment with its settings, a row, and an ordinary completion with its reward."""

    type: str
    settings: dict[str, Any]
    info: dict[str, Any]
    ordinary: str
    reward: float = 1.0


PROGRAM = "```python\nprint(2 * int(input()))\n```"
GRADERS = {
    "math (auto)": Grader("math", {}, {"answer": r"\sqrt{2}"}, r"\boxed{\sqrt{2}}"),
    "math (boxed)": Grader("math", {"answer_format": "boxed"}, {"answer": "x^2+1"}, r"\boxed{1+x^2}"),
    "math (plain)": Grader("math", {"answer_format": "plain"}, {"answer": "7"}, "The answer is 7."),
    "math (numeric)": Grader("math", {"answer_format": "numeric"}, {"answer": "42"}, "it is 42"),
    "math (choice)": Grader("math", {"answer_format": "choice"}, {"answer": "B"}, "The answer is (B)."),
    "math (dapo)": Grader("math", {"answer_format": "dapo"}, {"answer": "12"}, "Answer: 12"),
    "multiple_choice": Grader("multiple_choice", {}, {"answer": "B"}, "It is B."),
    "match (exact)": Grader("match", {}, {"answer": "yes, indeed"}, "yes, indeed"),
    "match (regex)": Grader("match", {"mode": "regex"}, {"pattern": "(a+)+b"}, "aab"),
    "match (json)": Grader("match", {"mode": "json"}, {"answer": {"a": 1}}, '{"a": 1}'),
    "match (json_schema)": Grader("match", {"mode": "json_schema"}, {"schema": {"required": ["qq"]}}, '{"qq": 1}'),
    "instructions": Grader(
        "instructions", {}, {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}, '{"a": 1}'
    ),
    "text_tools": Grader("text_tools", {}, {"answer": "7"}, "The answer is 7."),
    "code": Grader("code", {}, {"tests": [{"input": "2\n", "output": "4\n"}]}, PROGRAM),
}


def completions(count: int, seed: int = 1) -> Iterator[str]:
    """Yield marks and characters at random; marks that are repeated to 20 kB, some to 200 kB; deep nesting; cut
    JSON."""
    rng = random.Random(seed)
    for index in range(count):
        kind = index % 10
        if kind < 6:
            yield "".join(rng.choice(MARKS) for _ in range(rng.randint(1, 60)))
        elif kind < 8:
            unit = "".join(rng.choice(MARKS) for _ in range(rng.randint(1, 3)))
            yield unit * ((200_000 if index % 500 == 7 else 5_000) // len(unit))
        elif kind == 8:
            depth, (left, right) = rng.randint(10, 3000), rng.choice(["()", "[]", "{}", ("<think>", "</think>")])
            yield rng.choice(["", r"\boxed{", "<tool_call>", "```python\n"]) + left * depth + "1" + right * depth
        else:
            yield "".join(
                chr(rng.choice([rng.randint(0, 127), rng.randint(0xD7F0, 0xE010), 0x1F996])) for _ in range(80)
            )


def read(count: int) -> None:
    """Read every completion with every format, in this process."""
    schema = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}}
    schemas = schemas_of([{"type": "function", "function": schema}])
    for name, found in FORMATS.items():
        exceptions, slowest = 0, 0.0
        for text in completions(count):
            started = time.process_time()
            try:
                found.parse(text, schemas, "")
            except Exception:  # noqa: BLE001 - what is counted
                exceptions += 1
            slowest = max(slowest, time.process_time() - started)
        print(f"| format {name} | {count} | {exceptions} | - | - | - | {slowest:.2f} |", flush=True)


async def score(name: str, grader: Grader, count: int) -> None:
    """Score every completion with one grader, eight at a time with an ordinary one."""
    found = plugin(ENVIRONMENTS, grader.type)
    config = found.config(**{**grader.settings, "num_workers": 2, "deadline_s": 30.0})
    pool = EnvironmentPool.of(found.environment, config, name=grader.type)
    failed = timed_out = harmed = paid = 0
    slowest = 0.0
    try:
        texts = list(completions(count))
        for first in range(0, len(texts), BATCH):
            batch = [*texts[first : first + BATCH], grader.ordinary]
            turns = [Conversation(f"{first}/{index}", (), grader.info, text) for index, text in enumerate(batch)]
            started = time.monotonic()
            *hostile, ordinary = await pool.step(turns)
            slowest = max(slowest, time.monotonic() - started)
            for outcome in hostile:
                if isinstance(outcome, EnvironmentFailure):
                    timed_out += outcome.fault == "deadline"
                    failed += outcome.fault != "deadline"
                else:
                    paid += outcome.rewards()["reward"] > 0
            harmed += isinstance(ordinary, EnvironmentFailure) or ordinary.rewards()["reward"] != grader.reward
    finally:
        await pool.close()
    print(f"| {name} | {count} | {failed} | {timed_out} | {harmed} | {paid} | {slowest:.2f} |", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--completions", type=int, default=10_000)
    arguments.add_argument("--code", type=int, default=1_000, help="completions of the grader that runs programs")
    arguments.add_argument("--quick", action="store_true")
    given = arguments.parse_args()
    count = 80 if given.quick else given.completions
    print("| through | completions | exceptions | time-outs | neighbours harmed | paid | slowest, s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    read(count)
    for name, grader in GRADERS.items():
        asyncio.run(score(name, grader, min(count, given.code) if grader.type == "code" else count))


if __name__ == "__main__":
    main()
