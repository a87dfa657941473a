"""Where the time of a training step goes, by phase, from what the ledger counts and the rates of a chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from gpu_check.expected import Chip
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ledger.costs import Collective, Costs
from ledger.flash import inner_backward
from ledger.pipeline import bubble
from ledger.shapes import config_of
from ledger.step import PassCosts, Workload, layer_costs, with_layers
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.torch.training.flops import PEAK_FLOPS, attention_shapes
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.attention import ROWS
from rl_dtensor.model.layers.recompute import CountedMemory
from rl_dtensor.model.whole import decoder_layers
from rl_dtensor.parallel.accumulation import GradientMemory
from rl_dtensor.parallel.dispatch import default_chunks
from rl_dtensor.parallel.experts import expert_modules
from rl_dtensor.parallel.sizes import AxisSizes

NODE = 8
"""Ranks of a node."""
HEAD_CHUNK = 2048
"""Tokens whose logits exist at one time."""
CAPACITY = 80 * 10**9
"""Bytes of an H100."""
ROOM = 64 * 10**9
"""Bytes of an H100 that a training step may take: 80 GB without a tenth for gaps between tensors, and without 8 GB for
contexts, communicators and a sleeping engine."""
ADAMW_BYTES = 28
"""Bytes read and written for each parameter by AdamW in float32: parameter and both moments twice, the gradient
once."""
TP_EXPOSED = 0.4
"""Share of the exchanges of tensor parallelism that products do not hide with `tp_comm_overlap`: those before or after
a product run chunk by chunk next to it, and its first or last chunk runs alone. An estimate, not measured."""


@dataclass(frozen=True)
class Training:
    """A model that trains on some GPUs.

    Args:
        model: Name of its shape.
        gpus: Number of GPUs.
        counted: Settings of the ranks of one pipeline stage, as rl-dtensor counts them.
        num_ranks: Number of ranks of one pipeline stage.
        num_microbatches: Number of microbatches of a rank in a step.
        num_tokens: Number of tokens of a microbatch.
        row: Number of tokens of a row.
        stages: Number of pipeline ranks.
        chunks: Number of chunks of layers on each of them.
        overlaps_tensors: True if exchanges of tensor-parallel ranks run next to products.
        is_sharded: True if FSDP2 shards the parameters; false for Megatron, whose ranks keep theirs and exchange them
            and their gradients once a step.
        fields: Fields of the model's config that differ from the published ones.
    """

    model: str
    gpus: int
    counted: DTensorConfig
    num_ranks: int
    num_microbatches: int
    num_tokens: int = 8192
    row: int = 4096
    stages: int = 1
    chunks: int = 1
    overlaps_tensors: bool = False
    is_sharded: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


class Phases(NamedTuple):
    """Microseconds of a GPU for each token: the time of a step on one GPU, times the GPUs that share a token.

    Args:
        products: Matrix products of layers, with those that are computed again.
        head: Matrix products of the head.
        attention: Attention, with the gradients that groups of heads share.
        elementwise: All other kernels of layers.
        head_traffic: All other kernels outside of layers.
        copies: Copies into and out of the buffers of FSDP2.
        optimizer: Steps of AdamW.
        sharding: Exchanges of parameters and gradients that compute does not hide.
        tensors: Exchanges of tensor-parallel ranks that products do not hide.
        experts: Exchanges of tokens with the ranks of their experts that products do not hide.
        bubble: Waits of pipeline ranks for one another.
        host: Waits of the device for the host.
    """

    products: float
    head: float
    attention: float
    elementwise: float
    head_traffic: float
    copies: float
    optimizer: float
    sharding: float
    tensors: float
    experts: float
    bubble: float
    host: float

    @property
    def total(self) -> float:
        """Microseconds of all phases."""
        return sum(self)


class Speed(NamedTuple):
    """Speed of training.

    Args:
        phases: Where the time goes.
        tokens: Tokens per second and GPU.
        mfu: Share of the peak that model FLOPs take.
        launches: Number of launches of a layer, forward and backward.
        host: Microseconds of the host for each token, whether the device waits for it or not.
        recompute: Number of layers by their recomputation.
        settings: Settings with the choices of the memory.
    """

    phases: Phases
    tokens: float
    mfu: float
    launches: int
    host: float
    recompute: Mapping[str, int]
    settings: DTensorConfig


def trainings() -> dict[str, Training]:
    """Return trainings by name, with the settings of the recipes for models of their size."""
    dense, large = (_recipe(name)["policy"] for name in ("grpo-math-8b", "grpo-math-70b-megatron"))
    megatron = large["megatron_cfg"]
    tensors = megatron["tensor_model_parallel_size"]
    split = DTensorConfig(tensor_parallel_size=tensors, sequence_parallel=megatron["sequence_parallel"])
    return {
        "Qwen3-8B, 8": Training(
            "Qwen3-8B",
            8,
            DTensorConfig(**dense.get("dtensor_cfg", {})),
            8,
            num_microbatches=64,
            num_tokens=dense["sequence_packing"]["train_mb_tokens"],
        ),
        "Qwen3-30B-A3B, 32": Training(
            "Qwen3-30B-A3B", 32, DTensorConfig(expert_parallel_size=8), 32, num_microbatches=16
        ),
        "Llama-70B, 64": Training(
            "Llama-70B",
            64,
            split,
            2 * tensors,
            num_microbatches=64,
            num_tokens=large["sequence_packing"]["train_mb_tokens"],
            stages=megatron["pipeline_model_parallel_size"],
            overlaps_tensors=megatron.get("megatron_kwargs", {}).get("tp_comm_overlap", False),
            is_sharded=False,
        ),
        "DeepSeek-V3, 512": Training(
            "DeepSeek-V3",
            512,
            DTensorConfig(expert_parallel_size=8),
            32,
            num_microbatches=16,
            stages=16,
            is_sharded=False,
            fields={"first_k_dense_replace": 0},
        ),
    }


def _recipe(name: str) -> Any:
    """Read a recipe on top of those that it begins with."""
    # Steps of one backend are counted where the launcher is not installed.
    from omegaconf import OmegaConf

    from rl_launch.recipes import RECIPES

    own = OmegaConf.load(RECIPES / f"{name}.yaml")
    return OmegaConf.merge(_recipe(own.defaults), own) if "defaults" in own else own


def speed_of(training: Training, chip: Chip) -> Speed:
    """Compute how fast a model trains, if kernels reach the rates of a chip.

    Args:
        training: The model and its ranks.
        chip: Rates.
    """
    config = config_of(training.model, **training.fields)
    sizes, recompute = planned(training, config)
    tensors, count, tokens = sizes.tensor_parallel_size, training.num_microbatches, training.num_tokens
    scale = 1e6 * tensors / (tokens * count)
    """From seconds of one rank in a step to microseconds of a GPU per token."""
    shape = attention_shapes(config)[0]
    all_pairs = shape.pair_flops() * tokens**2 / tensors
    pairs = shape.pair_flops() * tokens * (training.row + 1) / 2 / tensors
    groups = inner_backward("FA2", tokens, shape.num_heads, config.num_key_value_heads, shape.key_dim).by_groups

    found = dict.fromkeys(Phases._fields, 0.0)
    exchanged = {"tensors": 0.0, "experts": 0.0, "sharding": 0.0}
    launching, launches = 0.0, 0
    for kind, num_layers in recompute.items():
        backend = sizes.model_copy(update={"recompute": kind})
        first, layer, rest_first, rest = _of_step(config, backend, training)
        found["products"] += num_layers * (first.training.flops - 3.5 * all_pairs) * count / chip.products
        again = pairs / chip.attention_forward["FA2"] if kind == "full" else 0.0
        attending = 3.5 * pairs / chip.attention("FA2") + groups.bytes / tensors / chip.memory_bytes
        found["attention"] += num_layers * count * (attending + again)
        moved = layer.other.bytes
        if not training.is_sharded:
            # Megatron gathers tokens along their first dim, which needs no copy, and adds gradients up in products.
            whole = backend.model_copy(update={"tensor_parallel_size": 1, "sequence_parallel": False})
            plain = first if tensors == 1 else _of_step(config, whole, training)[0]
            moved = count * plain.training.other.bytes // tensors
        found["elementwise"] += num_layers * moved / chip.memory_bytes
        found["copies"] += num_layers * layer.sharding.bytes / chip.memory_bytes
        _add_exchanges(exchanged, layer, num_layers, tensors, chip)
        launching += num_layers * host_seconds(layer, chip)
        launches = max(launches, first.training.num_launches)
        model_flops = 3 * (first.forward.flops - all_pairs + pairs) * config.num_hidden_layers
    found["head"] = count * rest_first.training.flops / chip.products
    found["head_traffic"] = rest.other.bytes / chip.memory_bytes
    found["copies"] += rest.sharding.bytes / chip.memory_bytes
    _add_exchanges(exchanged, rest, 1, tensors, chip)
    launching += host_seconds(rest, chip)

    shared = tensors * training.stages  # GPUs that compute one token
    dense, in_experts = _parameters(config)
    found["optimizer"] = (dense + in_experts) / training.gpus * ADAMW_BYTES / chip.memory_bytes * training.stages
    if not training.is_sharded:
        found["copies"] = 0.0
        # Once a step, a rank exchanges its bfloat16 parameters and float32 gradients with its data-parallel peers.
        held = dense / shared + in_experts / shared / sizes.expert_parallel_size
        found["sharding"] = held * (2 + 4) / chip.network_bytes * training.stages
    else:
        found["sharding"] = max(0.0, exchanged["sharding"] - sum(found.values()))
    found["tensors"] = exchanged["tensors"] * (TP_EXPOSED if training.overlaps_tensors else 1.0)
    chunks = sizes.expert_chunks or default_chunks(tokens // tensors)
    found["experts"] = exchanged["experts"] / chunks  # Products of a chunk hide the exchange of the next.
    share = bubble(training.stages, count, num_chunks=training.chunks) if training.stages > 1 else 0.0
    found["bubble"] = sum(found.values()) * share / (1 - share)
    # Every rank starts its own kernels, those of its own layers, while the group works on the same tokens.
    found["host"] = max(0.0, launching - sum(found.values()))
    phases = Phases(**{name: scale * seconds for name, seconds in found.items()})
    model_flops = model_flops * tensors / tokens + 6 * config.vocab_size * config.hidden_size
    rate = 1e6 / phases.total
    return Speed(phases, rate, model_flops * rate / PEAK_FLOPS["H100"], launches, scale * launching, recompute, sizes)


def _add_exchanges(exchanged: dict[str, float], costs: Costs, times: int, tensors: int, chip: Chip) -> None:
    for kind, moved in costs.collectives.items():
        name = "sharding"
        if kind.name == "all_to_all":
            name = "experts"
        elif tensors > 1 and kind.span == kind.ranks == tensors:
            name = "tensors"
        exchanged[name] += times * exchange_seconds(kind, moved.bytes, chip)


def host_seconds(costs: Costs, chip: Chip) -> float:
    """Time in which the host starts all kernels, with the code between them."""
    return (costs.num_launches - costs.operators) * chip.launch_seconds + costs.operators * chip.operator_seconds


def overlapped(segments: list[tuple[float, float]]) -> float:
    """Return the duration of parts of a step that follow one another, whose kernels the host starts while the device
    computes.

    A kernel starts when the host has started it and the device has finished the one before. In a part both work at
    an even rate.

    Args:
        segments: Seconds of the host and of the device in each part.
    """
    started = finished = 0.0
    for host, device in segments:
        finished = max(max(started, finished) + device, started + host)
        started += host
    return finished


def exchange_seconds(kind: Collective, num_bytes: int, chip: Chip) -> float:
    """Return the duration of a collective that reaches the bandwidth of the links between its ranks.

    Args:
        kind: Collective and its group.
        num_bytes: Bytes that it moves, as the ledger counts them.
        chip: Rates.
    """
    rounds = 2 if kind.name == "all_reduce" else 1
    moved = rounds * num_bytes * (kind.ranks - 1) / kind.ranks
    if kind.span <= NODE:
        return moved / chip.node_bytes
    # A ring enters and leaves a node by the network adapters of its own ranks there; an exchange by each rank's own.
    adapters = 1 if kind.name == "all_to_all" else max(1, kind.ranks * NODE // kind.span)
    return moved / min(chip.node_bytes, adapters * chip.network_bytes)


def _of_step(
    config: PreTrainedConfig, backend: DTensorConfig, training: Training
) -> tuple[PassCosts, Costs, PassCosts, Costs]:
    """Return the costs of a layer in one microbatch and in a step, and likewise of all except the layers.

    The first microbatch of a step may gather what the others use.
    """
    work = Workload(training.num_tokens, chunk_size=HEAD_CHUNK)
    (one, two), (rest_one, rest_two) = zip(
        *(
            layer_costs(
                config, backend, replace(work, num_microbatches=each), num_ranks=training.num_ranks, node_size=NODE
            )
            for each in (1, 2)
        ),
        strict=True,
    )
    more = training.num_microbatches - 1
    layer, rest = (
        sum((second.training - first.training for _ in range(more)), first.training)
        for first, second in ((one, two), (rest_one, rest_two))
    )
    return one, layer, rest_one, rest


def _parameters(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the numbers of parameters outside of experts and in experts, of a model whose layers are alike."""
    counts = []
    for num_layers in (1, 2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(with_layers(config, num_layers))
        all_of = sum(each.numel() for each in model.parameters())
        stacked = sum(each.numel() for module in expert_modules(model) for each in module.parameters())
        counts.append((all_of - stacked, stacked))
    (dense, experts), (denser, more) = counts
    others = config.num_hidden_layers - 1
    return dense + others * (denser - dense), experts + others * (more - experts)


def planned(training: Training, config: PreTrainedConfig) -> tuple[DTensorConfig, dict[str, int]]:
    """Make the choices that are left to the memory as a run on GPUs of 80 GB makes them.

    Args:
        training: The model and its ranks.
        config: Config of the model.

    Returns:
        The settings with the choices, and the number of layers by their recomputation.
    """
    backend = training.counted
    if backend.recompute != "auto":
        return backend, {backend.recompute: config.num_hidden_layers}
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ROWS)
    packing = SequencePackingConfig(enabled=True, train_mb_tokens=training.num_tokens)
    model = ModelConfig(model_name="m", max_total_sequence_length=training.num_tokens, sequence_packing=packing)
    staged = backend.model_copy(update={"pipeline_parallel_size": training.stages})
    mesh: Any = SimpleNamespace(rank=0, sizes=AxisSizes.of(staged, training.gpus))
    memory = CountedMemory.of(model, staged, hf, decoder_layers(hf), mesh=mesh, trained=set(hf.parameters()))
    state = sum(memory.parts.get(name, 0) for name in ("weights", "gradients", "optimizer state"))
    keeps_whole = backend.gradient_accumulation == "unsharded"
    if backend.gradient_accumulation == "auto":
        keeps_whole = GradientMemory(state, memory.whole_gradients).fits(CAPACITY)
    plan, keeps_gathered, _ = memory.plan(ROOM, keeps_whole=keeps_whole)
    choices = {
        "reshard_after": "step" if keeps_gathered else "layer",
        "gradient_accumulation": "unsharded" if keeps_whole else "sharded",
    }
    stages = config.num_hidden_layers / memory.num_layers
    counts = {"full": round(plan.num_full * stages), "selective": round(plan.num_selective * stages)}
    counts["none"] = config.num_hidden_layers - sum(counts.values())
    return backend.model_copy(update=choices), {kind: number for kind, number in counts.items() if number}
