"""GPUs that a model needs if every layer is recomputed, by the count from which a run plans its memory.

    python benchmarks/hardware.py

Nothing is timed and no GPU is used: models are built on tensors without data, and memory is counted by the code of the
DTensor backend, for bfloat16, AdamW and microbatches of one row.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Mapping
from typing import Any

import torch
from ledger.shapes import config_of
from measurement import table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl_core.model_config import ModelConfig
from rl_core.torch.training.memory import GAPS
from rl_core.torch.training.recompute import ActivationMemory, max_tokens
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.recompute import RankParameters, activations_of, plans_of
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.sizes import AxisSizes

ROW = 4096
"""Tokens of a row, and of a microbatch."""
DEVICES = (24, 48, 80, 141)
"""Memory of common GPUs, in GB."""
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
GB = 10**9
PER_PARAMETER = (16, 14, 2)
"""Bytes of training state (float32 weights, gradients and two moments), of a checkpoint (without gradients, with the
bfloat16 files for transformers), and of the weights in bfloat16."""


def _qwen2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, *, tied: bool) -> Any:
    return AutoConfig.for_model(
        "qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )


MODELS: Mapping[str, Any] = {
    "Qwen2.5-0.5B": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "Qwen2.5-1.5B": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "Qwen2.5-3B": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "Qwen2.5-7B": _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "Qwen3-8B": config_of("Qwen3-8B"),
    "Qwen2.5-14B": _qwen2(5120, 13824, 48, 40, 8, 152064, tied=False),
    "Qwen2.5-32B": _qwen2(5120, 27648, 64, 40, 8, 152064, tied=False),
    "Llama-70B": config_of("Llama-70B"),
    "Qwen3-30B-A3B": config_of("Qwen3-30B-A3B"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="see that it runs: the smallest model only")
    names = list(MODELS)[:1] if parser.parse_args().quick else list(MODELS)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    print(f"{versions}. Microbatches of {ROW:,} tokens. GB are powers of ten; empty: more than {RANKS[-1]} GPUs.\n")
    models = {name: _model(MODELS[name]) for name in names}
    sizes = [f"{size} GB" for size in DEVICES]
    head = ("model", *(f"all weights, {size}" for size in sizes), *(f"LoRA, {size}" for size in sizes))
    print(table(head, [(name, *_fewest(name, hf)) for name, hf in models.items()]))
    head = ("model", "parameters", "training state", "checkpoint", "weights", "KB of KV cache per token")
    print(f"\n{table(head, [(name, *_sizes(hf)) for name, hf in models.items()])}")


def _model(config: Any) -> PreTrainedModel:
    config._attn_implementation = ROWS
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _fewest(name: str, hf: PreTrainedModel) -> list[str]:
    """The fewest GPUs of each size that train a model, with all weights and with adapters; all shard its parameters."""
    config = ModelConfig(model_name=name, max_total_sequence_length=ROW, train_micro_batch_size=1)
    layers = decoder_layers(hf)
    memory = ActivationMemory(activations_of(hf, layers, tensor_ranks=1, splits_tokens=False), max_tokens(config, 1), 1)
    activations = memory.size(plans_of(len(layers))[-1])

    def taken(ranks: int, *, trains_all: bool) -> int:
        experts = min(ranks, 8) if any(expert_modules(hf)) else 1
        backend = DTensorConfig(expert_parallel_size=experts, gradient_accumulation="sharded")
        trained = set(hf.parameters()) if trains_all else set()
        parameters = RankParameters.of(hf, layers, len(layers), AxisSizes.of(backend, ranks), trained)
        return activations + sum(parameters.bytes_besides(config, backend).values())

    return [
        str(next((ranks for ranks in RANKS if taken(ranks, trains_all=trains) <= (1 - GAPS) * size * GB), ""))
        for trains in (True, False)
        for size in DEVICES
    ]


def _sizes(hf: PreTrainedModel) -> tuple[str, ...]:
    count, config = sum(each.numel() for each in hf.parameters()), hf.config
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * heads * torch.bfloat16.itemsize
    return (f"{count / GB:.1f}B", *(f"{count * each / GB:,.0f} GB" for each in PER_PARAMETER), f"{cache / 1000:.0f}")


if __name__ == "__main__":
    main()
