import pytest

from rl_algos.data.sources import arithmetic
from rl_algos.data.sources.arithmetic import load_preferences as load
from rl_core.errors import DataError


def test_every_sum_has_its_answer_and_a_wrong_one_near_it():
    rows = load({"max_operand": 20, "max_error": 5}, "train")
    sums = arithmetic.load({"max_operand": 20}, "train")
    assert [(row["prompt"], row["chosen"]) for row in rows] == [(row["messages"], row["answer"]) for row in sums]
    errors = [int(row["rejected"]) - int(row["chosen"]) for row in rows]
    assert set(map(abs, errors)) == {1, 2, 3, 4, 5}
    assert min(int(row["rejected"]) for row in rows) >= 0
    assert [row["margin"] for row in rows] == [float(abs(error)) for error in errors]
    assert 0.3 < sum(error > 0 for error in errors) / len(errors) < 0.7


def test_rows_follow_from_the_seed():
    settings = {"max_operand": 9, "seed": 3}
    assert load(settings, "validation") == load(settings, "validation")
    assert load(settings, "train") != load({**settings, "seed": 4}, "train")


def test_settings_are_those_of_the_sums():
    with pytest.raises(DataError, match="different sums"):
        load({"max_operand": 2, "num_rows": 100}, "train")
