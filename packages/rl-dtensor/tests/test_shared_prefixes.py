"""Rows that share what they begin with train as separate rows do, with fewer tokens computed."""

import numpy as np
import pytest
import torch
from dtensor_factories import PlainLoss
from transformers import AutoConfig

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import WorkerError
from rl_core.model import ENTROPY, LOGPROBS, VALUES, ModelSpec, logprobs_at
from rl_core.model_config import LoraConfig, ModelConfig, SequencePackingConfig
from rl_core.rollouts.group import ROUTED_EXPERTS
from rl_core.selfcheck.losses import ReturnsLoss, TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.testing.exhaustive import exhaustive
from rl_dtensor.selfcheck import MESHES, write_tiny

DELTA_RULE = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "chunk_size": 8,
    "moe_shared_expert_intermediate_size": 24,
}


def grouped(prompt, completion, *, num_groups=2, num_rows=4, seed=0):
    """Groups of rows with the same prompt, whose completions are of different lengths and also begin alike."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_groups):
        beginning = rng.integers(0, 101, prompt)
        rows += [np.concatenate([beginning, rng.integers(0, 3, completion - row)]) for row in range(num_rows)]
    return batch_of(rows, rng, first=prompt)


def agents(num_turns=10, *, turn=6, seed=0):
    """Segments of an agent's rollout: each turn continues the history, and every third is left again."""
    rng, rows = np.random.default_rng(seed), []
    history = rng.integers(0, 101, 2 * turn)
    for number in range(num_turns):
        said = np.concatenate([history, rng.integers(0, 101, turn + number % 3)])
        rows.append(said)
        history = history if number % 3 == 2 else said
    return batch_of([rows[index] for index in rng.permutation(num_turns)], rng, first=2 * turn)


def batch_of(rows, rng, first):
    tokens = Ragged.from_rows(rows, dtype=np.int32)
    place = np.concatenate([np.arange(len(row)) for row in rows])
    return Batch(
        {
            TOKENS: tokens,
            "loss_mask": tokens.like(place >= first),
            "weights": tokens.like(rng.normal(size=len(place)).astype(np.float32)),
            "candidates": tokens.like(rng.integers(-1, 101, (len(place), 3)).astype(np.int32)),
            "returns": tokens.like(rng.normal(size=len(place)).astype(np.float32)),
        }
    )


def passes(
    ranks,
    folder,
    batch,
    *,
    shares,
    mesh="1",
    loss=None,
    role="policy",
    backend=None,
    reads=(LOGPROBS, ENTROPY),
    **fields,
):
    """Reads of a batch, the gradient of a step, and its metrics on each rank."""
    num_ranks, settings = MESHES[mesh][0], {**MESHES[mesh][1], **(backend or {})}
    size = int(batch.lengths.sum()) + 64
    packing = SequencePackingConfig(train_mb_tokens=size, logprob_mb_tokens=size, shared_prefixes=shares)
    config = ModelConfig(
        model_name=str(folder), precision="float32", sequence_packing=packing, max_grad_norm=None, **fields
    )
    with PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(role=role), num_ranks, **settings) as model:
        columns = model.infer(batch, reads).columns
        split = model._rows_per_shard(batch)
        calls = [(batch.select(split[place.on("dp")]), loss or PlainLoss()) for place in model._coordinates]
        found = ranks.run("dtensor_factories:gradients", calls)
    gradients = {name: grad for grads, _ in found for name, grad in grads.items()}
    return columns, gradients, next(metrics for _, metrics in found if metrics)


def exact_gradients(folder, batch):
    """Return the gradients of `PlainLoss` in float64, by the name of the parameter, from one row at a time."""
    model = Oracle(folder)
    model.loss(batch, PlainLoss()).backward()
    return {name: each.grad for name, each in model.model.named_parameters() if each.grad is not None}


def farthest(gradients, reference):
    """Return the largest difference from the reference, and the name of its parameter."""
    assert gradients.keys() == reference.keys()
    return max((float((gradients[name] - each).abs().max()), name) for name, each in reference.items())


def assert_equal(ranks, folder, batch, reference=None, **options):
    """Assert that rows that share prefixes are as near to the reference gradients as separate rows are.

    Args:
        reference: Gradients by name; those of separate rows if not given.

    Returns:
        The share of the tokens that was not computed.
    """
    apart, together = (passes(ranks, folder, batch, shares=shares, **options) for shares in (False, True))
    for name, column in apart[0].items():
        np.testing.assert_allclose(together[0][name].values, column.values, rtol=0, atol=1e-5)
    reference = reference or apart[1]
    rounding = 1e-6 * max(1.0, *(float(grad.abs().max()) for grad in reference.values()))
    # Some families amplify the rounding of float32, with and without sharing.
    assert farthest(together[1], reference)[0] <= max(rounding, 1.5 * farthest(apart[1], reference)[0])
    assert together[2]["loss"] == pytest.approx(apart[2]["loss"], rel=1e-5)
    assert "shared_tokens" not in apart[2]
    return together[2]["shared_tokens"]


@pytest.mark.parametrize(
    ("family", "fields", "mesh"),
    [
        ("qwen3", {}, "fsdp2"),
        ("gemma3_text", {}, "tp2+sp"),  # windows
        ("qwen3_next", DELTA_RULE, "1"),  # states, and experts
        *(pytest.param("qwen3", {}, mesh, marks=exhaustive) for mesh in MESHES if mesh not in ("fsdp2", "ep2 x fsdp2")),
        *(
            pytest.param(family, fields, "1", marks=exhaustive)
            for family, fields in (
                ("llama", {}),
                ("mistral", {}),
                ("gemma2", {}),
                ("gpt_oss", {}),
                ("llama4_text", {}),
                ("deepseek_v3", {}),
                ("nemotron_h", MAMBA),
                ("minimax", {}),
                ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
                ("falcon_h1", {}),
            )
        ),
        pytest.param("qwen3_moe", {}, "ep2 x fsdp2", marks=exhaustive),
        pytest.param("qwen3_next", DELTA_RULE, "cp2", marks=exhaustive),
        pytest.param("qwen3_next", DELTA_RULE, "tp2+sp", marks=exhaustive),
    ],
)
def test_rows_that_share_prefixes_train_as_separate_rows_do(ranks, tmp_path, family, fields, mesh):
    folder = write_tiny(AutoConfig.for_model(family, **fields), tmp_path / "model")
    for batch in (grouped(24, 9), agents()):
        assert assert_equal(ranks, folder, batch, exact_gradients(folder, batch), mesh=mesh) > 0.3


@exhaustive  # 9216 tokens in float32.
@pytest.mark.parametrize("mesh", ["fsdp2", "tp2"])
def test_a_group_of_long_prompts_trains_as_separate_rows_do(ranks, tmp_path, mesh):
    config = AutoConfig.for_model("qwen3", max_position_embeddings=1024)
    folder, batch = write_tiny(config, tmp_path / "model"), grouped(512, 64, num_rows=8)
    assert assert_equal(ranks, folder, batch, mesh=mesh) == pytest.approx(7 * 512 / (8 * 576), abs=0.02)


@exhaustive
def test_compiled_layers_share_prefixes(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    ranks.run("dtensor_factories:compile_by", [("eager",)])
    try:
        assert assert_equal(ranks, folder, agents(), backend={"compile": True}) > 0.3
    finally:
        ranks.run("dtensor_factories:count_compiled", [()])


@exhaustive
def test_tokens_that_went_to_other_experts_are_not_shared(ranks, tmp_path):
    folder, batch = write_tiny(AutoConfig.for_model("qwen3_moe"), tmp_path / "model"), grouped(24, 9)
    tokens = batch.ragged(TOKENS)
    experts = np.stack([tokens.values % 4, (tokens.values + 1) % 4], -1)[:, None].repeat(2, 1).astype(np.int16)
    replayed, shares = {"moe_router_replay": True}, []
    for row in (None, 1):
        if row is not None:
            experts[tokens.offsets[row]] = [2, 0]
        batch = batch.with_columns({ROUTED_EXPERTS: tokens.like(experts)})
        shares.append(assert_equal(ranks, folder, batch, backend=replayed))
    assert shares[0] > shares[1] > 0.3


@pytest.mark.parametrize(
    ("loss", "role", "reads"),
    [
        (TokenLoss(sequence_weight=0.0), "policy", (LOGPROBS, logprobs_at("candidates"))),
        (ReturnsLoss(), "critic", (VALUES,)),
    ],
)
def test_reads_with_columns_and_values_are_those_of_each_row(ranks, tmp_path, loss, role, reads):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    assert assert_equal(ranks, folder, agents(), loss=loss, role=role, reads=reads) > 0.3


@pytest.mark.parametrize(
    ("fields", "settings", "problem"),
    [
        ({"lora_cfg": LoraConfig(enabled=True, dropout=0.1)}, {}, "set lora_cfg.dropout to 0"),
        ({"hf_config_overrides": {"attention_dropout": 0.1}}, {}, "set hf_config_overrides.attention_dropout to 0"),
    ],
)
def test_a_model_whose_rows_cannot_share_is_refused_or_computes_separate_rows(
    ranks, tmp_path, fields, settings, problem
):
    folder, batch = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model"), agents(4)
    with pytest.raises(WorkerError, match=rf"shared_prefixes: .*{problem}"):
        passes(ranks, folder, batch, shares=True, **fields)
    assert "shared_tokens" not in passes(ranks, folder, batch, shares="auto", **fields)[2]


def test_rows_that_share_nothing_train_to_the_last_bit_as_without_sharing(ranks, tmp_path):
    folder = write_tiny(AutoConfig.for_model("qwen3"), tmp_path / "model")
    rng = np.random.default_rng(0)
    batch = batch_of([np.concatenate([[row], rng.integers(0, 101, 9 + row)]) for row in range(6)], rng, first=2)
    apart, together = (passes(ranks, folder, batch, shares=shares) for shares in (False, "auto"))
    for name, grad in apart[1].items():
        assert torch.equal(together[1][name], grad)
    assert together[2]["shared_tokens"] == 0.0
