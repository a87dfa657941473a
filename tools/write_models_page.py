"""Write `docs/models-on-gpus.md`, the fewest GPUs of each kind that train a model by GRPO, and the tables of models in
`docs/choosing-hardware.md`, as `rl plan` counts them.

python tools/write_models_page.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from rl_core.devices import CUDA
from rl_launch.planning.accelerators import accelerators
from rl_launch.planning.changes import with_values
from rl_launch.planning.plan import Plan, plan_run
from rl_launch.planning.workload import Lengths
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan

PAGE = Path(__file__).parents[1] / "docs" / "models-on-gpus.md"
RECIPE = "grpo-math-8b"
MODELS = (
    "Qwen3-0.6B",
    "Qwen2.5-1.5B",
    "Llama-3.2-3B",
    "Qwen3-4B",
    "Qwen2.5-7B",
    "Llama-3.1-8B",
    "Qwen3-14B",
    "Qwen3-30B-A3B",
    "Qwen3-32B",
    "Llama-3.3-70B",
    "Qwen3-235B-A22B",
)
DEVICES = ("rtx4090", "l40s", "a100", "h100", "h200", "b200")
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENGINES = (1, 2, 4, 8)
ROW = 4096
LENGTHS = Lengths(256, 1024)
HEAD = """# Models on GPUs

This page has the fewest GPUs of each kind that train a model by GRPO, with the engine on the same GPUs, as
[`rl plan`](planning.md) counts them. `tools/write_models_page.py` writes it. Nothing was run for it: it is an estimate,
from the config of `{recipe}` with rows and microbatches of {row:,} tokens, prompts of {prompt:,.0f} and completions of
{completion:,.0f} tokens. [How close estimates are](planning.md#how-close-it-is) shows published figures beside them,
and [Which models on which GPUs](choosing-hardware.md) has the arithmetic.

- *GPUs* shard all parameters (`policy.dtensor_cfg`); mixtures of experts share experts over up to 8 of them.
- *engine* is `policy.generation.vllm_cfg.tensor_parallel_size`.
- *fullest* is the phase that takes most of a GPU, in GB, of which a tenth stays free for gaps between tensors.
- *tokens/s* are those of whole steps, of all GPUs together.
- An empty row needs more than {most} GPUs, or a node whose GPUs do not hold the engine's weights.

For another model or layout: `rl plan RECIPE policy.model_name=MODEL --device NAME --search`.
"""


CHOOSING = PAGE.with_name("choosing-hardware.md")
TRAINED: Mapping[str, str] = {
    "0.5B (Qwen2.5-0.5B)": "Qwen2.5-0.5B",
    "1.5B (Qwen2.5-1.5B)": "Qwen2.5-1.5B",
    "3B (Qwen2.5-3B)": "Qwen2.5-3B",
    "7B (Qwen2.5-7B)": "Qwen2.5-7B",
    "8B (Qwen3-8B)": "Qwen3-8B",
    "14B (Qwen2.5-14B)": "Qwen2.5-14B",
    "32B (Qwen2.5-32B)": "Qwen2.5-32B",
    "70B (Llama 3)": "Llama-3.3-70B",
    "30B-A3B (Qwen3, a mixture of experts)": "Qwen3-30B-A3B",
}
"""Models of the tables of `choosing-hardware.md`."""
SIZES: Mapping[str, str] = {"24 GB": "rtx4090", "48 GB": "l40s", "80 GB": "h100", "141 GB": "h200"}
"""A device of each size of memory."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the pages and end")
    checks = parser.parse_args().check
    for path, text in ((PAGE, page()), (CHOOSING, choosing())):
        if not checks:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.name} is not current: python tools/write_models_page.py")


def choosing() -> str:
    """Return the page `choosing-hardware.md` with its tables of models."""
    text = CHOOSING.read_text(encoding="utf-8")
    models = list(TRAINED.items())
    for head, adapters in (("all weights", False), ("LoRA adapters", True)):
        rows = [
            (label, *(trains_on(model, device, adapters=adapters) for device in SIZES.values()))
            for label, model in models
        ]
        text = with_rows(text, (head, *SIZES), rows)
    sizes = ("model", "training state, all weights", "one checkpoint", "engine's weights", "KV cache for each token")
    return with_rows(text, sizes, [(label.partition(" ")[0], *sizes_of(model)) for label, model in models])


def with_rows(text: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a page with other rows in the table that begins with a head."""
    before, found, after = text.partition(f"| {' | '.join(head)} |\n")
    assert found, head
    rule, _, rest = after.partition("\n")
    body = "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in rows)
    return f"{before}{found}{rule}\n{body}\n{rest[rest.index(chr(10) * 2) + 1 :]}"


def trains_on(model: str, device: str, *, adapters: bool) -> str:
    """Return the fewest GPUs that train a model on given rows if every layer is recomputed; empty if none do."""
    run = base("sft-squad")
    for gpus in GPUS[: GPUS.index(128) + 1]:
        values = {
            "policy.model_name": model,
            "policy.lora_cfg.enabled": adapters,
            "policy.max_total_sequence_length": ROW,
            "policy.sequence_packing.train_mb_tokens": ROW,
            "policy.dtensor_cfg.expert_parallel_size": min(8, gpus) if "-A" in model else 1,
            "policy.dtensor_cfg.recompute": "full",
            "policy.dtensor_cfg.gradient_accumulation": "sharded",
            "cluster.gpus_per_node": min(8, gpus),
            "cluster.num_nodes": max(1, gpus // 8),
        }
        found = plan_run(with_values(run, values), model, accelerator=accelerators()[device], device=CUDA)
        if found.fits:
            return str(gpus)
    return ""


def sizes_of(model: str) -> Iterator[str]:
    """Yield the sizes of a model: its training state, a checkpoint, its weights in bfloat16, and the KV cache of a
    token."""
    values = {"policy.model_name": model, "cluster.gpus_per_node": 1}
    found = plan_run(with_values(base("sft-squad"), values), model, accelerator=accelerators()["h200"], device=CUDA)
    rank = found.roles[0].rank
    assert rank is not None
    assert rank.shape is not None
    yield f"{rank.memory.device / 1e9:,.0f} GB"
    yield f"{found.checkpoint_bytes / 1e9:,.0f} GB"
    yield f"{2 * rank.size.count / 1e9:,.0f} GB"
    yield f"{2 * rank.shape.cache_values(1) / 1e3:.0f} KB"


def page() -> str:
    """Return the whole page."""
    head = HEAD.format(recipe=RECIPE, row=ROW, prompt=LENGTHS.prompt, completion=LENGTHS.completion, most=GPUS[-1])
    sections = [head]
    for device in DEVICES:
        chip = accelerators()[device]
        sections.append(
            f"## {chip.title}\n\n`--device {device}`, {(chip.memory or 0) / 1e9:.0f} GB.\n\n{table(device)}\n"
        )
    return "\n".join(sections)


def table(device: str) -> str:
    """Return the table of a device."""
    lines = [
        "| model | GPUs | engine | fullest | tokens/s | GPUs, LoRA | engine | fullest | tokens/s |",
        "|---|---:|---:|---|---:|---:|---:|---|---:|",
    ]
    for model in MODELS:
        cells = [cell for adapters in (False, True) for cell in fewest(model, device, adapters=adapters)]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fewest(model: str, device: str, *, adapters: bool) -> Iterator[str]:
    """Yield the cells of a model: GPUs, the engine's ranks, the fullest phase and tokens per second."""
    found = first_fit(model, device, adapters=adapters)
    if found is None:
        yield from ("",) * 4
        return
    plan, engine = found
    fullest = plan.fullest
    assert fullest is not None
    yield from (
        str(plan.num_devices),
        str(engine),
        f"{fullest.phase}, {fullest.total / 1e9:.0f}",
        f"{plan.tokens_per_second:,.0f}",
    )


def first_fit(model: str, device: str, *, adapters: bool) -> tuple[Plan, int] | None:
    """Return the plan with the fewest GPUs that fits, with the ranks of a replica; None if none does."""
    run = base(RECIPE)
    for gpus in GPUS:
        for engine in ENGINES:
            if engine > gpus:
                break
            experts = min(8, gpus) if "-A" in model else 1
            values = {
                "policy.model_name": model,
                "policy.lora_cfg.enabled": adapters,
                "policy.max_total_sequence_length": ROW,
                "policy.sequence_packing.train_mb_tokens": ROW,
                "policy.sequence_packing.logprob_mb_tokens": ROW,
                "policy.dtensor_cfg.expert_parallel_size": experts,
                "policy.generation.vllm_cfg.tensor_parallel_size": engine,
                "cluster.gpus_per_node": min(8, gpus),
                "cluster.num_nodes": max(1, gpus // 8),
            }
            found = plan_run(
                with_values(run, values), model, accelerator=accelerators()[device], device=CUDA, lengths=LENGTHS
            )
            if found.fits:
                return found, engine
    return None


@cache
def base(recipe: str) -> RunPlan:
    """Return the run that all rows begin from."""
    return read_plan(recipe)


if __name__ == "__main__":
    main()
