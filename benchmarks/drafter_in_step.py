"""How many drafted tokens are accepted while the policy moves away from where its drafter began, with a drafter that
stays as it is and with one that trains in every step.

    python benchmarks/drafter_in_step.py [--drafter model|head|mtp] [--steps 30] [--seeds 1]

The drafter is a draft model (`model`), an EAGLE-3 head that reads the policy's hidden states (`head`), or the layer for
multi-token prediction of a GLM-4.5 model (`mtp`), whose weights are random and which learns sums first. Both runs are
what `rl train grpo-arithmetic` makes on the CPU, with a reward that the model hardly earns at first: the share of
sevens among 16 characters. The policy learns within a few updates to write something else than sums. A draft model
begins as a copy of the policy, the best that a frozen one can be. A head begins with what it learned from random
weights in a run of `--warmup` steps whose policy stays as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from measurement import read_metrics, rl_command, run_logged, surroundings, table
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_algos.tiny_model import make_tiny_model
from rl_launch.commands.train import local_model

REWARD = '''"""The share of sevens."""


def sevens(response: str) -> float:
    return response.count("7") / 16
'''

SETTINGS = (
    "cluster.device=cpu",
    "cluster.cpu_ranks_per_node=1",
    "grpo.num_prompts_per_step=16",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "data.validation=null",
    "data.train.env_name=sevens.py:sevens",
    "policy.train_global_batch_size=128",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.generation.max_new_tokens=16",
    "policy.generation.backend=vllm",
)
OF_MODEL = (
    "drafter.precision=float32",
    "drafter.max_total_sequence_length=32",
    "drafter.train_micro_batch_size=64",
    "drafter.sequence_packing={enabled: false}",
    "drafter.optimizer.kwargs.lr=1e-3",
)
OF_HEAD = ("policy.draft_head.optimizer.kwargs.lr=1e-3",)
WARMUP = (
    "checkpointing.enabled=true",
    "checkpointing.metric_name=null",
    "policy.optimizer.kwargs.lr=0",
    "policy.train_global_batch_size=16",
    "policy.draft_head.optimizer.kwargs.lr=3e-3",
)
"""Settings of the run in which a head learns to follow a policy that stays as it is: eight updates per step."""
PARTS = 5
"""Rows of the table; each is the mean of a part of the steps."""


def main() -> None:
    """Make both runs for every seed and print their acceptance by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="steps, one update of the policy each (default 30)")
    parser.add_argument("--drafter", choices=("model", "head", "mtp"), default="model")
    parser.add_argument("--warmup", type=int, default=30, help="steps in which a head learns first (default 30)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="SEED")
    options = parser.parse_args()
    print(surroundings("rl-core", "rl-launch", "rl-vllm"), end="\n\n")
    with tempfile.TemporaryDirectory(prefix="rl-drafter-") as scratch:
        folder = Path(scratch)
        (folder / "sevens.py").write_text(REWARD, encoding="utf-8")
        if options.drafter == "model":
            shutil.copytree(local_model("tiny-arithmetic-sft"), folder / "drafter")
        elif options.drafter == "mtp":
            write_glm(folder / "random")
            teach_sums(folder)
            make_head(folder, "mtp", folder / "random", options.warmup)
        else:
            write_random_head(folder / "random")
            make_head(folder, "head", folder / "random", options.warmup)
        for seed in options.seeds:
            found = {name: made(folder, options.drafter, name, options.steps, seed) for name in ("frozen", "trained")}
            print(f"Seed {seed}:\n\n{shown(found)}\n", flush=True)


def made(folder: Path, kind: str, name: str, num_steps: int, seed: int) -> list[dict[str, Any]]:
    """Make a run whose drafter is frozen or trained; returns its metrics by step."""
    drafter = folder / "drafter"
    sections = {
        "model": (f"drafter.model_name={drafter}", *OF_MODEL),
        "head": (f"policy.draft_head.model_name={drafter}", *OF_HEAD),
    }
    sections["mtp"] = sections["head"]
    begun = (*SETTINGS, *policy(folder, kind), speculation(kind, drafter))
    trained = sections[kind] if name == "trained" else ()
    settings = (*begun, *trained, f"grpo.max_num_steps={num_steps}", f"grpo.seed={seed}")
    run_rl(folder, "grpo-arithmetic", f"{name}-{seed}", *settings)
    return read_metrics(folder / f"{name}-{seed}")


def speculation(kind: str, drafter: Path) -> str:
    """Return the setting by which the engine drafts three tokens."""
    method = {"model": "draft_model", "head": "eagle3", "mtp": "mtp"}[kind]
    return f"policy.generation.vllm_cfg.speculation={{method: {method}, model: {drafter}, num_tokens: 3}}"


def policy(folder: Path, kind: str) -> tuple[str, ...]:
    """Return the setting of the policy, unless it is the recipe's own."""
    return (f"policy.model_name={folder / 'policy'}",) if kind == "mtp" else ()


def teach_sums(folder: Path) -> None:
    """Write the model of the subfolder `random` into `policy` once it has learned sums, like the recipe's model."""
    settings = ("cluster.device=cpu", "cluster.cpu_ranks_per_node=1", f"policy.model_name={folder / 'random'}")
    run_rl(folder, "sft-arithmetic", "sums", *settings)
    (newest,) = (folder / "sums" / "checkpoints").glob("step_*")
    shutil.copytree(newest / "hf", folder / "policy")


def make_head(folder: Path, kind: str, random: Path, num_steps: int) -> None:
    """Write a head into the subfolder `drafter` that has learned from random weights to follow the policy before it
    trains."""
    begun = (*policy(folder, kind), speculation(kind, random), f"policy.draft_head.model_name={random}")
    settings = (*SETTINGS, *begun, *WARMUP)
    run_rl(folder, "grpo-arithmetic", "warmup", *settings, f"grpo.max_num_steps={num_steps}", "grpo.seed=0")
    (newest,) = (folder / "warmup" / "checkpoints").glob(f"step_{num_steps}")
    shutil.copytree(newest / "hf_drafter", folder / "drafter")


def write_glm(folder: Path) -> None:
    """Write a GLM-4.5 model with random weights, also of its layer for multi-token prediction, and the tokenizer of the
    recipe."""
    make_tiny_model(folder)
    path, weights = folder / "config.json", folder / "model.safetensors"
    tiny = json.loads(path.read_text())
    names = ("vocab_size", "max_position_embeddings", "eos_token_id", "pad_token_id")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        **{name: tiny[name] for name in names},
    }
    torch.manual_seed(0)
    longer = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", num_hidden_layers=3, **sizes)).float()
    longer.save_pretrained(folder)
    fields = AutoConfig.for_model("glm4_moe", num_hidden_layers=2, num_nextn_predict_layers=1, **sizes).to_dict()
    path.write_text(json.dumps({**fields, "architectures": ["Glm4MoeForCausalLM"], "dtype": "float32"}))
    width = sizes["hidden_size"]
    own = {"eh_proj": torch.randn(width, 2 * width) * width**-0.5}
    own |= {name: torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors = load_file(weights) | {f"model.layers.2.{name}.weight": tensor for name, tensor in own.items()}
    save_torch_file(tensors, weights, metadata={"format": "pt"})


def write_random_head(folder: Path) -> None:
    """Write an EAGLE-3 head of the recipe's policy with random weights and an output layer of its own."""
    policy = json.loads((Path(local_model("tiny-arithmetic-sft")) / "config.json").read_text())
    width, heads = policy["hidden_size"], policy["num_attention_heads"] * policy["head_dim"]
    kv_heads, inner = policy["num_key_value_heads"] * policy["head_dim"], policy["intermediate_size"]
    shapes = {
        "fc": (width, 3 * width),
        "midlayer.self_attn.q_proj": (heads, 2 * width),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * width),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
        "lm_head": (policy["vocab_size"], width),
    }
    norms = [f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, width**-0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    weights |= {name: np.ones(width, np.float32) for name in (*norms, "norm")}
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: policy[name] for name in (*names, "max_position_embeddings", "rms_norm_eps")},
        "draft_vocab_size": policy["vocab_size"],
        "num_hidden_layers": 1,
        "dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    folder.mkdir()
    save_file({f"{name}.weight": weight for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def run_rl(folder: Path, recipe: str, name: str, *settings: str) -> None:
    """Train in a folder's subfolder of this name."""
    command = rl_command("train", recipe, f"run_dir={folder / name}", *settings)
    run_logged(["env", "-C", str(folder), *command], folder / f"{name}.log")


def shown(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the table of both runs."""
    head = ["steps", *(f"{what}, {name}" for what in ("accepted", "tokens per step", "reward") for name in found)]
    keys = ("speculation/acceptance_rate", "speculation/tokens_per_step", "reward/mean")
    num_steps = min(len(rows) for rows in found.values())
    bounds = [num_steps * part // PARTS for part in range(PARTS + 1)]
    lines = []
    for start, end in pairwise(bounds):
        means = [fmean(row[key] for row in rows[start:end]) for key in keys for rows in found.values()]
        lines.append([f"{start + 1} to {end}", *(f"{mean:.2f}" for mean in means)])
    return table(head, lines)


if __name__ == "__main__":
    main()
