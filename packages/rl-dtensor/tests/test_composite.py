"""The language model of a composite model, trained and exported as a model of its own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import read_weights, write_composite, write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import SGD, make_batch

FACTORY = "dtensor_factories:build"
KINDS = {
    "gemma3": ("gemma3_text", {}),
    "llama4": ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 24, "attention_chunk_size": 4}),
    "mistral3": ("mistral", {"tie_word_embeddings": False}),
    "qwen3_5": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
}


@pytest.mark.parametrize("kind", partly_exhaustive(KINDS, always=["gemma3"]))
def test_it_trains_and_exports_as_the_language_model_alone(ranks, tmp_path, kind):
    family, fields = KINDS[kind]
    language = write_tiny_model(tmp_path / "language", family, **fields)
    composite = write_composite(tmp_path / "composite", kind, language)
    batch, oracle = make_batch((9, 3, 17)), Oracle(language)
    config = ModelConfig(model_name=str(composite), precision="float32", optimizer=SGD)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), 2, tensor_parallel_size=2) as model:
        assert {spec.name for spec in model.manifest(1).tensors} <= read_weights(language).keys()
        found = model.infer(batch, [LOGPROBS])
        expected = oracle.infer(batch, [LOGPROBS])["logprobs"]
        assert found.ragged("logprobs").values == pytest.approx(expected, abs=1e-5)
        metrics = model.train_step(batch, TokenLoss())
        expected = oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        model.export(str(tmp_path / "exported"))
    trained, info = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(info.values()), info
    assert trained.config.model_type == family
    for name, weight in oracle.model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name].double(), weight, rtol=0, atol=1e-5)
