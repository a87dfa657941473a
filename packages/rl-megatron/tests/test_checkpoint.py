"""A run goes on from its checkpoint on every layout as if it had not stopped."""

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, MOONLIGHT, SHARED_KEYS_LAYOUTS, write_family
from restoring import add_history, history, load_counted
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import make_batch

ALL = LAYOUTS | EXPERT_LAYOUTS | SHARED_KEYS_LAYOUTS
# an epsilon that keeps Adam from turning rounding errors of gradients near zero into whole steps
ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-3})
RESUMED = [
    ("qwen3", "tp2", ["pp2 virtual"]),
    ("qwen3_moe", "tp2 ep2+sp", ["pp2"]),
    ("gpt_oss", "tp2 ep2+sp", ["pp2"]),
    pytest.param("gemma3_text", "tp2", ["pp2"], marks=exhaustive),
    pytest.param("qwen3_5_moe_text", "tp2 ep2+sp", ["pp2"], marks=exhaustive),
    pytest.param("qwen3", "tp2", ["tp4+sp"], marks=exhaustive),
    pytest.param("qwen3_moe", "tp2 ep2+sp", ["ep2"], marks=exhaustive),
    pytest.param("qwen3_next", "tp2 ep2+sp", ["pp2"], marks=exhaustive),
    # master weights below resume in the layout that saved them; the other layouts are parts of those above
    pytest.param("qwen3", "tp2", ["tp2", "pp2", "dp2"], marks=exhaustive),
    pytest.param("qwen3_moe", "tp2 ep2+sp", ["dp2"], marks=exhaustive),
]
"""Family, layout of the checkpoint, and layouts that resume from it."""


def open_model(ranks, folder, layout, **settings):
    num_ranks, backend = ALL[layout]
    config = ModelConfig(model_name=str(folder), **{"precision": "float32", "optimizer": ADAMW, **settings})
    return PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **backend)


@pytest.mark.parametrize(("family", "saved", "resumed"), RESUMED)
def test_steps_after_resuming_equal_those_of_an_uninterrupted_run(ranks, tmp_path, family, saved, resumed):
    folder = write_family(tmp_path / "model", family)
    batches = [make_batch(seed=seed) for seed in range(5)]
    with open_model(ranks, folder, saved) as model:
        for batch in batches[:2]:
            model.train_step(batch, TokenLoss())
        model.save(str(tmp_path / "checkpoint"))
        expected = model.train_steps(batches[2:4], TokenLoss())
        logprobs = model.infer(batches[0], [LOGPROBS]).ragged("logprobs").values
    for layout in resumed:
        with open_model(ranks, folder, layout) as model:
            model.train_step(batches[4], TokenLoss())
            model.load(str(tmp_path / "checkpoint"))
            for found, metrics in zip(model.train_steps(batches[2:4], TokenLoss()), expected, strict=True):
                assert found == pytest.approx(metrics, rel=1e-5, abs=1e-5), layout
            found = model.infer(batches[0], [LOGPROBS]).ragged("logprobs").values
            assert found == pytest.approx(logprobs, abs=1e-5), layout


KEPT_GOING = [
    ("glm4_moe", "ep2", {}),
    ("gpt_oss", "ep2", {}),
    ("gemma3_text", "tp2+sp", {}),
    ("qwen3_5_text", "pp2", {}),
    ("qwen3_5_moe_text", "ep2", {}),
    ("glm4_moe_lite", "pp2", {}),
    ("deepseek_v3", "ep2", MOONLIGHT),
]


@pytest.mark.parametrize(("family", "layout", "fields"), partly_exhaustive(KEPT_GOING, always=KEPT_GOING[:1]))
def test_a_resumed_run_is_bit_equal_and_transformers_generates_from_its_export(ranks, tmp_path, family, layout, fields):
    folder = write_family(tmp_path / "model", family, **{"pad_token_id": None, **fields})
    batches = [make_batch(seed=seed) for seed in range(4)]
    runs = {}
    for name in ("whole", "resumed"):
        with open_model(ranks, folder, layout) as model:
            if name == "resumed":
                model.load(str(tmp_path / "checkpoint"))
            else:
                model.train_steps(batches[:2], TokenLoss())
                model.save(str(tmp_path / "checkpoint"))
            runs[name] = model.train_steps(batches[2:], TokenLoss())
            model.export(str(tmp_path / name))
            logprobs = model.infer(batches[0], [LOGPROBS]).ragged("logprobs")
    assert runs["resumed"] == runs["whole"]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in runs]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[1][name].equal(tensor) for name, tensor in weights[0].items())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "resumed", dtype=torch.float32)
    for row, own in zip(batches[0].ragged("tokens"), logprobs, strict=True):
        if len(row) == 1:
            continue
        tokens = torch.as_tensor(np.array(row), dtype=torch.long)[None]
        made = exported.generate(
            tokens[:, :-1], max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        found = made.logits[0].log_softmax(-1)[0, tokens[0, -1]].item()
        assert found == pytest.approx(float(own[-1]), abs=1e-4)


def test_master_weights_of_half_precision_resume_bit_for_bit(ranks, tmp_path):
    folder = write_family(tmp_path / "model", "llama")
    batches = [make_batch(seed=seed) for seed in range(4)]
    with open_model(ranks, folder, "tp2", precision="bfloat16") as model:
        for batch in batches[:2]:
            model.train_step(batch, TokenLoss())
        model.save(str(tmp_path / "checkpoint"))
        expected = model.train_steps(batches[2:], TokenLoss())
    with open_model(ranks, folder, "tp2", precision="bfloat16") as model:
        model.load(str(tmp_path / "checkpoint"))
        assert model.train_steps(batches[2:], TokenLoss()) == expected


def test_what_is_restored_is_read_into_place_without_copies_of_parameters(ranks, tmp_path):
    folder = write_family(tmp_path / "model", "llama")
    with open_model(ranks, folder, "dp2", precision="bfloat16") as model:
        model.train_step(make_batch(), TokenLoss())
        model.save(str(tmp_path / "checkpoint"))
        expected = model.train_steps([make_batch(seed=1)], TokenLoss())
        for made, state, parameters in ranks.run(load_counted, [(str(tmp_path / "checkpoint"),)] * 2):
            assert made < state + parameters / 2, (made, state, parameters)
        assert model.train_steps([make_batch(seed=1)], TokenLoss()) == expected


def test_the_history_of_8_bit_layers_is_each_ranks_own(ranks, tmp_path):
    folder = write_family(tmp_path / "model", "llama")
    with open_model(ranks, folder, "dp2") as model:
        ranks.run(add_history, [()] * 2)
        ranks.run(history, [(3.0,)] * 2)
        model.save(str(tmp_path / "checkpoint"))
        ranks.run(history, [(7.0,)] * 2)
        model.load(str(tmp_path / "checkpoint"))
        assert ranks.run(history, [()] * 2) == [[3.0] * 4, [4.0] * 4]
