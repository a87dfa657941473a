"""A row's result does not depend on the rows beside it, whatever the type of its rotary embeddings."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig, SequencePackingConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.model_worker import make_batch
from rl_dtensor.model.whole import fix_frequencies

FACTORY = "dtensor_factories:build"
ORIGINAL = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [4.0, 9.0],
    "original_max_position_embeddings": ORIGINAL,
}
TYPES = {
    "longrope": LONGROPE,
    "yarn": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 100.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "linear": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
}


def tiny(folder, kind, positions=64):
    fields = {"rope_parameters": TYPES[kind], "max_position_embeddings": positions}
    return write_tiny_model(folder, "llama", head_dim=4, **fields)


def logprobs_of(folder, rows, *, longest_row):
    """Logprobs of each row of a padded batch in float64, as `[rows][tokens]`."""
    config = AutoConfig.from_pretrained(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float64).eval()
    if longest_row:
        fix_frequencies(hf, longest_row)
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = hf(tokens, attention_mask=mask, position_ids=torch.arange(width)[None], use_cache=False).logits
    return [logits[index, : len(row)] for index, row in enumerate(rows)]


SHORT, LONG = list(range(1, 9)), [token % 11 for token in range(40)]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("longrope", id="longrope [lablup/mlxcel#1358]"),
        "yarn",
        "llama3",
        "linear",
        pytest.param("dynamic", id="dynamic [QwenLM/Qwen#401]"),
    ],
)
def test_a_row_is_the_same_alone_and_beside_a_longer_one(tmp_path, kind):
    folder = tiny(tmp_path, kind)
    alone, beside = (logprobs_of(folder, rows, longest_row=40)[0] for rows in ([SHORT], [SHORT, LONG]))
    torch.testing.assert_close(alone, beside, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("rows", "longest_row"), [pytest.param([SHORT], ORIGINAL, id="short rows [trymirai/lalamo#326]"), ([LONG], 40)]
)
def test_longrope_takes_the_factors_of_the_longest_row_of_the_run(tmp_path, rows, longest_row):
    folder = tiny(tmp_path, "longrope")
    found, expected = logprobs_of(folder, rows, longest_row=longest_row), logprobs_of(folder, rows, longest_row=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_rows_beyond_the_length_of_dynamic_scaling_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rope_type dynamic, beyond 32 tokens; lower policy"):
        logprobs_of(tiny(tmp_path, "dynamic", positions=32), [SHORT], longest_row=33)


@pytest.mark.parametrize("packed", [True, False])
def test_a_trainers_rows_do_not_change_one_another(ranks, tmp_path, packed):
    folder = tiny(tmp_path / "model", "longrope")
    batch = make_batch((8, 40))
    packing = SequencePackingConfig(enabled=packed)
    config = ModelConfig(
        model_name=str(folder), precision="float32", max_total_sequence_length=48, sequence_packing=packing
    )
    rows = [batch.ragged(TOKENS)[index] for index in range(2)]
    with PooledModel(ranks, FACTORY, config, ModelSpec(trains=False), 1) as model:
        together = model.infer(batch, [LOGPROBS]).ragged("logprobs")
        apart = [
            model.infer(Batch({TOKENS: Ragged.from_rows([row], dtype=np.int32)}), [LOGPROBS]).ragged("logprobs")[0]
            for row in rows
        ]
    for index in range(2):
        assert together[index] == pytest.approx(apart[index], abs=1e-5)


def test_weights_that_are_not_finite_are_named(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(model_name=str(folder), precision="float32")
    with pytest.raises(Exception, match=r"not finite: model.layers.0.mlp.up_proj.weight; its files are damaged"):
        PooledModel(ranks, FACTORY, config, ModelSpec(), 1).__enter__()
