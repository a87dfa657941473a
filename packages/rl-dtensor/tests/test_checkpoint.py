"""A checkpoint that is saved on one mesh, in the background, resumes on every other."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import ADAMW, WARM_UP, make_batch
from rl_dtensor.selfcheck import MESHES

SAVED = ("fsdp2", "tp2 x fsdp2", "cp2 x tp2", "pp2 x fsdp2")


def open_model(ranks, folder, mesh, lora=False, **spec):
    num_ranks, settings = MESHES[mesh]
    config = ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=ADAMW,
        scheduler=WARM_UP,
        lora_cfg=LoraConfig(enabled=lora),
    )
    return PooledModel(ranks, "rl_dtensor.selfcheck:build", config, ModelSpec(**spec), num_ranks, **settings)


def train(model, seeds):
    return [model.train_step(make_batch(seed=seed), TokenLoss())["loss"] for seed in seeds]


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A model, and its checkpoint on a mesh with the losses of the steps after it, made when first asked for."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))

    @cache
    def on(mesh):
        checkpoint = tmp_path_factory.mktemp("checkpoint")
        with open_model(ranks, folder, mesh) as model:
            train(model, range(2))
            model.save(str(checkpoint), wait=False)
            losses = train(model, range(2, 4))
            model.finish_save()
        return checkpoint, losses

    return folder, on


@pytest.mark.parametrize(
    ("mesh", "resumed"), partly_exhaustive(product(SAVED, SAVED), always=[("tp2 x fsdp2", "pp2 x fsdp2")])
)
def test_a_run_resumes_on_every_other_mesh_with_the_same_losses(ranks, saved, mesh, resumed):
    folder, on = saved
    checkpoint, losses = on(mesh)
    with open_model(ranks, folder, resumed) as model:
        model.load(str(checkpoint))
        assert train(model, range(2, 4)) == pytest.approx(losses, rel=1e-5)


def test_a_checkpoint_of_adapters_holds_them_alone(ranks, tmp_path):
    folder = write_tiny_model(tmp_path / "model")
    with open_model(ranks, folder, "tp2", lora=True) as model:
        train(model, range(2))
        model.save(str(tmp_path / "checkpoint"))
        losses = train(model, range(2, 4))
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint" / "shards").iterdir())
    with open_model(ranks, folder, "pp2", lora=True) as model:
        model.load(str(tmp_path / "checkpoint"))
        assert train(model, range(2, 4)) == pytest.approx(losses, rel=1e-5)
    full = tmp_path / "full"
    with open_model(ranks, folder, "1") as model:
        train(model, range(2))
        model.save(str(full))
    assert size < sum(file.stat().st_size for file in (full / "shards").iterdir())


@pytest.mark.parametrize("lora", partly_exhaustive([False, True], always=[False]))
def test_a_reference_that_has_moved_resumes_on_another_mesh(ranks, tmp_path, lora):
    folder = write_tiny_model(tmp_path / "model")
    with open_model(ranks, folder, "tp2", lora, keeps_reference=True) as model:
        train(model, [0])
        model.update_reference(0.5)
        train(model, [1])
        model.save(str(tmp_path / "checkpoint"), wait=False)
        files = model.finish_save()
        found = [model.infer(make_batch(), [LOGPROBS], reference=each).ragged("logprobs") for each in (True, False)]
        assert not np.allclose(found[0].values, found[1].values, atol=1e-4)
    with open_model(ranks, folder, "pp2", lora, keeps_reference=True) as model:
        model.load(str(tmp_path / "checkpoint"), files=files)
        for expected, reference in zip(found, (True, False), strict=True):
            again = model.infer(make_batch(), [LOGPROBS], reference=reference).ragged("logprobs")
            np.testing.assert_allclose(again.values, expected.values, atol=1e-5)
