"""Agreement of a judge with labels of people, against closed forms."""

import asyncio
import json
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algos.judges.agreement import agreement, cohens_kappa, read_labels
from rl_algos.judges.answers import JudgeAnswer
from rl_algos.judges.config import GeneratorJudgeConfig
from rl_algos.judges.rubrics import Rubric
from rl_algos.judges.service import JudgeService
from rl_core.errors import DataError

GENERATOR = GeneratorJudgeConfig(kind="generator", model_name="policy")


def compared(rows, rubric, judge):
    """Compare a judge, a function from the responses of a question to the value of its verdict, with labels."""

    async def ask_engine(_, questions):
        answers = []
        for question in questions:
            user = question.messages[1]["content"]
            texts = re.findall(r"<response(?: \d+)? [0-9a-f]{16}>\n(.*?)\n</response", user, re.DOTALL)
            value = judge(*texts)
            answers.append(JudgeAnswer("?" if value is None else json.dumps({"reason": "", **value})))
        return answers

    async def run():
        async with JudgeService({"critic": GENERATOR}, ask_engine=ask_engine) as service:
            return await agreement(service, rubric, read_labels([json.dumps(row) for row in rows], "labels.jsonl"))

    return asyncio.run(run())


def pairs(*lengths):
    """Rows whose better response has the first length, and whose worse response has the second."""
    return [
        {"prompt": f"{number}", "chosen": "a" * better, "rejected": "b" * worse}
        for number, (better, worse) in enumerate(lengths)
    ]


def test_kappa_of_a_published_table():
    """Two readers of 50 proposals: 20 twice yes, 15 twice no, 5 and 10 once each; kappa is 0.4."""
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    found = cohens_kappa(first, second)
    assert found.value == pytest.approx(0.4)
    # The standard error for large samples is 0.13.
    assert (found.low, found.high) == pytest.approx((0.4 - 1.96 * 0.13, 0.4 + 1.96 * 0.13), abs=0.04)


ratings = st.integers(0, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(ratings, ratings), min_size=2, max_size=30))
def test_kappa_is_the_agreement_above_chance(rows):
    first, second = zip(*rows, strict=True)
    size, known = len(rows), {*first, *second}
    observed = Fraction(sum(one == other for one, other in rows), size)
    chance = sum(Fraction(first.count(each) * second.count(each), size**2) for each in known)
    found = cohens_kappa(first, second)
    if len(known) == 1:
        assert found is None
    else:
        assert found.value == pytest.approx(float((observed - chance) / (1 - chance)))
        assert found.low <= found.value + 1e-9
        assert found.value <= found.high + 1e-9


@pytest.mark.parametrize("form", ["number", "ranking", "pairwise"])
def test_a_judge_that_prefers_the_longer_response(form):
    def judge(*texts):
        if form == "number":
            return {"score": len(texts[0]) / 100}
        if form == "ranking":
            return {"ranks": [1 if len(text) == max(map(len, texts)) else 2 for text in texts]}
        return {"better": "1" if len(texts[0]) > len(texts[1]) else "2"}

    # People prefer the longer one in three of four.
    found = compared(pairs((5, 3), (9, 2), (4, 3), (2, 7)), Rubric("critic", form=form), judge)
    assert (found.num_rows, found.num_failed) == (4, 0)
    assert found.accuracy.value == 0.75
    assert found.kappa.value == 0.5  # (3/4 - 1/2) / (1 - 1/2)
    assert found.length_bias.value == 0.25
    orders = None if form == "number" else 0.0
    assert [each and each.value for each in (found.order_changes, found.first_bias)] == [orders, orders]


@pytest.mark.parametrize(("form", "sign"), [("pairwise", 1), ("pairwise", -1), ("ranking", 1)])
def test_a_judge_that_prefers_a_place(form, sign):
    value = {"better": "1" if sign > 0 else "2"} if form == "pairwise" else {"ranks": [1, 2]}
    found = compared(pairs((5, 3), (3, 5)), Rubric("critic", form=form), lambda *_: value)
    # No pair has a better response, but every label has one.
    assert found.accuracy.value == 0.0
    assert found.order_changes.value == 1.0
    assert found.first_bias.value == sign
    assert found.length_bias.value == 0.0


def test_ties_count_as_neither_order_and_agree_with_ties():
    rows = [{"prompt": "?", "responses": ["aa", "b"], "better": better} for better in (1, "2", "equal", "equal")]
    found = compared(rows, Rubric("critic", form="pairwise"), lambda *_: {"better": "equal"})
    assert found.accuracy.value == 0.5
    assert found.kappa.value == 0.0
    assert (found.order_changes.value, found.first_bias.value, found.length_bias.value) == (0.0, 0.0, 0.0)


def test_labels_of_single_responses_are_compared_with_the_nearest_label():
    rows = [
        {"prompt": "?", "response": "a" * length, "label": label, "value": value}
        for length, label, value in ((1, 0, 0.1), (2, 1, 0.9), (3, 1, 0.4), (5, 0, 0.2), (9, 1, 0.8))
    ]
    value_of = {row["response"]: row["value"] for row in rows}
    found = compared(rows, Rubric("critic"), lambda text: {"score": value_of[text]})
    assert found.accuracy.value == 0.8
    # Three labels of 1 and two verdicts of 1: 0.8 - (6 + 6) / 25 over 1 - 12 / 25.
    assert found.kappa.value == pytest.approx((0.8 - 12 / 25) / (1 - 12 / 25))
    labels, values, lengths = (
        np.array(each, float) for each in ([0, 1, 1, 0, 1], [*value_of.values()], [1, 2, 3, 5, 9])
    )
    expected = np.corrcoef(values, lengths)[0, 1] - np.corrcoef(labels, lengths)[0, 1]
    assert found.length_bias.value == pytest.approx(expected)
    assert (found.order_changes, found.first_bias) == (None, None)
    true = [{"prompt": "?", "response": "a", "label": True}, {"prompt": "?", "response": "b", "label": False}]
    assert compared(true, Rubric("critic"), lambda text: {"score": float(text == "a")}).accuracy.value == 1.0


def test_rows_without_a_verdict_are_counted_and_left_out():
    judge = lambda text: None if "a" in text else {"score": 1.0}  # noqa: E731
    rows = [{"prompt": "?", "response": text, "label": 1} for text in ("a", "b", "aa", "bb")]
    found = compared(rows, Rubric("critic"), judge)
    assert (found.num_rows, found.num_failed, len(found.failures)) == (2, 2, 1)
    assert "cannot be read" in found.failures[0]
    assert found.accuracy.value == 1.0
    assert (found.kappa, found.length_bias) == (None, None)
    nothing = compared(rows[:1], Rubric("critic"), judge)
    assert (nothing.num_rows, nothing.accuracy) == (0, None)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "has no rows"),
        (["{"], "line 1: it is not JSON"),
        (["[]"], "line 1: must be an object with a prompt"),
        (['{"prompt": 1}'], "line 1: must be an object with a prompt"),
        (['{"prompt": ["?"]}'], "line 1: must be an object with a prompt"),
        (['{"prompt": "?", "chosen": "a"}'], "line 1: has no label"),
        (['{"prompt": "?", "responses": ["a", "b"], "better": 3}'], "line 1: has no label"),
        (['{"prompt": "?", "responses": ["a", "b"], "better": true}'], "line 1: has no label"),
        (['{"prompt": "?", "response": "a", "label": NaN}'], "line 1: has no label"),
        (['{"prompt": "?", "response": "a", "label": 1' + "0" * 400 + "}"], "line 1: has no label"),
        (["[" * 100_000], "line 1: it is not JSON"),
        (
            ['{"prompt": "?", "response": "a", "label": 1}', "", '{"prompt": "?", "chosen": "a", "rejected": "b"}'],
            "line 3: has another number of responses than labels.jsonl, line 1",
        ),
    ],
)
def test_rows_without_labels_are_refused(lines, reason):
    with pytest.raises(DataError, match=re.escape(reason)):
        read_labels(lines, "labels.jsonl")


def test_single_responses_cannot_be_compared_with_each_other():
    rows = [{"prompt": [{"role": "user", "content": "?"}], "response": "a", "label": 1}]
    with pytest.raises(DataError, match=r"has one response, but the reward has form: ranking"):
        compared(rows, Rubric("critic", form="ranking"), lambda *_: None)
