"""Assembled types."""

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import Field

from rl_core.config import Config, EnvVars, Resolved, assemble, explain, load, resolve
from rl_core.config.schema import SET_BY_THE_LAUNCHER
from rl_core.errors import ConfigProblems
from rl_core.model_config import GenerationConfig, OptimizerConfig, SchedulerConfig


def test_a_section_with_defaults_may_be_left_out_and_one_without_may_not() -> None:
    class Needs(Config):
        name: str

    root = assemble("Root", {"optimizer": OptimizerConfig, "needs": Needs})
    assert root.model_validate({"needs": {"name": "a"}}).model_dump()["optimizer"] == OptimizerConfig().model_dump()
    with pytest.raises(ValueError, match="needs"):
        root.model_validate({})


def test_two_parties_cannot_claim_one_key() -> None:
    with pytest.raises(ValueError, match=r"GenerationConfig has temperature already"):
        assemble("Generation", {"temperature": (float, 1.0)}, base=GenerationConfig)


def test_an_extended_section_is_one_of_its_base() -> None:
    extended = assemble(
        "Generation", {"extra": (int, Field(default=1, gt=0, description="More."))}, base=GenerationConfig
    )
    assert issubclass(extended, GenerationConfig)
    assert list(extended.model_fields) == [*GenerationConfig.model_fields, "extra"]
    assert explain(extended, "extra").doc == "More."
    assert explain(extended, "temperature").doc == explain(GenerationConfig, "temperature").doc != ""
    with pytest.raises(ValueError, match="greater than 0"):
        extended.model_validate({"extra": 0})


def test_an_assembled_config_pickles_here(run: Callable[..., Resolved[Any]]) -> None:
    config = run(overrides=["grpo.seed=3", "env.math.num_workers=2"]).config
    back = pickle.loads(pickle.dumps(config))
    assert back == config
    assert back.model_fields_set == config.model_fields_set
    assert type(back.policy) is type(config.policy)


def test_an_assembled_config_pickles_into_another_process() -> None:
    generation = assemble("Generation", {"optimizer": OptimizerConfig, "size": (int, 3)}, base=GenerationConfig)
    root = assemble("Root", {"generation": generation, "scheduler": (list[SchedulerConfig], [])})
    config = root.model_validate({"generation": {"top_k": 5}, "scheduler": [{"name": "schedules.X"}]})
    code = (
        "import sys, pickle; a, b = pickle.loads(sys.stdin.buffer.read())\n"
        "assert type(a) is type(b) and a == b\n"
        "assert a.generation.top_k == 5 and a.generation.size == 3 and a.scheduler[0].name == 'schedules.X'\n"
        "assert type(a)().generation.size == 3\n"
        "sys.stdout.buffer.write(pickle.dumps(a))"
    )
    sent = pickle.dumps((config, pickle.loads(pickle.dumps(config))))
    answer = subprocess.run([sys.executable, "-c", code], input=sent, stdout=subprocess.PIPE, check=True, timeout=60)
    assert pickle.loads(answer.stdout) == config


class Workers(Config):
    env_vars: EnvVars = {}


ROOT = assemble("Root", {"cluster": Workers})


def read(*overrides):
    return resolve(load({}, overrides), ROOT).config.cluster.env_vars


def test_values_stay_the_text_that_was_written():
    written = read(
        "cluster.env_vars.NCCL_IB_TIMEOUT=22", "cluster.env_vars.NCCL_P2P_LEVEL=NVL", "cluster.env_vars.A=1e5"
    )
    assert written == {"NCCL_IB_TIMEOUT": "22", "NCCL_P2P_LEVEL": "NVL", "A": "1e5"}


@pytest.mark.parametrize(
    ("name", "mention"),
    [
        ("CUDA_VISIBLE_DEVICES", SET_BY_THE_LAUNCHER["CUDA_VISIBLE_DEVICES"]),
        ("MASTER_ADDR", SET_BY_THE_LAUNCHER["MASTER_ADDR"]),
        ("RAY_ADDRESS", "where you start Ray"),
        ("1ST", "letters, digits and underscores"),
    ],
)
def test_names_that_a_config_may_not_set_are_refused_by_key(name, mention):
    with pytest.raises(ConfigProblems) as refused:
        read(f"cluster.env_vars.{name}=0")
    (problem,) = refused.value.problems
    assert problem.key == f"cluster.env_vars.{name}"
    assert mention in f"{problem.reason}. {problem.remedy}"


def test_an_assembled_type_is_described_by_its_parts_and_no_module_is_searched_for_its_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(inspect, "getmodule", lambda found, *_: searched.append(found))
        assembled = assemble("Whole", {"optimizer": OptimizerConfig}, base=SchedulerConfig)
    assert searched == []
    described = {key: field.description for key, field in SchedulerConfig.model_fields.items()}
    assert all(described.values())
    assert {key: assembled.model_fields[key].description for key in described} == described


def test_types_that_differ_only_in_the_factory_of_a_default_are_two() -> None:
    def built(factory: Callable[[], list[str]]) -> type[Config]:
        return assemble("Words", {"words": (list[str], Field(default_factory=factory))})

    first, second = (lambda: ["a"]), (lambda: ["b"])
    assert [built(each)().words for each in (first, second, first)] == [["a"], ["b"], ["a"]]
    assert built(first) is built(first)
