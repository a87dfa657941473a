"""Unknown keys: explained by a hint, and no veil over other problems."""

import pytest
from pydantic import Field

from rl_core.config import Config, Problem, assemble, load, refusal, resolve
from rl_core.errors import ConfigProblems


class LoopConfig(Config):
    steps: int = Field(default=10, gt=0)
    period: int = 0
    names: list[str] = ["a"]


ROOT = assemble("Root", {"loop": LoopConfig})


def checks(config):
    if config.loop.period > config.loop.steps:
        yield Problem("loop.period", f"must not exceed loop.steps ({config.loop.steps})", got=config.loop.period)


def problems(values, hint=None):
    with pytest.raises(ConfigProblems) as refused:
        resolve(load(values), ROOT, checks=[checks], hint=hint)
    return {problem.key: problem for problem in refused.value.problems}


def test_a_hint_explains_a_key_before_the_nearest_one():
    asked = []

    def hint(key, value):
        asked.append((key, value))
        return "the words of the hint" if key == "loop.step" else ""

    found = problems({"loop": {"step": 3, "perod": 4}}, hint)
    assert "the words of the hint" in found["loop.step"].reason
    assert "loop.period" in found["loop.perod"].remedy
    assert asked == [("loop.step", 3), ("loop.perod", 4)]


def test_checks_run_beside_unknown_keys_and_nulls():
    found = problems({"loop": {"period": 20, "brand_new": 1, "names": None}})
    assert set(found) == {"loop.period", "loop.brand_new", "loop.names"}


def test_a_problem_that_a_typo_makes_is_not_reported():
    assert set(problems({"loop": {"period": 20, "stepss": 30}})) == {"loop.stepss"}
    assert set(problems({"loop": {"perid": -1, "period": 20}})) == {"loop.perid"}


def test_checks_wait_for_wrong_values():
    assert set(problems({"loop": {"period": 20, "brand_new": 1, "steps": "many"}})) == {"loop.brand_new", "loop.steps"}


def test_a_refusal_has_the_origin_of_each_key():
    problems = (Problem("loop.steps", "is odd", got=3), Problem("loop.period", "is even"))
    error = refusal(problems, load({"loop": {"steps": 3}}))
    assert error.problems == problems
    assert "loop.steps (config): got 3: is odd" in str(error)
