"""Models whose classes come with their files: trained, sampled from and exported if their code is the trusted one."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest

from rl_core import (
    LOGPROBS,
    GenerationConfig,
    GenerationRequest,
    ModelConfig,
    ModelSpec,
    OptimizerConfig,
    Placement,
    SamplingParams,
    WorkerError,
)
from rl_core.errors import ConfigError
from rl_core.facts.model_code import code_digest
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.oracle import Oracle
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.model_worker import make_batch
from rl_dtensor import HFConfig, HFGenerator

SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05})

CONFIGURATION = """
from transformers import LlamaConfig


class OddConfig(LlamaConfig):
    model_type = "odd_llama"
"""

MODELING = """
from transformers import LlamaForCausalLM

from .configuration_odd import OddConfig


class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


@pytest.fixture
def plain(tmp_path):
    """A Llama model."""
    return write_tiny_model(tmp_path / "plain", "llama")


@pytest.fixture
def odd(tmp_path, plain):
    """The same weights as a type that only its own code has."""
    folder = tmp_path / "odd"
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    classes = {"AutoConfig": "configuration_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    config |= {"model_type": "odd_llama", "architectures": ["OddForCausalLM"], "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_odd.py").write_text(CONFIGURATION)
    (folder / "modeling_odd.py").write_text(MODELING)
    return folder


def config_of(folder, digest):
    return ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, trust_remote_code=digest)


def test_it_trains_and_is_exported_with_its_code(ranks, plain, odd, tmp_path):
    oracle, batch = Oracle(plain), make_batch()
    config = config_of(odd, code_digest(odd))
    with PooledModel(ranks, "dtensor_factories:build", config, ModelSpec(), 2) as model:
        for _ in range(2):
            expected = oracle.train_step(batch, TokenLoss(), SGD, 1.0)
            assert model.train_step(batch, TokenLoss())["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        logprobs = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export(str(tmp_path / "exported"))
    np.testing.assert_allclose(logprobs, oracle.infer(batch, [LOGPROBS])["logprobs"], atol=1e-4)
    script = (
        "import sys, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "print(type(model).__name__, model.config.model_type)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "exported")], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == ["OddForCausalLM", "odd_llama"]


def test_it_is_sampled_from(plain, odd):
    def sampled(folder, digest):
        async def run():
            generator = HFGenerator(GenerationConfig(), HFConfig(), config_of(folder, digest), Placement("cpu"))
            await generator.start()
            request = GenerationRequest(np.array([5, 6, 7], np.int32), SamplingParams(max_new_tokens=5), seed=3)
            completion = await generator.generate(request)
            await generator.close()
            return completion.token_ids.tolist(), completion.logprobs.tolist()

        return asyncio.run(run())

    assert sampled(odd, code_digest(odd)) == sampled(plain, None)


def test_other_code_than_the_trusted_one_is_not_run(ranks, odd, tmp_path):
    digest = code_digest(odd)
    (odd / "modeling_odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + MODELING)
    with pytest.raises(
        WorkerError, match=r"the digest of its code \(configuration_odd.py, modeling_odd.py\) is sha256"
    ):
        PooledModel(ranks, "dtensor_factories:build", config_of(odd, digest), ModelSpec(), 2)
    generator = HFGenerator(GenerationConfig(), HFConfig(), config_of(odd, digest), Placement("cpu"))
    with pytest.raises(ConfigError, match="Nothing of it was run"):
        asyncio.run(generator.start())
    assert not (tmp_path / "ran").exists()
