"""Models whose files hold 8-bit weights load as the same models in full precision do."""

import json

import numpy as np
import torch
from layouts import EXPERT_LAYOUTS, write_family
from safetensors.torch import load_file, save_file

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.testing.model_worker import make_batch


def write_8_bit(folder, target):
    """The model with 8-bit projections as DeepSeek-V3 is published, and beside it what they stand for."""
    exact, published = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        exact[name] = published[name] = tensor
        if name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            published[name] = (tensor / scale).to(torch.float8_e4m3fn)
            published[f"{name}_scale_inv"] = scale.expand(1, 1).contiguous()
            exact[name] = published[name].float() * scale
    config = json.loads((folder / "config.json").read_text())
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for name, tensors, fields in (("exact", exact, {}), ("published", published, {"quantization_config": quantised})):
        (target / name).mkdir()
        save_file(tensors, target / name / "model.safetensors", metadata={"format": "pt"})
        (target / name / "config.json").write_text(json.dumps({**config, **fields}))
    return target / "exact", target / "published"


def test_a_published_8_bit_model_is_read_and_exported_in_full_precision(ranks, tmp_path):
    (tmp_path / "source").mkdir()
    exact, published = write_8_bit(write_family(tmp_path / "source", "deepseek_v3"), tmp_path)
    batch = make_batch()
    num_ranks, settings = EXPERT_LAYOUTS["tp2 ep2+sp"]
    config = ModelConfig(model_name=str(published), precision="float32")
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), num_ranks, **settings) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export(str(tmp_path / "exported"))
    expected = Oracle(exact).infer(batch, [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(tensor.equal(exported[name]) for name, tensor in load_file(exact / "model.safetensors").items())


def test_a_head_that_the_files_hold_apart_is_not_tied(ranks, tmp_path):
    folder = write_family(tmp_path, "qwen3", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(model_name=str(folder), precision="float32")
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 2) as model:
        found = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        assert dict(model.manifest(1).tied) == {}
    expected = Oracle(folder).infer(make_batch(), [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
