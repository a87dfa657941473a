"""Published peaks and speeds of other systems beside what `rl plan` says of the same model, devices and layout.

    python benchmarks/plan_published.py

No run is started. Each case is a recipe of this project with the model, layout, microbatches and lengths that a page
states. Peaks are compared without the share that a plan leaves to gaps between tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from measurement import table

from rl_core.devices import CUDA
from rl_launch.planning.accelerators import GB, accelerator_named
from rl_launch.planning.plan import GENERATING, TRAINING, Plan, plan_run
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.reading import read_plan

GIB = 2**30
TITAN_H100 = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
NEMO_RL = "https://github.com/NVIDIA-NeMo/RL/blob/r0.4.0/docs/about/performance-summary.md"
QWEN = "https://mintlify.com/QwenLM/Qwen/finetuning/lora"
OWN = "gpu_check.md"


@dataclass(frozen=True)
class Published:
    """A figure of another system.

    Args:
        name: Model, devices and what is special.
        source: Address of the page.
        unit: `tokens/s/GPU`, `step, s` or `peak, GB`.
        value: The figure.
        recipe: Recipe that it is planned with.
        device: Device of the plan.
        overrides: Keys of the recipe that differ.
        lengths: Mean tokens of prompts and completions, or of rows.
    """

    name: str
    source: str
    unit: str
    value: float
    recipe: str
    device: str
    overrides: Mapping[str, Any]
    lengths: Lengths = field(default_factory=Lengths)


def planned(case: Published) -> Plan:
    """Plan a case."""
    overrides = [f"{key}={value}" for key, value in case.overrides.items()]
    plan = read_plan(case.recipe, overrides)
    return plan_run(plan, case.name, accelerator=accelerator_named(case.device), device=CUDA, lengths=case.lengths)


def figure(plan: Plan, unit: str) -> float:
    """The figure of a plan that a published one is compared with."""
    if unit == "peak, GB":
        usage = next(usage for usage in plan.usages if usage.phase == TRAINING)
        return (usage.total - usage.device.get("gaps between tensors", 0.0)) / GB
    if unit == "step, s":
        # Other pages do not count saves.
        own = plan.seconds.get("save", 0.0)
        training = plan.step_seconds - own
        return max(training, plan.seconds.get(GENERATING, 0.0)) if plan.work.staleness else training
    return plan.work.num_tokens / plan.seconds[TRAINING] / plan.num_devices


def supervised(model: str, gpus: int, rows: int, length: int, recompute: str, **more: Any) -> dict[str, Any]:
    """Keys of rows of one length that train all weights, so many on each GPU."""
    return {
        "policy.model_name": model,
        "cluster.gpus_per_node": min(8, gpus),
        "cluster.num_nodes": max(1, gpus // 8),
        "policy.max_total_sequence_length": length,
        "policy.train_global_batch_size": rows * gpus,
        "policy.sequence_packing.train_mb_tokens": rows * length,
        "policy.sequence_packing.logprob_mb_tokens": rows * length,
        "policy.dtensor_cfg.recompute": recompute,
        "policy.dtensor_cfg.gradient_accumulation": "sharded",
        **more,
    }


def titan() -> Iterator[Published]:
    """Pre-training by torchtitan, in bfloat16 with FSDP2 only."""
    for gpus, speed, peak in ((8, 5762, 82.4), (128, 5605, 67.0)):
        keys = supervised("Llama-3.1-8B", gpus, 2, 8192, "selective", **{"policy.dtensor_cfg.fused_kernels": "false"})
        name = f"torchtitan, Llama-3.1-8B, {gpus} H100 of 96 GB and 500 W, selective"
        lengths = Lengths(None, 8192)
        yield Published(name, TITAN_H100, "tokens/s/GPU", speed, "sft-squad", "h100", keys, lengths)
        yield Published(name, TITAN_H100, "peak, GB", peak * GIB / GB, "sft-squad", "h100", keys, lengths)
    for model, rows, length, recompute, speed in (
        ("Llama-3-8B", 1, 8192, "selective", 2973),
        ("Llama-3-70B", 1, 8192, "full", 331),
        ("Llama-2-13B", 2, 4096, "none", 2162),
        ("Llama-2-13B", 2, 4096, "selective", 1904),
        ("Llama-2-70B", 1, 4096, "selective", 355),
        ("Llama-2-70B", 2, 4096, "full", 353),
    ):
        keys = supervised(model, 64, rows, length, recompute)
        name = f"torchtitan, {model}, 64 A100, {recompute}"
        yield Published(name, TITAN_A100, "tokens/s/GPU", speed, "sft-squad", "a100", keys, Lengths(None, length))


def nemo_rl() -> Iterator[Published]:
    """GRPO by NeMo RL with Megatron on DGX H100."""
    for model, is_on, longest, mean, gpus, rows, engine, (tensor, context, expert, stages), seconds in (
        ("Llama-3.1-8B", True, 4096, 1060, 16, 2048, 1, (1, 1, 1, 2), 97.7),
        ("Llama-3.1-8B", False, 4096, 1129, 16, 2048, 1, (1, 1, 1, 2), 74.6),
        ("Qwen3-30B-A3B", True, 4096, 3154, 32, 2048, 4, (2, 1, 8, 1), 225),
        ("Qwen3-30B-A3B", False, 4096, 3158, 32, 2048, 2, (1, 1, 8, 2), 244),
        ("Qwen3-32B", True, 4096, 3206, 32, 2048, 4, (4, 1, 1, 4), 393),
        ("Qwen3-32B", False, 4096, 3207, 64, 2048, 4, (4, 1, 1, 4), 215),
        ("Qwen3-235B-A22B", True, 8192, 5671, 128, 512, 16, (2, 2, 16, 8), 506),
        ("DeepSeek-V3", True, 1536, 745, 256, 512, 32, (1, 1, 16, 16), 154),
    ):
        prompt = 150
        keys: dict[str, Any] = {
            "policy.model_name": model,
            "cluster.gpus_per_node": 8,
            "cluster.num_nodes": gpus // 8,
            "policy.max_total_sequence_length": longest,
            "policy.train_global_batch_size": 512,
            "policy.sequence_packing.train_mb_tokens": longest,
            "policy.sequence_packing.logprob_mb_tokens": longest,
            "policy.generation.max_new_tokens": longest - 512,
            "policy.generation.vllm_cfg.tensor_parallel_size": engine,
            "policy.megatron_cfg.tensor_model_parallel_size": tensor,
            "policy.megatron_cfg.context_parallel_size": context,
            "policy.megatron_cfg.expert_model_parallel_size": expert,
            "policy.megatron_cfg.pipeline_model_parallel_size": stages,
            "policy.megatron_cfg.sequence_parallel": str(tensor > 1).lower(),
            "grpo.num_prompts_per_step": rows // 32,
            "grpo.num_generations_per_prompt": 32,
            "data.max_input_seq_length": 512,
        }
        if not is_on:
            keys |= {
                "grpo.async_grpo.enabled": "true",
                "loss_fn.importance.high": 2,
                "policy.generation.colocated.enabled": "false",
                "policy.generation.colocated.resources.num_nodes": gpus // 16,
            }
        if expert > 1:
            keys["policy.megatron_cfg.expert_tensor_parallel_size"] = 1
        how = "on-policy" if is_on else "one step off"
        name = f"NeMo RL 0.4, {model}, {gpus} H100, {how}"
        lengths = Lengths(prompt, mean - prompt)
        yield Published(name, NEMO_RL, "step, s", seconds, "grpo-math-8b-megatron", "h100", keys, lengths)


def qwen() -> Iterator[Published]:
    """Peaks of adapters of Qwen-7B on one A100 by Qwen's own script, with recomputation of every layer."""
    fields = (
        "{model_type: llama, hidden_size: 4096, intermediate_size: 11008, num_hidden_layers: 32, "
        "num_attention_heads: 32, num_key_value_heads: 32, vocab_size: 151936, tie_word_embeddings: false}"
    )
    for length, peak in ((512, 20.4), (1024, 21.5), (2048, 23.8), (4096, 29.7), (8192, 36.6)):
        keys = supervised("Llama-2-7B", 1, 1, length, "full") | {
            "policy.hf_config_overrides": fields,
            "policy.lora_cfg.enabled": "true",
            "policy.lora_cfg.dim": 64,
        }
        name = f"Qwen, LoRA of Qwen-7B, A100, rows of {length}"
        yield Published(name, QWEN, "peak, GB", peak, "sft-lora", "a100", keys, Lengths(None, length))


def own() -> Iterator[Published]:
    """The two speeds that were found on one H100, of which one was looked at when the host's time was estimated."""
    for fused, speed in ((True, 30190), (False, 24920)):
        keys = supervised("Qwen3-0.6B", 1, 8, 1024, "none") | {"policy.dtensor_cfg.fused_kernels": str(fused).lower()}
        name = f"this project, Qwen3-0.6B, H100, fused kernels {'on' if fused else 'off'}"
        yield Published(name, OWN, "tokens/s/GPU", speed, "sft-squad", "h100", keys, Lengths(None, 1024))


def cases() -> list[Published]:
    """All figures."""
    return [*titan(), *nemo_rl(), *qwen(), *own()]


def rows(found: Sequence[Published]) -> Iterator[tuple[str, ...]]:
    """Rows of the table."""
    for case in found:
        value = figure(planned(case), case.unit)
        link = f"[page]({case.source})"
        yield case.name, case.unit, f"{case.value:,.4g}", f"{value:,.4g}", f"{value / case.value:.2f}", link


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="see that it runs: two cases")
    found = cases()[: 2 if parser.parse_args().quick else None]
    print(table(("case", "figure", "published", "planned", "planned / published", "source"), list(rows(found))))


if __name__ == "__main__":
    main()
