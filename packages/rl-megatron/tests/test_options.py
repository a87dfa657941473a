"""Options that change how a step is computed, not what it computes, and those of a mixture of experts."""

import numpy as np
import pytest
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family

from rl_core.errors import WorkerError
from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import PairLoss, ReturnsLoss, TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import read_weights
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch, make_pairs

ALL = LAYOUTS | EXPERT_LAYOUTS
FOLDERS = ("llama", "qwen3_moe", "deepseek_v3")
PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_family(tmp_path_factory.mktemp(family), family) for family in FOLDERS}


def open_model(ranks, folder, layout, role="policy", settings=None, **options):
    num_ranks, backend = ALL[layout]
    config = ModelConfig(
        model_name=str(folder), **{"precision": "float32", "max_grad_norm": 0.5, "optimizer": PLAIN, **(settings or {})}
    )
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(role=role), num_ranks, **backend, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"recompute": "full"}),
        ("llama", {"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]}),
        ("qwen3_moe", {"recompute": "selective"}),
    ],
)
def test_recomputation_changes_no_step(ranks, folders, family, options):
    steps = []
    for changed in ({}, options):
        with open_model(ranks, folders[family], "tp1", **changed) as model:
            steps.append(model.train_steps([make_batch()] * 2, TokenLoss()))
    assert steps[1] == [pytest.approx(metrics, rel=1e-6) for metrics in steps[0]]


def test_frozen_routers_stay_and_the_rest_moves(ranks, folders, tmp_path):
    with open_model(ranks, folders["qwen3_moe"], "ep2", freeze_moe_router=True) as model:
        model.train_step(make_batch(), TokenLoss())
        model.save(str(tmp_path / "checkpoint"))
        model.load(str(tmp_path / "checkpoint"))
        model.export(str(tmp_path / "step"))
    before, after = read_weights(folders["qwen3_moe"]), read_weights(tmp_path / "step")
    moved = {name for name in before if not before[name].equal(after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert routers
    assert not moved & routers
    assert moved | routers == set(before)


HEADS = [(layout, role) for layout in ("tp2+sp", "pp2", "cp2") for role in ("critic", "reward_model")]


@pytest.mark.parametrize(
    ("layout", "role"),
    partly_exhaustive(
        HEADS, always=[("tp2+sp", "critic"), ("pp2", "critic"), ("pp2", "reward_model"), ("cp2", "critic")]
    ),
)
def test_heads_of_one_output_train_as_in_one_process(ranks, folders, tmp_path, layout, role):
    batch, loss = (make_batch(), ReturnsLoss()) if role == "critic" else (make_pairs(), PairLoss())
    with open_model(ranks, folders["llama"], layout, role=role) as model:
        model.export(str(tmp_path / "start"))
        oracle = Oracle(tmp_path / "start", role)
        expected = oracle.train_step(batch, loss, PLAIN, 0.5)
        found = model.train_step(batch, loss)
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        model.export(str(tmp_path / "step"))
    stepped = dict(Oracle(tmp_path / "step", role).model.named_parameters())
    for name, parameter in oracle.model.named_parameters():
        np.testing.assert_allclose(stepped[name].detach(), parameter.detach(), atol=1e-5, rtol=1e-5, err_msg=name)


def test_experts_on_tensor_parallel_ranks_need_sequence_parallelism(ranks, folders):
    with pytest.raises(WorkerError, match="needs sequence_parallel=true"):
        open_model(ranks, folders["qwen3_moe"], "tp2")


def test_router_biases_move_only_where_a_rate_is_set(ranks, folders, tmp_path):
    before = read_weights(folders["deepseek_v3"])
    for rate in (0.0, 0.25):
        with open_model(ranks, folders["deepseek_v3"], "tp1", moe_router_bias_update_rate=rate) as model:
            model.train_step(make_batch(), TokenLoss())
            model.export(str(tmp_path / str(rate)))
        after = read_weights(tmp_path / str(rate))
        biases = [name for name in before if name.endswith("e_score_correction_bias")]
        assert biases
        for name in biases:
            steps = (after[name] - before[name]).abs()
            assert ((steps == 0) | (steps == rate)).all()
            assert bool(steps.any()) == bool(rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp8_cfg": {"enabled": True}}, "needs Transformer Engine on CUDA"),
        ({"moe_router_bias_update_rate": 0.1}, "have no biases"),
        ({"moe_router_replay": True}, "has no experts"),
    ],
)
def test_what_cannot_run_is_refused_saying_what_is_missing(ranks, folders, options, message):
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folders["llama"], "tp1", **options)


REDUCED = [("llama", "dp2"), ("qwen3_moe", "ep2"), ("llama", "pp2 virtual")]


@pytest.mark.parametrize(("family", "layout"), partly_exhaustive(REDUCED, always=[("qwen3_moe", "ep2")]))
def test_gradients_that_are_reduced_during_the_backward_pass_are_the_same(ranks, folders, family, layout):
    settings = {"sequence_packing": {"train_mb_tokens": 16}}
    steps = []
    for overlaps in (False, True):
        reduction = {"overlap_grad_reduce": overlaps}
        with open_model(
            ranks, folders[family], layout, settings=settings, distributed_data_parallel_config=reduction
        ) as model:
            steps.append(model.train_steps([make_batch(seed=seed) for seed in range(3)], TokenLoss()))
    assert steps[0] == steps[1]


def test_gradients_in_half_precision_are_near_those_in_float32(ranks, folders):
    norms = {}
    for in_float32 in (True, False):
        reduction = {"grad_reduce_in_fp32": in_float32}
        with open_model(
            ranks,
            folders["llama"],
            "dp2",
            settings={"precision": "bfloat16"},
            distributed_data_parallel_config=reduction,
        ) as model:
            norms[in_float32] = model.train_step(make_batch(), TokenLoss())["grad_norm"]
    assert norms[True] != norms[False]
    assert norms[False] == pytest.approx(norms[True], rel=0.02)


OVERLAPPED = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "tp2 ep2+sp": EXPERT_LAYOUTS["tp2 ep2+sp"],
    "pp2 virtual ep2": (
        4,
        {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("layout", partly_exhaustive(list(OVERLAPPED), always=["pp2 virtual ep2"]))
def test_exchanges_of_tokens_under_another_microbatch_change_no_step(ranks, folders, monkeypatch, layout):
    monkeypatch.setitem(ALL, layout, OVERLAPPED[layout])
    settings = {"precision": "bfloat16", "sequence_packing": {"train_mb_tokens": 16}}
    steps = []
    for kwargs in ({}, {"overlap_moe_expert_parallel_comm": True}):
        with open_model(
            ranks, folders["qwen3_moe"], layout, settings=settings, recompute="none", megatron_kwargs=kwargs
        ) as model:
            steps.append(model.train_steps([make_batch(seed=seed) for seed in range(2)], TokenLoss()))
    assert steps[0] == steps[1]
