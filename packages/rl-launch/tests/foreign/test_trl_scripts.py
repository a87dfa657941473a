"""Python scripts of TRL come over: arguments that are constants, the model, the dataset and adapters."""

import pytest
from foreign_files import written

from rl_core.errors import ConfigError
from rl_launch.foreign.importing import import_config
from rl_launch.run_config.reading import read_plan

GRPO = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("a/math", split="train")
STEPS = 200

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

training_args = GRPOConfig(
    output_dir="out", learning_rate=1e-6, max_steps=STEPS, num_generations=8, per_device_train_batch_size=8,
    max_completion_length=256, beta=0.04, temperature=0.9, num_iterations=2, run_name=f"run-{STEPS}",
)
trainer = GRPOTrainer(
    model="x/y", reward_funcs=reward_len, args=training_args, train_dataset=dataset,
)
trainer.train()
"""
SFT = """
import trl
from datasets import load_dataset
from peft import LoraConfig

peft_config = LoraConfig(r=32, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = trl.SFTTrainer(
    "x/y",
    args=trl.SFTConfig(output_dir="out", max_length=512, packing=True, learning_rate=2e-4, num_train_epochs=1),
    train_dataset=load_dataset("a/chats", "all", split="train"),
    peft_config=peft_config,
)
"""
DPO = """
from trl import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained("x/y")
args = DPOConfig("out", beta=0.1, learning_rate=5e-7, loss_type="ipo", max_length=1024)
trainer = DPOTrainer(model=model, args=args, train_dataset=load_dataset("a/pairs", split="train"))
"""
KTO = """
from trl import KTOConfig, KTOTrainer
trainer = KTOTrainer(model="x/y", args=KTOConfig(output_dir="out", learning_rate=5e-7), train_dataset=data)
"""
REWARDS = """
from trl import RewardConfig, RewardTrainer
args = RewardConfig(output_dir="out", learning_rate=1e-5, center_rewards_coefficient=0.01, num_train_epochs=1)
trainer = RewardTrainer(model="x/y", args=args, train_dataset=load_dataset("a/pairs", split="train"))
"""


def imported(tmp_path, script):
    found = import_config(written(tmp_path, script, "train.py"), "trl", gpus=2)
    assert found.features == {}
    return found, read_plan(found.recipe).config


def test_grpo(tmp_path):
    found, config = imported(tmp_path, GRPO)
    assert (config.algorithm, config.policy.model_name, config.run_dir) == ("grpo", "x/y", "out")
    # TRL counts updates, of which each generation has two
    steps = (config.grpo.max_num_steps, config.grpo.num_generations_per_prompt, config.grpo.num_iterations)
    assert steps == (100, 8, 2)
    assert config.policy.generation.max_new_tokens == 256
    assert config.data.train.dataset_name == "a/math"
    assert any(note.startswith("run_name: ") and "(line 13)" in note for note in found.notes)


@pytest.mark.parametrize(("builder", "file"), [("json", "prompts.jsonl"), ("parquet", "prompts.parquet")])
def test_a_dataset_of_a_local_file(tmp_path, builder, file):
    script = GRPO.replace('"a/math"', f'"{builder}", data_files="{file}"')
    found, _ = imported(tmp_path, script)
    assert found.recipe["data"]["train"] == {"data_path": file}


def test_sft_with_adapters(tmp_path):
    _, config = imported(tmp_path, SFT)
    assert (config.algorithm, config.policy.model_name, config.data.train.subset) == ("sft", "x/y", "all")
    assert (config.policy.lora_cfg.enabled, config.policy.lora_cfg.dim, config.policy.lora_cfg.alpha) == (True, 32, 16)
    assert config.policy.optimizer.kwargs["lr"] == 2e-4


@pytest.mark.parametrize(("script", "loss", "model"), [(DPO, "ipo", "OWNER/MODEL"), (KTO, "kto", "x/y")])
def test_preferences(tmp_path, script, loss, model):
    found, config = imported(tmp_path, script)
    assert (config.algorithm, config.dpo.loss.name, config.policy.model_name) == ("dpo", loss, model)
    if model == "OWNER/MODEL":
        assert any(note.startswith("model_name_or_path: ") and "(line 5)" in note for note in found.notes)


def test_reward_models(tmp_path):
    _, config = imported(tmp_path, REWARDS)
    assert (config.algorithm, config.rm.center_rewards_coefficient, config.rm.max_num_epochs) == ("rm", 0.01, 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("print(1)", "found none"),
        ("a = SFTConfig()\nb = DPOConfig()", "found SFTConfig in line 1, DPOConfig in line 2"),
        ("def (", "is not valid Python: line 1"),
    ],
)
def test_a_script_without_one_set_of_arguments_is_refused(tmp_path, script, said):
    with pytest.raises(ConfigError, match=said):
        import_config(written(tmp_path, script, "train.py"), "trl")
