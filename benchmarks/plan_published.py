"""Published peaks and speeds of other systems beside what `rl plan` says of the same model, devices and layout.

    python benchmarks/plan_published.py
    python benchmarks/plan_published.py --all

No run is started. Each figure is a row of `benchmarks/published/*.csv`, planned as a recipe of this project with the
model, layout, microbatches and lengths that its page states. Peaks are those of torch's allocator, so they are compared
without contexts and gaps between tensors. Column `look` of the files: 1 for figures that the plan was looked at with
early, 2 for figures that were planned before the last changes, whose ratio then is in `first`, 3 for those that were
planned when most of the changes were made, and 4 for those that were found and planned after all of them.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measurement import table

from rl_core.devices import CUDA
from rl_launch.planning.accelerators import GB, accelerator_named
from rl_launch.planning.plan import GENERATING, TRAINING, Plan, plan_run
from rl_launch.planning.seconds import generation_seconds
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.reading import read_plan

FIGURES = Path(__file__).parent / "published"
GITHUB = "https://github.com"
SOURCES = {
    "titan-h100": f"{GITHUB}/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "titan-a100": f"{GITHUB}/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
    "qwen": "https://mintlify.com/QwenLM/Qwen/finetuning/lora",
    "own": "gpu_check.md",
    "foundry": f"{GITHUB}/mosaicml/llm-foundry/blob/061f2c7ce64e655100286584a7629e2a09f827ba/scripts/train/"
    "benchmarking/README.md",
    "automodel": f"{GITHUB}/NVIDIA-NeMo/Automodel/blob/01926a5c443b7979463c73341bf64adf79de638e/docs/"
    "performance-summary.md",
    "bridge": "https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary-archive.html",
    "torchtune": f"{GITHUB}/pytorch/torchtune/blob/0031bfb080bd35ec533c412df883cf2bf7bf7fe4/README.md",
    "trt": f"{GITHUB}/NVIDIA/TensorRT-LLM/blob/v0.9.0/docs/source/performance.md",
    "vllm-a100": "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on",
    "vllm-h100": "https://yobitelcomm.github.io/bench/recipes/concurrency-sweep/",
    "kempner": "https://kempnerinstitute.github.io/KempnerForge/reference/benchmarks.html",
    "vllm-h200": "https://buildkite.com/vllm/performance-benchmark/builds/9515",
    "0.4": f"{GITHUB}/NVIDIA-NeMo/RL/blob/r0.4.0/docs/about/performance-summary.md",
    "0.5": "https://docs.nvidia.com/nemo/rl/0.5.0/about/performance-summary.html",
    "0.6": "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html",
    "0.7": "https://docs.nvidia.com/nemo/rl/0.7.0/about/performance-summary.html",
}
MPT = {
    "760m": (1536, 24, 12),
    "350m": (1024, 24, 16),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
"""Width, layers and heads of the models of LLM Foundry."""
OTHERS = {"Qwen-7B": (4096, 32, 32, 11008, 32, 151936), "Llama-13B of 8 key heads": (5120, 40, 40, 18432, 8, 128256)}
"""Width, layers, heads, width of the MLP, heads of keys and vocabulary of models without a known name."""
PROMPT = 150
"""Tokens of a prompt of NeMo RL's runs, which its pages do not state."""
PEAK, STEP, SPEED, OUTPUT = "peak, GB", "step, s", "tokens/s/GPU", "output tokens/s/GPU"


@dataclass(frozen=True)
class Published:
    """A figure of another system.

    Args:
        name: Model, devices and what is special.
        source: Address of the page.
        unit: What the figure is.
        value: The figure.
        recipe: Recipe that it is planned with.
        device: Device of the plan.
        overrides: Keys of the recipe that differ.
        lengths: Mean tokens of prompts and completions, or of rows.
        look: When the plan was looked at with it.
        first: Ratio at the first look; empty if it was not kept.
    """

    name: str
    source: str
    unit: str
    value: float
    recipe: str
    device: str
    overrides: Mapping[str, Any]
    lengths: Lengths
    look: int
    first: str


def planned(case: Published) -> Plan:
    """Plan a case."""
    overrides = [f"{key}={value}" for key, value in case.overrides.items()]
    plan = read_plan(case.recipe, overrides)
    return plan_run(plan, case.name, accelerator=accelerator_named(case.device), device=CUDA, lengths=case.lengths)


def figure(plan: Plan, unit: str) -> float:
    """The figure of a plan that a published one is compared with."""
    if unit == PEAK:
        usage = next(usage for usage in plan.usages if usage.phase == TRAINING)
        return usage.tensors / GB
    if unit == STEP:
        # Other pages do not count saves.
        own = plan.seconds.get("save", 0.0)
        training = plan.step_seconds - own
        return max(training, plan.seconds.get(GENERATING, 0.0)) if plan.work.staleness else training
    if unit == OUTPUT:
        assert plan.engine is not None
        cache = next(usage.device["KV cache"] for usage in plan.usages if usage.phase == GENERATING)
        # The prompts of these pages are all different.
        work, replicas = replace(plan.work, group=1), plan.topology.num_replicas
        seconds = generation_seconds(plan.engine, cache, work, replicas, plan.machines)
        return work.num_rows * work.completion / seconds / replicas / plan.engine.layout.num_ranks
    return plan.work.num_tokens / plan.seconds[TRAINING] / plan.num_devices


def rows_of(name: str) -> Iterator[dict[str, str]]:
    """Read the figures of a file."""
    with (FIGURES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def shape_of(model: str) -> dict[str, str]:
    """Keys of a model; those without a Hugging Face config have the shape of a Llama with as many parameters."""
    if model.startswith("MPT-"):
        hidden, layers, heads = MPT[model.removeprefix("MPT-")]
        inner, keys, vocab, tied = round(8 * hidden / 3), heads, 50368, "true"
    elif model in OTHERS:
        hidden, layers, heads, inner, keys, vocab = OTHERS[model]
        tied = "false"
    else:
        return {"policy.model_name": model}
    fields = (
        f"{{model_type: llama, hidden_size: {hidden}, intermediate_size: {inner}, num_hidden_layers: {layers}, "
        f"num_attention_heads: {heads}, num_key_value_heads: {keys}, vocab_size: {vocab}, "
        f"tie_word_embeddings: {tied}}}"
    )
    return {"policy.model_name": "Llama-2-7B", "policy.hf_config_overrides": fields}


def microbatches(tokens: int) -> dict[str, int]:
    """Keys of microbatches of this many tokens."""
    section = "policy.sequence_packing"
    return {f"{section}.train_mb_tokens": tokens, f"{section}.logprob_mb_tokens": tokens}


def megatron(row: Mapping[str, str]) -> dict[str, Any]:
    """Keys of a layout of Megatron."""
    section = "policy.megatron_cfg"
    keys: dict[str, Any] = {
        "policy.dtensor_cfg.enabled": "false",
        f"{section}.enabled": "true",
        f"{section}.tensor_model_parallel_size": row["tensor"],
        f"{section}.pipeline_model_parallel_size": row["pipeline"],
        f"{section}.context_parallel_size": row["context"],
        f"{section}.expert_model_parallel_size": row["experts"],
        f"{section}.sequence_parallel": str(int(row["tensor"]) > 1).lower(),
        f"{section}.recompute": row["recompute"],
    }
    if int(row["experts"]) > 1:
        keys[f"{section}.expert_tensor_parallel_size"] = 1
    if int(row.get("chunks", 1)) > 1:
        keys[f"{section}.virtual_pipeline_model_parallel_size"] = row["chunks"]
    return keys


def dtensor(row: Mapping[str, str]) -> dict[str, Any]:
    """Keys of a layout of DTensor."""
    keys = {
        "tensor_parallel_size": row["tensor"],
        "pipeline_parallel_size": row["pipeline"],
        "pipeline_chunks_per_rank": row["chunks"],
        "expert_parallel_size": row["experts"],
        "recompute": row["recompute"],
        "gradient_accumulation": row["accumulation"],
        "fused_kernels": row["fused"],
    }
    return {f"policy.dtensor_cfg.{key}": value for key, value in keys.items()}


LAYOUTS = {"dtensor": dtensor, "megatron": megatron}
"""Keys of a layout by the backend."""


def training() -> Iterator[Published]:
    """Speeds and peaks of training on full rows."""
    for row in rows_of("training"):
        gpus, per_node, length = int(row["gpus"]), int(row["per_node"]), int(row["length"])
        keys = {
            **shape_of(row["model"]),
            "cluster.gpus_per_node": per_node,
            "cluster.num_nodes": gpus // per_node,
            "policy.max_total_sequence_length": length,
            "policy.train_global_batch_size": row["rows"],
            **microbatches(int(row["micro_rows"]) * length),
            **LAYOUTS[row["backend"]](row),
        }
        name = f"{row['system']}, {row['model']}, rows of {length:,}, {gpus} x {row['device']}, {row['recompute']}"
        if row["lora"]:
            keys |= {"policy.lora_cfg.enabled": "true", "policy.lora_cfg.dim": row["lora"]}
            name += ", LoRA"
        name += ", no fused kernels" if row["fused"] == "false" else ""
        recipe, firsts = "sft-lora" if row["lora"] else "sft-squad", row["first"].partition("|")
        for unit, value, first in ((SPEED, row["tokens_per_second"], firsts[0]), (PEAK, row["peak_gb"], firsts[2])):
            if value:
                lengths = Lengths(None, length)
                source, look = SOURCES[row["source"]], int(row["look"])
                yield Published(name, source, unit, float(value), recipe, row["device"], keys, lengths, look, first)


def steps() -> Iterator[Published]:
    """Steps of GRPO by NeMo RL with Megatron."""
    for row in rows_of("steps"):
        nodes, longest, ahead = int(row["gpus"]) // int(row["per_node"]), int(row["longest"]), row["ahead"] != "0"
        group = 16 if row["model"] == "DeepSeek-V3" else 32
        keys: dict[str, Any] = {
            "policy.model_name": row["model"],
            "cluster.gpus_per_node": row["per_node"],
            "cluster.num_nodes": nodes,
            "policy.max_total_sequence_length": longest,
            "policy.train_global_batch_size": row["batch"],
            **microbatches(longest),
            "policy.generation.max_new_tokens": longest - PROMPT,
            "policy.generation.vllm_cfg.tensor_parallel_size": row["engine"],
            "policy.generation.vllm_cfg.gpu_memory_utilization": 0.8 if ahead else 0.6,
            **megatron(row),
            "grpo.num_prompts_per_step": int(row["rows"]) // group,
            "grpo.num_generations_per_prompt": group,
            "data.max_input_seq_length": PROMPT,
        }
        if ahead:
            keys |= {
                "grpo.async_grpo.enabled": "true",
                "loss_fn.importance.high": 2,
                "policy.generation.colocated.enabled": "false",
                "policy.generation.colocated.resources.num_nodes": nodes // 2,
            }
        how = "one step off" if ahead else "on-policy"
        name = f"NeMo RL {row['version']}, {row['model']}, {row['gpus']} x {row['device']}, {how}, batch {row['batch']}"
        lengths = Lengths(PROMPT, int(row["mean"]) - PROMPT)
        recipe, source = "grpo-math-8b-megatron", SOURCES[row["version"]]
        look, seconds = int(row["look"]), float(row["seconds"])
        yield Published(name, source, STEP, seconds, recipe, row["device"], keys, lengths, look, row["first"])


def engines() -> Iterator[Published]:
    """Tokens that an engine decodes a second, with so many sequences at a time."""
    for row in rows_of("engines"):
        tensor, prompt, completion = int(row["tensor"]), int(row["prompt"]), int(row["completion"])
        resources = "policy.generation.colocated.resources"
        keys = {
            "policy.model_name": row["model"],
            "cluster.gpus_per_node": min(8, 2 * tensor),
            "cluster.num_nodes": 2 if tensor == 8 else 1,
            "policy.max_total_sequence_length": max(2304, prompt + completion),
            "policy.generation.max_new_tokens": completion,
            "policy.generation.vllm_cfg.tensor_parallel_size": tensor,
            "policy.generation.vllm_cfg.max_num_seqs": row["sequences"],
            "grpo.num_prompts_per_step": row["sequences"],
            "grpo.num_generations_per_prompt": 2,
            "policy.train_global_batch_size": 2 * int(row["sequences"]),
            "data.max_input_seq_length": prompt,
            "policy.generation.colocated.enabled": "false",
            **({f"{resources}.num_nodes": 1} if tensor == 8 else {f"{resources}.gpus_per_node": tensor}),
        }
        name = f"{row['system']}, {row['model']}, {tensor} x {row['device']}"
        name += f", {row['sequences']} at a time, {prompt} + {completion} tokens"
        lengths, value = Lengths(prompt, completion, completion), float(row["tokens_per_second"])
        source, look = SOURCES[row["source"]], int(row["look"])
        yield Published(name, source, OUTPUT, value, "grpo-math-8b", row["device"], keys, lengths, look, row["first"])


def cases() -> list[Published]:
    """All figures."""
    return [*training(), *steps(), *engines()]


def rows(found: Iterable[tuple[Published, float]]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of figures."""
    for case, value in found:
        ratio = f"{value / case.value:.2f}"
        yield case.name, case.unit, f"{case.value:,.4g}", f"{value:,.4g}", case.first, ratio, f"[page]({case.source})"


def summary(found: Sequence[tuple[Published, float]]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of ratios by kind and look: their geometric mean, the mean miss up or down, and their range."""
    for look, title in (
        (1, "looked at early"),
        (2, "before the changes"),
        (3, "only after them"),
        (4, "after all of them"),
    ):
        for unit in (SPEED, STEP, OUTPUT, PEAK):
            ratios = sorted(value / case.value for case, value in found if (case.look, case.unit) == (look, unit))
            if ratios:
                logs = [math.log(ratio) for ratio in ratios]
                mean, miss = (math.exp(sum(each) / len(logs)) for each in (logs, map(abs, logs)))
                shown = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
                yield title, unit, str(len(ratios)), f"{mean:.2f}", f"{miss:.2f}", shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="see that it runs: two cases")
    parser.add_argument("--all", action="store_true", help="also the figures of look 3")
    chosen = parser.parse_args()
    found = [(case, figure(planned(case), case.unit)) for case in cases()[: 2 if chosen.quick else None]]
    shown = found if chosen.all else [(case, value) for case, value in found if case.look != 3]
    print(table(("first planned", "figure", "figures", "mean ratio", "mean miss", "range"), list(summary(found))))
    head = ("case", "figure", "published", "planned", "ratio at first", "planned / published", "source")
    print(f"\n{table(head, list(rows(shown)))}")


if __name__ == "__main__":
    main()
