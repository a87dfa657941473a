"""The dataset `calculations`: its rows in the environments that score them, and its demonstrations."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rl_core.errors import DataError
from rl_core.rollouts.environment import Conversation, StepResult
from rl_envs.calculations import load
from rl_envs.code.cases import InputOutput, read_tests
from rl_envs.code.environment import program_in
from rl_envs.text_tools.environment import TextToolsEnvironment
from rl_envs.text_tools.plugin import TextToolsConfig

SPLITS = ("train", "validation")


def _question(row: dict[str, Any]) -> tuple[int, int]:
    a, b = re.fullmatch(r"(\d+)\*(\d+)=", row["messages"][0]["content"]).groups()  # type: ignore[union-attr]
    return int(a), int(b)


def _play(row: dict[str, Any], completions: list[str]) -> list[StepResult]:
    environment, results = TextToolsEnvironment(TextToolsConfig(answer_format="numeric")), list[StepResult]()
    for completion in completions:
        turn = Conversation("0", (), {"answer": row["answer"]}, completion)
        results += environment.step([turn], [results[-1].state if results else None])
    return results


def test_a_calculator_answers_every_row() -> None:
    for row in load({"size": 20}, "train"):
        a, b = _question(row)
        called, answered = _play(row, [f"<calculator>{a}*{b}</calculator>", str(a * b)])
        assert called.observation[0]["content"] == f"<result>\n{a * b}\n</result>"
        assert answered.rewards()["reward"] == 1.0
        assert row["environment"] == "text_tools"


def test_a_search_finds_the_number_of_every_name() -> None:
    config = TextToolsConfig(tools=["search"], corpus="rl_envs.calculations:facts", num_results=1)
    environment = TextToolsEnvironment(config)
    names = {split: {row["messages"][0]["content"] for row in load({"form": "search"}, split)} for split in SPLITS}
    assert len(names["train"]) > 400
    assert len(names["validation"]) > 40
    assert not names["train"] & names["validation"]
    for row in load({"form": "search", "size": 20, "demonstrations": True}, "validation"):
        name = row["messages"][0]["content"].removesuffix("=")
        turn = Conversation("0", (), {"answer": "0"}, f"<search>{name}</search>")
        [found] = environment.step([turn], [None])
        if len(row["messages"]) == 4:
            assert found.observation[0]["content"] == row["messages"][2]["content"]
            assert row["messages"][2]["content"] == f"<result>\n{name}\n{row['messages'][3]['content']}\n</result>"


def test_the_test_of_a_program_is_the_product() -> None:
    for row in load({"size": 20, "form": "program"}, "train"):
        a, b = _question(row)
        assert read_tests(row["info"], None) == InputOutput((("", f"{a * b}\n"),))
        assert row["environment"] == "code"


def test_half_of_the_demonstrations_of_a_calculator_call_it_as_it_answers() -> None:
    rows = load({"size": 200, "demonstrations": True}, "train")
    calling = [row for row in rows if len(row["messages"]) == 4]
    assert 70 <= len(calling) <= 130
    for row in calling:
        a, b = _question(row)
        _, call, result, answer = (message["content"] for message in row["messages"])
        called, answered = _play({"answer": str(a * b)}, [call, answer])
        assert called.observation[0] == {"role": "user", "content": result}
        assert answered.rewards()["reward"] == 1.0
    assert {row["messages"][-1]["role"] for row in rows} == {"assistant"}


def test_half_of_the_demonstrations_of_programs_are_right() -> None:
    rows = load({"size": 200, "form": "program", "demonstrations": True}, "train")
    programs = [program_in(row["messages"][-1]["content"]) for row in rows]
    rights = ["print({}*{})\n".format(*_question(row)) for row in rows]
    sums = ["print({}+{})\n".format(*_question(row)) for row in rows]
    num_right = sum(program == right for program, right in zip(programs, rights, strict=True))
    assert 70 <= num_right <= 130
    assert all(program in pair for program, pair in zip(programs, zip(rights, sums, strict=True), strict=True))


def test_splits_share_no_pair_and_rows_follow_from_the_seed() -> None:
    settings = {"max_operand": 9, "size": 300}
    train, validation = (
        {tuple(sorted(_question(row))) for row in load(settings, split)} for split in ("train", "validation")
    )
    assert train
    assert validation
    assert not train & validation
    assert load(settings, "train") == load(settings, "train") != load({**settings, "seed": 1}, "train")


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="train and validation, got 'test'"):
        load({}, "test")
