"""The same run on another generator, on devices of its own, and with turns that a grammar constrains."""

import json

import pytest
from runs import assert_same, steps_of

from rl_core.testing.exhaustive import exhaustive


@exhaustive
def test_a_single_rank_beside_a_replica_of_its_own_makes_the_same_steps(driver, grpo, whole_grpo, tmp_path):
    apart = ["policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1"]
    driver.train(tmp_path / "run", *grpo, "grpo.max_num_steps=4", *apart)
    found = steps_of(tmp_path / "run")
    assert max(line["mismatch/max"] for line in found) < 1e-3
    assert_same(found, steps_of(whole_grpo)[:4], ("reward/mean", "train/loss", "train/grad_norm"), 1e-3)


def test_the_trainers_own_generator_agrees_with_it(whole_hf, few_steps):
    found = steps_of(whole_hf)
    assert [line["step"] for line in found] == list(range(1, 5 if few_steps else 13))
    assert max(line["mismatch/max"] for line in found) < 1e-4
    assert max(line["reward/mean"] for line in found) > 0.1


@exhaustive
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_constrained_turns_are_on_policy(driver, backend, tmp_path):
    number = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "integer", "maximum": 99}}}
    rows = [
        {"prompt": f"{first}+3=", "answer": str(first + 3), "response_format": number if first % 2 else None}
        for first in range(16)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "run.yaml").write_text(
        f"""
defaults: grpo-arithmetic
policy: {{model_name: tiny-arithmetic, train_global_batch_size: 16, generation: {{backend: {backend}, top_p: 0.95}}}}
grpo:
  num_prompts_per_step: 4
  num_generations_per_prompt: 4
  max_num_steps: 2
  val_period: 0
  structured_output: constrain
data:
  train: {{dataset_name: null, data_path: {tmp_path}/rows.jsonl, env_name: math, settings: null}}
  validation: null
checkpointing: {{metric_name: null}}
"""
    )
    driver.train(tmp_path / "run", str(tmp_path / "run.yaml"))
    assert max(line["mismatch/max"] for line in steps_of(tmp_path / "run")) < 1e-5
    records = [json.loads(line) for line in (tmp_path / "run/rollouts/step_1.jsonl").read_text().splitlines()]
    texts = {True: [], False: []}
    for record in records:
        is_constrained = rows[int(record["prompt_id"].rpartition(":")[2])]["response_format"] is not None
        texts[is_constrained].append(record["turns"][0]["text"])
    assert texts[True]
    assert all(text.lstrip("-").isdigit() for text in texts[True])
    assert not all(text.lstrip("-").isdigit() for text in texts[False])


HALF = {
    "hf": ["policy.generation.backend=hf"],
    "vllm": [],
    "megatron, sent to hf": ["policy.megatron_cfg.enabled=true", "policy.generation.backend=hf"],
    "megatron, sent to vllm": ["policy.megatron_cfg.enabled=true"],
    "megatron": ["policy.megatron_cfg.enabled=true", "policy.generation.backend=megatron"],
}


@exhaustive
@pytest.mark.parametrize("case", HALF)
def test_rollouts_in_float16_are_nearer_to_training_than_in_bfloat16(driver, grpo, case, tmp_path):
    found = {}
    for precision in ("float16", "bfloat16"):
        settings = [f"policy.precision={precision}", "grpo.max_num_steps=3", "checkpointing.save_period=3", *HALF[case]]
        driver.train(tmp_path / precision, *grpo, *settings)
        found[precision] = steps_of(tmp_path / precision)
    far, near = (max(line["mismatch/max"] for line in found[precision]) for precision in ("bfloat16", "float16"))
    # The megatron generator computes with the kernels of training, and differs by the order of sums.
    assert near < max(far / 3, 1e-5)
    for line in found["float16"]:
        # Weights do not step if the gradient overflows, and all of the others do.
        assert line["train/skipped_steps"] == line["train/overflows"]
        assert line["train/overflows"] or line["train/grad_norm"] > 0
    assert found["float16"][-1]["train/loss_scale"] >= 2.0**14
    assert sum(line["train/overflows"] for line in found["float16"]) <= 2


ADAPTERS = {
    "nf4": ["policy.lora_cfg.base_quantization=nf4"],
    "nf4, sent as adapters": ["policy.lora_cfg.base_quantization=nf4", "policy.generation.lora_sync=adapter"],
    "int8": ["policy.lora_cfg.base_quantization=int8"],
    "dora": ["policy.lora_cfg.use_dora=true"],
    "pissa": ["policy.lora_cfg.init=pissa"],
    "pissa, sent as adapters": ["policy.lora_cfg.init=pissa", "policy.generation.lora_sync=adapter"],
}


@exhaustive
@pytest.mark.parametrize("kind", ADAPTERS)
def test_rollouts_come_from_the_weights_that_adapters_train(driver, grpo, kind, tmp_path):
    driver.train(tmp_path / "run", *grpo, "policy.lora_cfg.enabled=true", "grpo.max_num_steps=3", *ADAPTERS[kind])
    found = steps_of(tmp_path / "run")
    assert [line["step"] for line in found] == [1, 2, 3]
    assert max(line["mismatch/max"] for line in found) < 1e-3
    assert min(line["train/grad_norm"] for line in found) > 0
