"""The language model of a composite model on Megatron."""

import pytest

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import ModelConfig
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import write_composite, write_tiny_model
from rl_core.testing.model_worker import make_batch


def test_it_computes_as_the_language_model_alone(ranks, tmp_path):
    language = write_tiny_model(tmp_path / "language", "mistral", tie_word_embeddings=False)
    composite = write_composite(tmp_path / "composite", "mistral3", language)
    batch = make_batch((9, 3, 17))
    config = ModelConfig(model_name=str(composite), precision="float32")
    with PooledModel(ranks, "megatron_factories:build", config, ModelSpec(), 2, tensor_model_parallel_size=2) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
    assert found == pytest.approx(Oracle(language).infer(batch, [LOGPROBS])["logprobs"], abs=1e-5)
