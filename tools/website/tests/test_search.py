"""The search of the site answers questions of readers: the right page is among the first three.

The questions are those of public issue trackers of such systems, in words of ours; a comment gives the thread.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
ASK = Path(__file__).with_name("ask.mjs")
FIRST = 3

# question, page, words of the answer on it
QUESTIONS = [
    # huggingface/trl#2884, huggingface/open-r1#436
    ("why does my reward stay flat?", "troubleshooting", "groups_without_signal"),
    # hiyouga/EasyR1#232
    ("reward is always zero", "troubleshooting", "rl env check"),
    # huggingface/trl#3452, huggingface/trl#3857
    ("GRPO loss is 0 but the reward changes", "troubleshooting", "Advantages of a group add up to 0"),
    # huggingface/trl#4159, huggingface/trl#4772
    ("logprobs of vLLM differ from the trainer", "concepts/mismatch", "mismatch/mean"),
    # huggingface/trl#2644
    ("pass the ground truth of a dataset column to a reward function", "rewards-and-environments", "answer"),
    # huggingface/trl#2832
    ("combine several reward functions with weights", "rewards-and-environments", "Several rewards"),
    # huggingface/trl#5142, vllm-project/vllm#15254
    ("out of memory when vLLM wakes up for weight sync", "troubleshooting", "gpu_memory_utilization"),
    # NovaSky-AI/SkyRL#709, OpenRLHF/OpenRLHF#337
    ("launch a multi-node run with Slurm", "slurm", "rl submit slurm"),
    # Lightning-AI/pytorch-lightning#4265, lanl/BEE#936
    ("requeue after preemption", "slurm", "Preemption"),
    # huggingface/open-r1#160, facebookresearch/fairseq2#1485
    ("NCCL timeout while a checkpoint is saved", "troubleshooting", "A timeout of NCCL"),
    # Lightning-AI/pytorch-lightning#19377
    ("resume on a different number of GPUs", "resume-and-checkpoints", "does not depend on the mesh"),
    ("load the trained model with transformers", "resume-and-checkpoints", "transformers"),
    ("train on my own jsonl file", "data-formats", "data_path"),
    ("train LoRA adapters with GRPO", "lora", "policy.lora_cfg"),
    ("multi-turn tool calling", "tools", "ToolEnvironment"),
    ("read the completions while it is training", "view", "rollouts"),
    ("log to wandb", "ablations", "logger.wandb_enabled"),
    ("off-policy async training, how stale may rollouts be", "concepts/staleness", "max_trajectory_age_steps"),
    ("DPO with chosen and rejected columns", "preferences-and-reward-models", "rejected"),
    ("training hangs without an error", "troubleshooting", "rl stacks"),
    ("cluster without internet access", "datasets", "hf download"),
    ("completions are truncated at max length", "troubleshooting", "rollout/truncated"),
    ("entropy collapse", "troubleshooting", "clip_high"),
    ("convert a TRL script", "coming-from-trl", "rl config import"),
    ("does it need Ray on Kubernetes", "kubernetes", "KubeRay"),
]
# a key by itself is looked up in the reference of the config, also if other pages and Python classes have it
KEYS = {
    "num_generations_per_prompt": "grpo",
    "grpo.num_generations_per_prompt": "grpo",
    "gpu_memory_utilization": "policy",
    "loss_fn.surrogate.clip_high": "loss_fn",
    "save_period": "checkpointing",
    "wandb_enabled": "logger",
    "tensor_parallel_size": "policy",
}


@pytest.fixture(scope="module")
def found(html):
    if NODE is None:
        pytest.skip("needs node, which runs the worker of the search")
    asked = [*(question for question, _, _ in QUESTIONS), *KEYS, "rl_core.Batch", "rl submit slurm", "resmue a run"]
    done = subprocess.run([NODE, ASK, html], input=json.dumps(asked), capture_output=True, text=True, check=True)
    return dict(zip(asked, json.loads(done.stdout), strict=True))


def pages_of(places):
    return list(dict.fromkeys(place.partition(".html")[0] for place in places))


@pytest.mark.parametrize(("question", "page", "answer"), QUESTIONS)
def test_the_page_with_the_answer_is_among_the_first(found, pages, question, page, answer):
    assert page in pages_of(found[question][:FIRST])
    assert answer in " ".join(pages[f"{page}.md"].split())


@pytest.mark.parametrize(("key", "section"), KEYS.items())
def test_a_key_is_found_in_the_reference_of_the_config(found, key, section):
    assert all(place.startswith("reference/config/") for place in found[key][:1])
    assert f"reference/config/{section}" in pages_of(found[key][:FIRST])


def test_names_and_commands_are_found_in_their_reference(found):
    assert found["rl_core.Batch"][0] == "reference/python/rl_core.html#rl_core.Batch"
    assert pages_of(found["rl submit slurm"][:FIRST])[0] in ("slurm", "reference/cli/submit")


def test_a_misspelt_word_finds_the_page(found):
    assert "resume-and-checkpoints" in pages_of(found["resmue a run"][:FIRST])
