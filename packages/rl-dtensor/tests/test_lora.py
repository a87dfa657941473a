"""peft computes with an exported adapter as the run did that trained it."""

import warnings

import numpy as np
import pytest
from peft import PeftModel

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, SCORES, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.testing.losses import PairLoss, TokenLoss
from rl_core.testing.model_worker import make_batch, make_pairs
from rl_core.testing.pooled_model import PooledModel
from rl_core.testing.torch.oracle import Oracle
from rl_core.testing.torch.tiny_model import write_tiny_model
from rl_dtensor.selfcheck import MESHES

SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.5})
ATTENTION = LoraConfig(enabled=True, match_all_linear=False, target_modules=["q_proj", "self_attn.v_proj"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def open_model(ranks, folder, mesh, lora, spec=None):
    num_ranks, settings = MESHES[mesh]
    config = ModelConfig(model_name=str(folder), precision="float32", optimizer=SGD, lora_cfg=lora)
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, spec or ModelSpec(), num_ranks, **settings)


def with_adapter(oracle, folder):
    """The oracle with the adapter that peft loads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*adapter keys")  # of factors that are missing
        oracle.model = PeftModel.from_pretrained(oracle.model, folder).merge_and_unload()
    return oracle


@pytest.mark.parametrize(
    ("mesh", "lora"),
    [
        ("1", LoraConfig(enabled=True, dim=4, alpha=8, use_rslora=True)),
        ("fsdp2", LoraConfig(enabled=True, exclude_modules=["0.mlp.up_proj"])),
        ("tp2+sp", LoraConfig(enabled=True)),
        ("tp2 x fsdp2", ATTENTION),
        ("pp2 x fsdp2", LoraConfig(enabled=True, dim=3)),
        ("cp2 x tp2", ATTENTION),
    ],
)
def test_peft_gives_the_logprobs_of_the_run(ranks, folder, tmp_path, mesh, lora):
    batch = make_batch(seed=7)
    with open_model(ranks, folder, mesh, lora) as model:
        for seed in range(2):
            model.train_step(make_batch(seed=seed), TokenLoss())
        expected = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        files = model.export_adapter(str(tmp_path))
    assert {file.path: file.size for file in files} == {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    before = Oracle(folder).infer(batch, [LOGPROBS])["logprobs"]
    found = with_adapter(Oracle(folder), tmp_path).infer(batch, [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(found - before).max() > 1e-3


@pytest.mark.parametrize(("mesh", "other"), [("fsdp2", "tp2"), ("pp2", "1")])
def test_a_model_starts_from_an_adapter_on_any_mesh(ranks, folder, tmp_path, mesh, other):
    batch, lora = make_batch(seed=7), LoraConfig(enabled=True, dim=4)
    with open_model(ranks, folder, mesh, lora) as model:
        model.train_step(make_batch(), TokenLoss())
        expected = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export_adapter(str(tmp_path))
    start = lora.model_copy(update={"adapter": str(tmp_path)})
    with open_model(ranks, folder, other, start, ModelSpec(keeps_reference=True)) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.train_step(make_batch(), TokenLoss())
        reference = model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").values
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.array_equal(reference, found)


def test_the_head_of_a_reward_model_is_exported_with_its_adapter(ranks, folder, tmp_path):
    batch = make_pairs()
    with open_model(ranks, folder, "fsdp2", LoraConfig(enabled=True), ModelSpec("reward_model")) as model:
        model.train_step(batch, PairLoss())
        expected = model.infer(batch, [SCORES]).array("scores")
        model.export_adapter(str(tmp_path))
    found = with_adapter(Oracle(folder, "reward_model"), tmp_path).infer(batch, [SCORES])["scores"]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_model_without_adapters_exports_none(ranks, folder, tmp_path):
    with open_model(ranks, folder, "1", LoraConfig()) as model:
        assert model.export_adapter(str(tmp_path / "adapter")) == ()
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "q_projj"], "'q_projj' is not a linear layer of this .*; name some of down_proj, "),
        (["lm_head"], "'lm_head' gets no adapter, as a head"),
        ([], "match no linear layer"),
    ],
)
def test_targets_that_get_no_adapter_are_refused_by_name(ranks, folder, targets, message):
    lora = LoraConfig(enabled=True, match_all_linear=False, target_modules=targets)
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folder, "1", lora)
