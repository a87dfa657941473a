"""GRPO with adapters that travel to vLLM by themselves."""

import re

import pytest
from runs import assert_same, steps_of
from safetensors.numpy import load_file

from rl_core.testing.exhaustive import exhaustive

SENT = re.compile(r"weight version (\d+): sending (.*), (\d+) bytes")
APART = [
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
    "policy.megatron_cfg.enabled=true",
]


@pytest.fixture(scope="module")
def adapted(grpo):
    return [*grpo, "policy.lora_cfg.enabled=true", "policy.generation.lora_sync=adapter", "grpo.max_num_steps=3"]


@pytest.fixture(scope="module")
def merged_steps(driver, adapted, tmp_path_factory):
    """Steps of a run that merges the adapters."""
    folder = tmp_path_factory.mktemp("merged") / "run"
    driver.train(folder, *adapted, "policy.generation.lora_sync=merged")
    return steps_of(folder)


def transfers_of(folder):
    """First version, form and bytes of each kind of transfer in a row."""
    return [(int(version), form, int(size)) for version, form, size in SENT.findall(driver_log(folder))]


def driver_log(folder):
    return (folder / "logs" / "driver.log").read_text()


@pytest.mark.parametrize(
    "settings", [pytest.param([], id="colocated"), pytest.param(APART, id="megatron, apart", marks=exhaustive)]
)
def test_adapters_that_travel_alone_make_the_steps_of_merged_ones(driver, adapted, merged_steps, tmp_path, settings):
    folder = tmp_path / "run"
    driver.train(folder, *adapted, *settings)
    found = steps_of(folder)
    assert max(line["mismatch/max"] for line in found) < 1e-3
    assert_same(found, merged_steps, ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)
    factors = load_file(folder / "checkpoints/step_3/adapter/adapter_model.safetensors")
    weights = load_file(folder / "checkpoints/step_3/hf/model.safetensors")
    num_bytes = sum(factor.nbytes for factor in factors.values())
    whole = num_bytes + sum(weight.nbytes for name, weight in weights.items() if name != "lm_head.weight")
    assert transfers_of(folder) == [
        (1, "all weights and their adapters", whole),
        (2, "the adapters alone", num_bytes),
    ]


@exhaustive
def test_a_run_that_goes_on_sends_all_weights_once_more(driver, adapted, tmp_path):
    folder = tmp_path / "run"
    driver.train(folder, *adapted)
    found, sent = steps_of(folder), transfers_of(folder)
    driver.train(folder, *adapted, "grpo.max_num_steps=4")
    resumed = steps_of(folder)
    assert resumed[:3] == found
    assert resumed[3]["mismatch/max"] < 1e-3
    assert transfers_of(folder) == sent + [(version + 3, form, size) for version, form, size in sent]
