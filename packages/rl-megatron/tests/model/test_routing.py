"""Experts are balanced over the tokens of a batch, whatever padding and company for other ranks lies beside them."""

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family

from rl_core.model import ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import read_weights
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import LAYOUTS as BATCHINGS
from rl_core.testing.model_worker import make_batch, poison
from rl_megatron.model.routing import balancing_loss

ALL = LAYOUTS | EXPERT_LAYOUTS
PLAIN = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 1.0})
RECOMPUTED = {"recompute": "full"}
FIXED = {"fixed_length_microbatches": True}
COEFFICIENT = 0.1
RATE = 0.25
ROWS = (7, 3, 18)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: write_family(tmp_path_factory.mktemp(family), family) for family in ("qwen3_moe", "deepseek_v3")}


def open_model(ranks, folder, layout, batching, *, precision="float32", **options):
    num_ranks, backend = ALL[layout]
    config = ModelConfig(
        model_name=str(folder),
        precision=precision,
        max_grad_norm=None,
        max_total_sequence_length=32,
        optimizer=PLAIN,
        **BATCHINGS[batching],
    )
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **backend, **options)


def uncounted(lengths):
    """A batch whose tokens count for nothing in the policy's loss, which leaves the model to the balancing loss."""
    batch = make_batch(lengths)
    return batch.with_columns({"loss_mask": batch.ragged("tokens").like(np.zeros(sum(lengths), dtype=np.int8))})


def routed(oracle, batch):
    """Of each layer with experts, row by row, what its router returns in transformers."""
    found = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, at=number: found.setdefault(at, []).append(out))
        for number, layer in enumerate(oracle.model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    for row in batch.ragged("tokens"):
        oracle.model(input_ids=torch.as_tensor(np.asarray(row), dtype=torch.long)[None])
    for hook in hooks:
        hook.remove()
    return found


def switch_loss(probabilities, chosen):
    """`experts / (k tokens^2) sum over experts of (tokens sent there) (sum of its probabilities)`."""
    (num_tokens, num_experts), k = probabilities.shape, chosen.shape[1]
    sent = torch.bincount(chosen.flatten(), minlength=num_experts)
    return num_experts / (k * num_tokens**2) * (sent * probabilities.sum(0)).sum()


def balanced_step(folder, batch, groups):
    """Loss of each layer, the mean over groups of rows weighed by their tokens, and the parameters one step later."""
    oracle = Oracle(folder)
    losses = []
    for rows in routed(oracle, batch).values():
        logits, chosen = [row[0] for row in rows], [row[2] for row in rows]
        total = sum(len(row) for row in logits)
        losses.append(
            sum(
                sum(len(logits[row]) for row in group)
                * switch_loss(
                    torch.cat([logits[row] for row in group]).softmax(-1), torch.cat([chosen[i] for i in group])
                )
                for group in groups
            )
            / total
        )
    (COEFFICIENT * sum(losses)).backward()
    with torch.no_grad():
        for parameter in oracle.model.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    return [float(loss.detach()) for loss in losses], dict(oracle.model.named_parameters())


BALANCED = [
    ("aux_loss", "tp1", "padded-3", ROWS, {}),
    ("aux_loss", "tp2+sp", "packed-whole", ROWS, {}),
    ("aux_loss", "tp2+sp", "padded-3", ROWS, RECOMPUTED),
    ("aux_loss", "pp2", "padded-3", ROWS, {}),
    ("aux_loss", "cp2", "packed-whole", ROWS, {}),
    ("aux_loss", "ep2", "packed-16", (9,), FIXED),
    ("aux_loss", "dp2", "padded-3", (9,), {}),
    ("seq_aux_loss", "tp1", "packed-16", ROWS, FIXED),
    ("seq_aux_loss", "tp1", "padded-3", ROWS, RECOMPUTED),
    ("seq_aux_loss", "dp2", "packed-16", ROWS, {}),
    ("seq_aux_loss", "cp2", "padded-3", ROWS, {}),
    ("seq_aux_loss", "tp2 ep2+sp", "packed-whole", ROWS, {}),
    ("seq_aux_loss", "pp2 virtual", "padded-1", ROWS, {}),
]
FIRST = {
    ("aux_loss", "tp2+sp", "padded-3"),
    ("aux_loss", "cp2", "packed-whole"),
    ("seq_aux_loss", "tp2 ep2+sp", "packed-whole"),
    ("seq_aux_loss", "pp2 virtual", "padded-1"),
}
"""Cases that have every split of a model between them."""


@pytest.mark.parametrize(
    ("kind", "layout", "batching", "lengths", "options"),
    partly_exhaustive(BALANCED, always=[case for case in BALANCED if case[:3] in FIRST]),
)
def test_a_balancing_loss_is_that_of_the_rows(ranks, folders, tmp_path, kind, layout, batching, lengths, options):
    folder, batch = folders["qwen3_moe"], uncounted(lengths)
    each = [[row] for row in range(len(lengths))]
    losses, stepped = balanced_step(folder, batch, each if kind == "seq_aux_loss" else [list(range(len(lengths)))])
    balance = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": COEFFICIENT, "moe_per_layer_logging": True}
    with open_model(ranks, folder, layout, batching, **balance, **options) as model:
        metrics = model.train_step(batch, TokenLoss())
        model.export(str(tmp_path))
    expected = {f"load_balancing_loss_layer_{layer}": loss for layer, loss in enumerate(losses)}
    expected["load_balancing_loss"] = sum(losses) / len(losses)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["loss"] == 0
    exported = dict(Oracle(tmp_path).model.named_parameters())
    for name, parameter in stepped.items():
        np.testing.assert_allclose(exported[name].detach(), parameter.detach(), atol=1e-6, rtol=1e-5, err_msg=name)
    before = read_weights(folder)
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert all((exported[name].detach() - before[name]).abs().max() > 1e-4 for name in routers)


@pytest.mark.parametrize("layout", partly_exhaustive(["tp1", "pp2", "ep2", "tp2 ep2+sp"], always=["pp2", "tp2 ep2+sp"]))
def test_a_balancing_loss_has_the_loss_scale_of_float16(ranks, folders, tmp_path, layout):
    folder, batch = folders["qwen3_moe"], uncounted(ROWS)
    losses, stepped = balanced_step(folder, batch, [[row] for row in range(len(ROWS))])
    balance = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": COEFFICIENT}
    with open_model(ranks, folder, layout, "packed-whole", precision="float16", **balance) as model:
        metrics = model.train_step(batch, TokenLoss())
        while metrics["overflows"]:
            metrics = model.train_step(batch, TokenLoss())
        model.export(str(tmp_path))
    assert metrics["loss_scale"] > 1
    assert metrics["load_balancing_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-2)
    before, exported = read_weights(folder), dict(Oracle(tmp_path).model.named_parameters())
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    steps = [(stepped[name] - before[name]).norm().item() for name in routers]
    errors = [(exported[name] - stepped[name]).norm().item() for name in routers]
    assert np.array(errors) == pytest.approx(0, abs=0.02 * max(steps))


BIASED = [
    ("tp1", "padded-3", ROWS, {}),
    ("tp2+sp", "packed-whole", ROWS, {}),
    ("cp2", "padded-3", ROWS, {}),
    ("dp2", "packed-16", (9,), FIXED),
    ("ep2", "padded-1", ROWS, {}),
]


@pytest.mark.parametrize(
    ("layout", "batching", "lengths", "options"), partly_exhaustive(BIASED, always=[BIASED[1], BIASED[3]])
)
def test_expert_biases_follow_the_tokens_of_the_batch(ranks, folders, tmp_path, layout, batching, lengths, options):
    folder, batch = folders["deepseek_v3"], make_batch(lengths)
    before = read_weights(folder)
    with torch.no_grad():
        sent = routed(Oracle(folder), batch)
    with open_model(ranks, folder, layout, batching, moe_router_bias_update_rate=RATE, **options) as model:
        model.train_step(batch, TokenLoss())
        model.export(str(tmp_path))
    after = read_weights(tmp_path)
    for layer, rows in sent.items():
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        counts = torch.bincount(torch.cat([row[2] for row in rows]).flatten(), minlength=len(before[name])).double()
        expected = before[name] + RATE * (counts.mean() - counts).sign()
        torch.testing.assert_close(after[name], expected.float(), rtol=0, atol=1e-6)


def test_a_skipped_step_leaves_the_expert_biases(ranks, folders, tmp_path):
    with open_model(ranks, folders["deepseek_v3"], "ep2", "packed-16", moe_router_bias_update_rate=RATE) as model:
        assert model.train_step(poison(make_batch(ROWS)), TokenLoss())["skipped_steps"] == 1
        model.export(str(tmp_path))
    before, after = read_weights(folders["deepseek_v3"]), read_weights(tmp_path)
    assert all(after[name].equal(before[name]) for name in before)


def test_routers_need_no_transformer_engine_whatever_the_shim_does(ranks, folders):
    ranks.run("megatron_factories:forget_engine", [()])
    with open_model(ranks, folders["qwen3_moe"], "tp1", "packed-16") as model:
        assert model.train_step(make_batch(ROWS), TokenLoss())["grad_norm"] > 0


def test_segments_are_balanced_each_by_itself():
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(12, 4, generator=generator, dtype=torch.float64).softmax(-1)
    chosen = scores.topk(2).indices
    routing_map = torch.zeros(12, 4, dtype=torch.bool).scatter(1, chosen, True)
    segments = torch.tensor([1, 0, 2, 2, 0, 1, 1, 2, 2, 0, 2, 4])
    expected = sum(
        int((segments == number).sum()) * switch_loss(scores[segments == number], chosen[segments == number])
        for number in (1, 2, 4)
    )
    found = balancing_loss(scores, routing_map, segments, 4, topk=2, group=None)
    torch.testing.assert_close(found, expected)
    even = torch.full((4, 4), 0.25)
    one_each = torch.eye(4, dtype=torch.bool)
    assert balancing_loss(even, one_each, torch.ones(4, dtype=torch.long), 1, topk=1, group=None) == 4


def test_padding_alone_weighs_nothing():
    scores = torch.rand(5, 4, requires_grad=True)
    none = torch.zeros(5, dtype=torch.long)
    loss = balancing_loss(scores, torch.ones(5, 4, dtype=torch.bool), none, 1, topk=4, group=None)
    loss.backward()
    assert loss == 0
    assert not scores.grad.any()
