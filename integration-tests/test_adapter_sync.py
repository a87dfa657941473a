"""GRPO with adapters that travel to vLLM by themselves."""

import re
from functools import cache

import pytest
from runs import assert_same, steps_of
from safetensors.numpy import load_file

from rl_core.testing.exhaustive import exhaustive

SENT = re.compile(r"weight version (\d+): sending (.*), (\d+) bytes")
LAYOUTS = {
    "colocated": [],
    "megatron, apart": [
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
        "policy.megatron_cfg.enabled=true",
    ],
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

# rl-dtensor sends adapters apart from weights, and rl-vllm computes with those that arrive so
pytestmark = exhaustive


@pytest.fixture(scope="module")
def adapted(grpo):
    return [*grpo, "policy.lora_cfg.enabled=true", "policy.generation.lora_sync=adapter", "grpo.max_num_steps=3"]


@pytest.fixture(scope="module")
def run_of(driver, adapted, tmp_path_factory):
    """From the name of a layout to the folder of its run."""

    @cache
    def made(layout):
        folder = tmp_path_factory.mktemp("adapted") / "run"
        driver.train(folder, *adapted, *LAYOUTS[layout])
        return folder

    return made


def transfers_of(folder):
    """First version, form and bytes of each kind of transfer in a row."""
    return [(int(version), form, int(size)) for version, form, size in SENT.findall(driver_log(folder))]


def driver_log(folder):
    return (folder / "logs" / "driver.log").read_text()


@every_layout
def test_adapters_travel_alone_and_the_engine_computes_with_them_as_the_policy_does(run_of, layout):
    folder = run_of(layout)
    steps = steps_of(folder)
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["mismatch/max"] for line in steps) < 1e-3
    factors = load_file(folder / "checkpoints/step_3/adapter/adapter_model.safetensors")
    weights = load_file(folder / "checkpoints/step_3/hf/model.safetensors")
    num_bytes = sum(factor.nbytes for factor in factors.values())
    whole = num_bytes + sum(weight.nbytes for name, weight in weights.items() if name != "lm_head.weight")
    assert transfers_of(folder) == [(1, "all weights and their adapters", whole), (2, "the adapters alone", num_bytes)]


def test_adapters_that_travel_alone_make_the_steps_of_merged_ones(driver, adapted, run_of, tmp_path):
    driver.train(tmp_path / "run", *adapted, "policy.generation.lora_sync=merged")
    merged = steps_of(tmp_path / "run")
    for layout in LAYOUTS:
        assert_same(steps_of(run_of(layout)), merged, ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)


def test_a_run_that_goes_on_sends_all_weights_once_more(driver, adapted, tmp_path):
    folder = tmp_path / "run"
    driver.train(folder, *adapted)
    found, sent = steps_of(folder), transfers_of(folder)
    driver.train(folder, *adapted, "grpo.max_num_steps=4")
    resumed = steps_of(folder)
    assert resumed[:3] == found
    assert resumed[3]["mismatch/max"] < 1e-3
    assert transfers_of(folder) == sent + [(version + 3, form, size) for version, form, size in sent]
