"""The costs of training real shapes stay within budgets.

A change that lowers a cost lowers its budget; one that raises a cost says why. `benchmarks/ledger.py` prints all
figures, and `benchmarks/results/ledger.md` explains them.
"""

import math
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from ledger.attention import attention_costs
from ledger.head import head_costs
from ledger.layout import layout_costs
from ledger.pipeline import bubble
from ledger.shapes import SHAPES, config_of
from ledger.step import Workload, layer_costs, pass_costs

from rl_core.data.microbatch import plan_microbatches, shard
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.torch.training.flops import attention_shapes
from rl_dtensor.config import DTensorConfig, Float8Config
from rl_dtensor.model.layers import low_precision

TOKENS = 8192
KB, MB = TOKENS * 10**3, TOKENS * 10**6
"""Per token of a microbatch."""

LAYERS = {
    # forward: kernels besides matrix products, and KB per token that they move; backward, without recomputation; KB per
    # token that are kept between both
    "Qwen3-8B": (6, 169, 15, 303, 138),
    "Qwen3-30B-A3B": (23, 170, 32, 243, 115),
    "Llama-70B": (6, 357, 14, 620, 275),
    "DeepSeek-V3": (58, 1084, 71, 2028, 552),
}
FLOAT8 = {
    # a layer of Qwen3-8B, forward and backward: kernels besides matrix products, and KB per token that they move; KB
    # per token that are kept between both
    "tensorwise": (82, 1041, 121),
    "rowwise": (75, 930, 122),
    "rowwise_with_gw_hp": (67, 803, 138),
}
LAUNCHES = {"Qwen3-8B": (18, 40), "Qwen3-30B-A3B": (35, 57), "Llama-70B": (18, 39), "DeepSeek-V3": (74, 102)}
"""Operations that the host starts for a layer, forward and backward, without recomputation: kernels, copies and
collectives. A launch with the code around it costs the host tens of microseconds, which small models and mixtures wait
for."""
OPERATORS = {"Qwen3-8B": 8, "Qwen3-30B-A3B": 12, "Llama-70B": 8, "DeepSeek-V3": 16}
"""Calls of own operators among them, which cost the host several times as much."""
HEAD = {
    # entropy and temperature, chunk: MB per token that kernels besides matrix products move forward and backward
    (False, 1024): (0.4, 1.5),
    (False, 4096): (0.4, 1.5),
    (True, 1024): (0.4, 1.5),
    (True, 4096): (0.4, 1.5),
}
ATTENTION = {"Qwen3-8B": 1, "Qwen3-30B-A3B": 1, "DeepSeek-V3": 313}
"""KB per token that kernels besides attention itself move, from queries, keys and values to the output and back."""
WAITS = 0
"""Of the host in a microbatch of a model without experts, with two columns besides the tokens."""
GATHERS, REDUCTIONS = (2, 2), (1, 2)
"""Of a layer, and of the rest of the model, in each microbatch."""
KEPT_GATHERS = 3
"""Of a model with one layer in a step: of the layer, the embedding and the end, if they stay gathered."""
PADDING = 2.0
"""Gathered bytes relative to those of the experts, on twice as many ranks as experts."""
EXCHANGES, EXCHANGED, EXPERT_WAITS = 7, 90, 1
"""Of a layer with expert parallelism: all-to-alls, KB per token that they move, and waits, without recomputation. A
token goes once to each rank that has experts of it, with the ids and weights of its choices, whose gradients return."""
CHUNK_LAUNCHES, CHUNK_BYTES = 65, 1.1e9
"""Of a layer with expert parallelism for a second chunk of tokens, forward and backward; see `MIN_CHUNKED_TOKENS` of
`rl_dtensor.parallel.dispatch`."""
BUBBLE = 0.89
"""DeepSeek-V3 on 512 ranks, 16 of which are a pipeline, with 512 rows of 700 tokens."""


WORK = Workload(TOKENS, chunk_size=TOKENS)


@cache
def layer(name, *, ranks=8, **settings):
    """Costs of a layer, and of the rest of the model; of DeepSeek-V3 of one with experts."""
    alike = {"first_k_dense_replace": 0} if name == "DeepSeek-V3" else {}
    backend = DTensorConfig(**{"recompute": "none"} | settings)
    return layer_costs(config_of(name, **alike), backend, WORK, num_ranks=ranks)


def one_layer(name, *, ranks=8, num_microbatches=1, reshard_after="layer", **changes):
    """Costs of a model with one layer."""
    config = config_of(name, num_hidden_layers=1, **changes)
    work = replace(WORK, num_microbatches=num_microbatches)
    return pass_costs(config, DTensorConfig(recompute="none", reshard_after=reshard_after), work, num_ranks=ranks)


@pytest.mark.parametrize("name", partly_exhaustive(SHAPES, always=["Qwen3-8B", "Qwen3-30B-A3B"]))
def test_a_layer_stays_within_its_budget(name):
    costs, _ = layer(name)
    found = (
        costs.forward.other.kernels,
        costs.forward.other.bytes / KB,
        costs.backward.other.kernels,
        costs.backward.other.bytes / KB,
        costs.kept_bytes / KB,
    )
    assert all(cost <= budget for cost, budget in zip(found, LAYERS[name], strict=True)), found
    assert costs.training.num_waits == 0


@pytest.mark.parametrize("recipe", partly_exhaustive(FLOAT8, always=["rowwise"]))
def test_a_layer_in_float8_stays_within_its_budget(monkeypatch, recipe):
    monkeypatch.setattr(low_precision, "device_problem", lambda: "")
    costs, _ = layer.__wrapped__("Qwen3-8B", float8=Float8Config(enabled=True, recipe=recipe))
    plain, _ = layer("Qwen3-8B")
    found = costs.training.other.kernels, costs.training.other.bytes / KB, costs.kept_bytes / KB
    assert all(cost <= budget for cost, budget in zip(found, FLOAT8[recipe], strict=True)), found
    assert costs.training.products.kernels == plain.training.products.kernels
    assert costs.training.flops == plain.training.flops


@pytest.mark.parametrize("name", partly_exhaustive(SHAPES, always=["Qwen3-8B", "Qwen3-30B-A3B"]))
def test_a_layer_launches_no_more_than_budgeted(name):
    costs, _ = layer(name)
    found = costs.forward.num_launches, costs.backward.num_launches
    assert all(count <= budget for count, budget in zip(found, LAUNCHES[name], strict=True)), found
    assert costs.training.operators <= OPERATORS[name]


def test_shapes_are_those_of_the_published_models():
    for name, billions in {"Qwen3-8B": 8.2, "Qwen3-30B-A3B": 30.5, "Llama-70B": 70.6}.items():
        costs, rest = (part.forward.traffic("all_gather").bytes // 2 for part in layer(name))
        assert round((costs * SHAPES[name]["num_hidden_layers"] + rest) / 1e9, 1) == billions


def test_products_are_those_of_the_matrices_and_of_attention():
    config = config_of("Qwen3-8B")
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    matrices = hidden * (heads + 2 * keys) + heads * hidden + 3 * hidden * config.intermediate_size
    forward = 2 * TOKENS * matrices + 4 * TOKENS**2 * heads
    costs, _ = layer("Qwen3-8B")
    assert costs.forward.flops == forward
    # flash attention computes its scores again
    assert costs.backward.flops == 2 * forward + 2 * TOKENS**2 * heads


def test_recomputation_costs_a_forward_pass_and_keeps_the_input():
    plain, _ = layer("Qwen3-8B")
    full, _ = layer("Qwen3-8B", recompute="full")
    assert full.kept_bytes == 2 * config_of("Qwen3-8B").hidden_size * TOKENS
    again = full.training.other.bytes - plain.training.other.bytes
    # the last sum with the residual is not needed again
    assert 0.8 * plain.forward.other.bytes < again <= plain.forward.other.bytes


@pytest.mark.parametrize(("entropy", "chunk"), HEAD)
def test_the_head_stays_within_its_budget(entropy, chunk):
    config = config_of("Qwen3-8B")
    temperature = 0.7 if entropy else 1.0
    costs = head_costs(
        config.hidden_size, config.vocab_size, TOKENS, chunk_size=chunk, entropy=entropy, temperature=temperature
    )
    found = costs.forward.other.bytes / MB, costs.backward.other.bytes / MB
    assert all(cost <= budget for cost, budget in zip(found, HEAD[entropy, chunk], strict=True)), found


@pytest.mark.parametrize("name", ATTENTION)
def test_copies_around_attention_stay_within_their_budget(name):
    config = config_of(name)
    costs = attention_costs(attention_shapes(config)[0], config.num_key_value_heads, TOKENS)
    assert costs.products.kernels == 2
    assert costs.other.bytes / KB <= ATTENTION[name]


def test_a_microbatch_makes_the_host_wait_no_more_often_than_budgeted():
    few, many = (layout_costs([1024] * num_rows, ("loss_mask", "advantages")) for num_rows in (2, 8))
    assert few.waits == many.waits
    assert many.num_waits <= WAITS, many.waits


def test_collectives_of_a_microbatch_stay_within_their_budget():
    for part, gathers, reductions in zip(layer("Qwen3-30B-A3B"), GATHERS, REDUCTIONS, strict=True):
        assert part.training.traffic("all_gather").calls <= gathers
        assert part.training.traffic("reduce_scatter").calls <= reductions
    kept = one_layer("Qwen3-30B-A3B", num_microbatches=3, reshard_after="step").training
    assert kept.traffic("all_gather").calls <= KEPT_GATHERS
    twice = one_layer("Qwen3-30B-A3B", num_microbatches=2).training
    assert twice.traffic("all_gather").calls <= 2 * sum(GATHERS)
    assert twice.traffic("reduce_scatter").calls <= 2 * sum(REDUCTIONS)


def test_more_ranks_than_experts_gather_no_more_than_budgeted():
    ranks, num_experts, vocab = 32, 16, 1024
    found = one_layer("Qwen3-30B-A3B", ranks=ranks, num_experts=num_experts, vocab_size=vocab).forward
    config = config_of("Qwen3-30B-A3B")
    hidden, heads, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    experts = num_experts * 3 * hidden * config.moe_intermediate_size
    others = hidden * (2 * vocab + 2 * (heads + keys) * config.head_dim + num_experts)
    assert experts + others <= found.traffic("all_gather").bytes / 2 <= 1.01 * (PADDING * experts + others)


def test_expert_parallelism_stays_within_its_budget():
    costs, _ = layer("Qwen3-30B-A3B", ranks=8, expert_parallel_size=8)
    exchanged = costs.training.traffic("all_to_all")
    assert exchanged.calls <= EXCHANGES
    assert exchanged.bytes / KB <= EXCHANGED
    assert costs.training.num_waits <= EXPERT_WAITS, costs.training.waits


def test_a_second_chunk_of_tokens_costs_no_more_than_budgeted():
    one, two = (layer("Qwen3-30B-A3B", ranks=8, expert_parallel_size=8, expert_chunks=count)[0] for count in (1, 2))
    added = two.training - one.training
    assert added.traffic("all_to_all").calls + added.other.kernels + added.products.kernels <= CHUNK_LAUNCHES
    assert added.other.bytes + added.products.bytes <= CHUNK_BYTES
    exchanged = [each.training.traffic("all_to_all").bytes for each in (one, two)]
    assert exchanged[1] == pytest.approx(exchanged[0], rel=1e-4)
    assert two.training.num_waits <= EXPERT_WAITS, two.training.waits


def test_experts_are_recomputed_without_waiting_again():
    costs, _ = layer("Qwen3-30B-A3B", ranks=8, expert_parallel_size=8, recompute="full")
    assert costs.training.num_waits <= EXPERT_WAITS, costs.training.waits


def test_tokens_cross_to_another_node_once():
    experts = {"expert_parallel_size": 16}
    num_experts, num_chosen, hidden = (
        getattr(config_of("Qwen3-30B-A3B"), name) for name in ("num_experts", "num_experts_per_tok", "hidden_size")
    )
    share = 1 - math.comb(num_experts // 2, num_chosen) / math.comb(num_experts, num_chosen)
    costs, _ = layer_costs(
        config_of("Qwen3-30B-A3B"), DTensorConfig(recompute="none", **experts), WORK, num_ranks=16, node_size=8
    )
    crossing = [
        moved for kind, moved in costs.training.collectives.items() if kind.name == "all_to_all" and kind.span > 8
    ]
    # tokens to both nodes and results from them, and gradients likewise; counts and choices are small
    tokens = 4 * 2 * share * 2 * hidden
    assert tokens <= sum(moved.bytes for moved in crossing) / TOKENS <= 1.1 * tokens
    assert costs.training.num_waits <= EXPERT_WAITS, costs.training.waits


def agent_segments(num_turns, turn):
    """Rows of an agent's turns, each of which continues the history; every third is left again."""
    history, rows = [0] * turn, []
    for number in range(1, num_turns + 1):
        rows.append([*history, *[number] * turn])
        history = history if number % 3 == 0 else rows[-1]
    return rows


@pytest.mark.parametrize("rows", [[[0] * 512 + [row] * 64 for row in range(8)], agent_segments(10, 100)])
def test_products_of_rows_with_shared_prefixes_are_those_of_their_distinct_tokens(rows):
    work = Workload(sum(map(len, rows)), rows=rows)
    distinct = len({tuple(row[: end + 1]) for row in rows for end in range(len(row))}) / work.num_tokens
    config, backend = config_of("Qwen3-8B", num_hidden_layers=1), DTensorConfig(recompute="none")
    apart, together = (
        pass_costs(config, backend, replace(work, shares_prefixes=shares), num_ranks=8).training
        for shares in (False, True)
    )
    assert 0.8 * distinct <= together.flops / apart.flops <= 1.1 * distinct
    assert together.num_waits == apart.num_waits == 0


@pytest.mark.parametrize("settings", [{"pipeline_parallel_size": 2}, {"compile": True}])
def test_what_is_not_counted_is_refused(settings):
    with pytest.raises(ValueError, match=f"dtensor_cfg.{next(iter(settings))} is "):
        layer("Qwen3-8B", **settings)


@pytest.mark.parametrize(("size", "num_microbatches", "num_chunks"), [(4, 6, 1), (16, 2, 1), (4, 8, 2), (2, 4, 3)])
def test_a_bubble_is_that_of_the_formula(size, num_microbatches, num_chunks):
    """Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021)."""
    share = (size - 1) / (num_chunks * num_microbatches)
    assert bubble(size, num_microbatches, num_chunks=num_chunks) == pytest.approx(share / (1 + share))


def test_the_bubble_of_a_large_mixture_stays_within_its_budget():
    lengths = [700] * 512
    plans = [plan_microbatches([700] * len(rows), max_tokens=8192) for rows in shard(lengths, 512 // 16)]
    assert bubble(16, max(map(len, plans))) <= BUBBLE


@exhaustive
def test_times_by_phase_on_the_page_on_profiling_are_those_of_the_ledger():
    ledger = Path(__file__).parents[3] / "benchmarks/ledger.py"
    done = subprocess.run([sys.executable, ledger, "phases", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
