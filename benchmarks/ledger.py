"""What training real models costs, counted on tensors without data and over ranks that do not exist.

    python benchmarks/ledger.py [PART ...] [--check]

Nothing is timed and no GPU is used, so that the figures are the same on every machine. Each part is computed by the
product's own code for the published shapes of the models, in bfloat16, with torch's flash attention.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu_check.expected import H100
from ledger.attention import attention_costs
from ledger.costs import Costs
from ledger.flash import inner_backward
from ledger.head import head_costs
from ledger.layout import layout_costs
from ledger.phases import Speed, speed_of, trainings
from ledger.pipeline import bubble
from ledger.shapes import SHAPES, config_of
from ledger.step import Workload, layer_costs, model_costs
from measurement import table

from rl_core.data.microbatch import plan_microbatches, shard
from rl_core.torch.training.flops import attention_shapes
from rl_dtensor.config import DTensorConfig

NODE = 8
"""Ranks of a node."""
TOKENS = 8192
"""Of a microbatch."""
WORK = Workload(TOKENS, chunk_size=TOKENS)
"""Of parts that the head is not counted in; in one chunk it takes the fewest operations."""
PAGE = Path(__file__).parents[1] / "docs/profiling.md"
KB, MB, GB = 10**3, 10**6, 10**9

RECOMPUTE: Mapping[str, dict[str, Any]] = {
    "nothing": {"recompute": "none"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}
RANKS = (8, 32, 64, 512)
SMALL = ("Qwen3-8B", "Qwen3-30B-A3B")
"""Models that a few ranks can hold."""
GRPO_COLUMNS = ("loss_mask", "advantages", "generation_logprobs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="see that it runs: the smallest model only")
    parser.add_argument("--check", action="store_true", help=f"compare the part `phases` with {PAGE.name} and end")
    chosen = parser.parse_args()
    if chosen.check:
        check_page(phases(list(SHAPES)))
        return
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]}")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    print(f"{versions}. Microbatches of {TOKENS:,} tokens, which are one row. KB, MB and GB are powers of ten.")
    models = list(SHAPES)[:1] if chosen.quick else list(SHAPES)
    for name in chosen.parts or PARTS:
        print(f"\n{PARTS[name](models)}", flush=True)


def layers(models: Sequence[str]) -> str:
    """Return the table of one layer of each model."""
    rows = []
    for name in models:
        for what, settings in RECOMPUTE.items():
            layer, _ = layer_costs(_alike(name), DTensorConfig(**settings), WORK, num_ranks=8)
            forward, backward = layer.forward, layer.backward
            rows.append(
                (
                    f"{name}, {what}",
                    str(forward.other.kernels + forward.products.kernels),
                    str(backward.other.kernels + backward.products.kernels),
                    _per_token(forward.other.bytes, KB),
                    _per_token(backward.other.bytes, KB),
                    _per_token(layer.training.products.bytes, KB),
                    _per_token(layer.training.flops, MB),
                    _per_token(layer.kept_bytes, KB),
                )
            )
    head = (
        "layer, what is recomputed",
        "kernels forward",
        "backward",
        "KB/token outside products, forward",
        "backward",
        "in products",
        "MFLOP/token",
        "KB/token kept",
    )
    return _titled(
        "Layers",
        "A layer is what a model of two layers costs in excess of a model of one; of DeepSeek-V3 it is one with "
        "experts. Its backward pass includes what is recomputed. *kept* are activations between both passes.",
        table(head, rows),
    )


def heads(models: Sequence[str]) -> str:
    """Return the table of the head of models with 152k tokens."""
    rows = []
    for name in models:
        config = config_of(name)
        for entropy in (False, True):
            for chunk in (1024, 4096):
                costs = head_costs(
                    config.hidden_size,
                    config.vocab_size,
                    TOKENS,
                    chunk_size=chunk,
                    entropy=entropy,
                    temperature=0.7 if entropy else 1.0,
                )
                rows.append(
                    (
                        f"{name}, {'entropy, temperature' if entropy else 'logprobs'}, chunks of {chunk}",
                        _per_token(costs.forward.other.bytes, MB),
                        _per_token(costs.backward.other.bytes, MB),
                        _per_token(costs.training.products.bytes, MB),
                        str(costs.training.other.kernels + costs.training.products.kernels),
                        f"{costs.training.peak_bytes / MB:,.0f}",
                    )
                )
    head = ("head", "MB/token outside products, forward", "backward", "in products", "kernels", "memory, MB")
    return _titled("Head", "`rl_core.torch.heads.logprobs.head_reads`.", table(head, rows))


def attention(models: Sequence[str]) -> str:
    """Return the table of copies around attention."""
    rows = []
    for name in models:
        config = config_of(name)
        # MLA has as many heads of keys as of queries once they are computed
        shape = attention_shapes(config)[0]
        costs = attention_costs(shape, config.num_key_value_heads, TOKENS)
        inner = [
            inner_backward(each, TOKENS, shape.num_heads, config.num_key_value_heads, shape.key_dim)
            for each in ("FA2", "FA3")
        ]
        by_groups = [_per_token(each.by_groups.bytes, KB) for each in inner]
        cells = _per_token(costs.other.bytes, KB), _per_token(inner[0].by_queries.bytes, KB), *by_groups
        rows.append((name, str(costs.other.kernels), *cells))
    head = (
        "model",
        "kernels besides attention",
        "KB/token that they move",
        "gradients by queries in float32",
        "gradients of groups, FA2",
        "FA3",
    )
    return _titled(
        "Attention",
        "Forward and backward, from queries, keys and values to the output; then what the kernels of the backward pass "
        "exchange with one another.",
        table(head, rows),
    )


def microbatch(models: Sequence[str]) -> str:
    """Return the table of waits of the host in one microbatch."""
    costs = layout_costs([TOKENS // 8] * 8, GRPO_COLUMNS)
    rows = [(what, str(count)) for what, count in sorted(costs.waits.items())]
    return _titled(
        "Microbatch",
        f"Waits of the host in a training microbatch of eight packed rows with {len(GRPO_COLUMNS)} columns of the "
        "loss: rows to the device, layout, reads of logprobs and their gradient. Layers are not part of it.",
        table(("what the host waits for", "times"), [*rows, ("all", str(costs.num_waits))]),
    )


def sharding(models: Sequence[str]) -> str:
    """Return the table of FSDP2's collectives."""
    rows = []
    for name in models:
        for num_ranks in RANKS if name in SMALL else RANKS[-2:]:
            for count in (1, 2):
                workload = replace(WORK, num_microbatches=count)
                costs = _whole(name, {"recompute": "full"}, workload, num_ranks)
                rows.append((f"{name}, {num_ranks} ranks", str(count), *_collectives(costs)))
                if (num_ranks, count) == (RANKS[1], 2):
                    kept = _whole(name, {"recompute": "full", "reshard_after": "step"}, workload, num_ranks)
                    rows.append((f"{name}, {num_ranks} ranks, kept gathered", str(count), *_collectives(kept)))
    head = ("model", "microbatches", *COLLECTIVE_HEAD)
    return _titled(
        "Sharding",
        "Collectives of a training step of the whole model before the optimizer, with full recomputation, as one rank "
        "sees them: the whole tensors that are gathered and reduced. *copies* are into and out of their buffers. "
        "*Kept gathered* is `reshard_after: step`.",
        table(head, rows),
    )


def experts(models: Sequence[str]) -> str:
    """Return the table of expert parallelism."""
    rows = []
    for name in [model for model in models if "num_experts_per_tok" in SHAPES[model]]:
        chunked = {"nothing, two chunks": {"recompute": "none", "expert_chunks": 2}}
        for what, settings in {**RECOMPUTE, **chunked}.items():
            backend = DTensorConfig(expert_parallel_size=8, **settings)
            layer, _ = layer_costs(_alike(name), backend, WORK, num_ranks=32)
            exchanged = layer.training.traffic("all_to_all")
            rows.append(
                (
                    f"{name}, {what}",
                    str(exchanged.calls),
                    _per_token(exchanged.bytes, KB),
                    str(layer.training.num_waits),
                    _per_token(layer.training.other.bytes, KB),
                    *_collectives(layer.training),
                )
            )
    head = (
        "layer, what is recomputed",
        "all-to-alls",
        "KB/token",
        "waits of the host",
        "KB/token outside products",
        *COLLECTIVE_HEAD,
    )
    return _titled(
        "Experts",
        "A layer on 32 ranks, experts over 8 of them, forward and backward. Every token goes to experts at random.",
        f"{table(head, rows)}\n\n{_across_nodes(models)}",
    )


def _across_nodes(models: Sequence[str]) -> str:
    """Return the bytes of tokens that leave a node, and that move inside, if each layer's experts are on several."""
    rows = []
    for name in [model for model in models if "num_experts_per_tok" in SHAPES[model]]:
        for num_nodes in (2, 4):
            size = num_nodes * NODE
            for what, node in (("one group", size), ("two levels", NODE)):
                backend = DTensorConfig(expert_parallel_size=size, recompute="none")
                layer, _ = layer_costs(_alike(name), backend, WORK, num_ranks=size, node_size=node)
                crossing = inside = 0
                for kind, moved in layer.training.collectives.items():
                    if kind.name == "all_to_all":
                        leaves = moved.bytes * (num_nodes - 1) // num_nodes if kind.span > NODE else 0
                        crossing, inside = crossing + leaves, inside + moved.bytes - leaves
                waits = str(layer.training.num_waits)
                cells = _per_token(crossing, KB), _per_token(inside, KB), waits
                rows.append((f"{name}, {size} ranks on {num_nodes} nodes, {what}", *cells))
    return table(("layer, all ranks share its experts", "KB/token between nodes", "inside", "waits of the host"), rows)


def tensors(models: Sequence[str]) -> str:
    """Return the table of tensor parallelism."""
    rows = []
    for name in [model for model in models if model == "Llama-70B"]:
        for size in (4, 8):
            for splits in (False, True):
                backend = DTensorConfig(tensor_parallel_size=size, sequence_parallel=splits, recompute="full")
                layer, _ = layer_costs(_alike(name), backend, WORK, num_ranks=64)
                for kind, moved in layer.training.collectives.items():
                    if kind.ranks == size and kind.span == size:
                        rows.append(
                            (
                                f"{name}, {size} ranks{', sequence_parallel' if splits else ''}",
                                kind.name,
                                str(moved.calls),
                                _per_token(moved.bytes, KB),
                            )
                        )
    head = ("layer", "collective", "calls", "KB/token")
    return _titled(
        "Tensor parallelism",
        "A layer with full recomputation, forward and backward, by the tokens of the group.",
        table(head, rows),
    )


def pipeline(models: Sequence[str]) -> str:
    """Return the table of bubbles of pipelines."""
    rows = []
    for what, num_rows, length, dp, size, max_tokens, min_count in (
        ("DeepSeek-V3, 512 rows of 700 tokens", 512, 700, 32, 16, 8192, 0),
        ("DeepSeek-V3, 512 rows of 700 tokens", 512, 700, 32, 16, 1024, 0),
        ("DeepSeek-V3, 512 rows of 700 tokens", 512, 700, 32, 16, 8192, 16),
        ("DeepSeek-V3, 2,048 rows of 2,000 tokens", 2048, 2000, 32, 16, 8192, 0),
        ("DeepSeek-V3, 2,048 rows of 2,000 tokens", 2048, 2000, 32, 16, 8192, 64),
        ("Llama-70B, 512 rows of 2,000 tokens", 512, 2000, 2, 4, 8192, 0),
        ("Llama-70B, 512 rows of 2,000 tokens", 512, 2000, 2, 8, 8192, 0),
    ):
        lengths = np.full(num_rows, length)
        shards = shard(lengths, dp)
        count = max(
            len(plan_microbatches(lengths[rows_], max_tokens=max_tokens, min_count=min_count)) for rows_ in shards
        )
        rows.append(
            (
                what,
                str(dp),
                str(size),
                f"{max_tokens:,}",
                str(min_count or ""),
                str(count),
                f"{bubble(size, count):.0%}",
                f"{bubble(size, count, num_chunks=2):.0%}" if count % size == 0 else "",
            )
        )
    head = ("step", "dp", "pp", "tokens per microbatch", "at least", "microbatches", "bubble", "with two chunks")
    return _titled(
        "Pipelines",
        "Share of the time in which a rank waits for others under 1F1B, from the order of passes of "
        "`rl_dtensor.training.pipeline` (Megatron's schedule is the same) and microbatches of `plan_microbatches`, at "
        "least as many as stated. With two chunks of layers per rank their number is a multiple of the ranks.",
        table(head, rows),
    )


def phases(models: Sequence[str]) -> str:
    """Return the table of the speed of training by phase."""
    found = {name: speed_of(each, H100) for name, each in trainings().items() if each.model in models}
    named = {
        "products": "matrix products of layers",
        "head": "matrix products of the head",
        "attention": "attention",
        "elementwise": "other kernels of layers",
        "head_traffic": "other kernels of the head",
        "copies": "copies of FSDP2",
        "optimizer": "optimizer",
        "sharding": "exchanges of parameters and gradients",
        "tensors": "exchanges of tensor parallelism",
        "experts": "exchanges of tokens with experts",
        "bubble": "pipeline ranks that wait",
        "host": "device that waits for the host",
    }
    rows = [
        (title, *(f"{getattr(speed.phases, name):.1f}" for speed in found.values())) for name, title in named.items()
    ]
    rows.append(("**all, us for each token and GPU**", *(f"{speed.phases.total:,.0f}" for speed in found.values())))
    rows.append(("**tokens/s on each GPU**", *(_short(speed.tokens) for speed in found.values())))
    rows.append(("**MFU**", *(f"{speed.mfu:.0%}" for speed in found.values())))
    return _titled(
        "Phases",
        "Microseconds that a GPU spends on a token, by phase, at the rates of an H100 (`gpu_check/expected.py`).",
        f"{table(('model, GPUs', *found), rows)}\n\n{_choices(found)}",
    )


def _choices(found: Mapping[str, Speed]) -> str:
    rows = []
    for name, speed in found.items():
        settings = speed.settings
        plan = ", ".join(f"{number} {kind}" for kind, number in speed.recompute.items())
        kept = "" if name.split(",")[0] not in SMALL else settings.reshard_after
        rows.append((name, plan, kept, str(speed.launches), f"{speed.host:.0f}"))
    head = ("model, GPUs", "layers by recomputation", "reshard_after", "launches of a layer", "host, us for each token")
    return table(head, rows)


def check_page(printed: str) -> None:
    """Compare the page on profiling with what is printed.

    Raises:
        SystemExit: If the page has other figures.
    """
    rows = [line for line in printed.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    page = PAGE.read_text()
    missing = [line for line in rows if line not in page]
    if missing:
        raise SystemExit(
            f"{PAGE.name} lacks these lines; copy the tables of `ledger.py phases`:\n" + "\n".join(missing)
        )


COLLECTIVE_HEAD = ("all-gathers", "GB", "reduce-scatters", "GB", "copies, GB")


def _collectives(costs: Costs) -> tuple[str, ...]:
    gathered, reduced = costs.traffic("all_gather"), costs.traffic("reduce_scatter")
    return (
        str(gathered.calls),
        _short(gathered.bytes / GB),
        str(reduced.calls),
        _short(reduced.bytes / GB),
        _short(costs.sharding.bytes / GB),
    )


def _whole(name: str, settings: dict[str, Any], workload: Workload, num_ranks: int) -> Costs:
    return model_costs(_alike(name), DTensorConfig(**settings), workload, num_ranks=num_ranks).training


def _alike(name: str) -> Any:
    """Return the config of a model whose layers are all of its most frequent kind."""
    return config_of(name, **({"first_k_dense_replace": 0} if "first_k_dense_replace" in SHAPES[name] else {}))


def _per_token(amount: float, unit: int) -> str:
    return _short(amount / TOKENS / unit)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _titled(title: str, text: str, figures: str) -> str:
    return f"## {title}\n\n{text}\n\n{figures}"


PARTS: dict[str, Callable[[Sequence[str]], str]] = {
    "layers": layers,
    "head": heads,
    "attention": attention,
    "microbatch": microbatch,
    "sharding": sharding,
    "experts": experts,
    "tensors": tensors,
    "pipeline": pipeline,
    "phases": phases,
}

if __name__ == "__main__":
    main()
