import pytest
from pydantic import ValidationError

from rl_algos.data.sources.arithmetic import DATASET, load
from rl_core.errors import DataError
from rl_core.plugins import DATASETS, plugin, resolve


def operands(rows):
    return [tuple(map(int, row["messages"][0]["content"].removesuffix("=").split("+"))) for row in rows]


def test_the_entry_point_leads_to_the_generator():
    assert plugin(DATASETS, "arithmetic") == DATASET
    assert resolve(DATASET.load) is load


def test_answers_are_right_and_all_sums_are_there():
    train, validation = load({"max_operand": 12}, "train"), load({"max_operand": 12}, "validation")
    for row in train + validation:
        ((a, b),) = operands([row])
        assert row["answer"] == str(a + b)
        assert row["environment"] == "math"
    assert sorted(operands(train + validation)) == [(a, b) for a in range(13) for b in range(13)]


@pytest.mark.parametrize("seed", range(3))
def test_validation_shares_no_pair_of_operands_with_training_in_either_order(seed):
    settings = {"max_operand": 19, "validation_fraction": 0.2, "seed": seed}
    train, validation = (operands(load(settings, split)) for split in ("train", "validation"))
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in validation}
    assert 0.15 < len(validation) / 400 < 0.25


def test_rows_follow_from_the_seed_and_are_shuffled():
    settings = {"max_operand": 30, "num_rows": 50}
    assert load(settings, "train") == load(settings, "train")
    assert load(settings, "train") != load({**settings, "seed": 1}, "train")
    assert operands(load(settings, "train")) != sorted(operands(load(settings, "train")))
    assert len(load(settings, "train")) == 50


def test_hints_are_before_every_second_prompt():
    plain, hinted = (load({"num_rows": 50, "hints": hints}, "train") for hints in (False, True))
    assert [row["answer"] for row in hinted] == [row["answer"] for row in plain]
    assert hinted[::2] == plain[::2]
    for with_hint, without in zip(hinted[1::2], plain[1::2], strict=True):
        assert with_hint["messages"][0]["content"] == f"{without['answer']} {without['messages'][0]['content']}"


def test_more_rows_than_sums_are_refused():
    with pytest.raises(DataError, match=r"validation has \d+ different sums .* got num_rows: 50.*max_operand"):
        load({"max_operand": 5, "num_rows": 50}, "validation")


def test_an_unknown_split_or_setting_is_refused():
    with pytest.raises(DataError, match="train and validation, got 'test'"):
        load({}, "test")
    with pytest.raises(ValidationError, match="max_opperand"):
        load({"max_opperand": 5}, "train")
