"""Vision-language models on every layout: rows with several images, with none, and with one in a later turn."""

import numpy as np
import pytest
import torch
from layouts import LAYOUTS
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from rl_core.errors import WorkerError
from rl_core.images import ImageStore
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig, SequencePackingConfig, VisionConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import SGD
from rl_core.testing.torch.tiny_vision import write_tiny_vision_model
from rl_core.testing.torch.vision_rows import Rows, VisionOracle, adapt_parts
from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.vision.families import VISION_FAMILIES
from rl_megatron.families.supported import WITH_IMAGES

FACTORY = "megatron_factories:build"
TRAINED = VisionConfig(enabled=True, tower="trained", projector="trained")
HELD = [name for name in LAYOUTS if name != "pp2 uneven"]
CASES = partly_exhaustive(
    [
        (family, layout, is_packed)
        for family in WITH_IMAGES
        for layout in HELD
        for is_packed in (True, False)
        # features of images enter the results of the first two layers
        if (family, layout) != ("qwen3_vl", "pp2 virtual")
    ],
    always=[
        *(("qwen2_5_vl", layout, number % 2 == 0) for number, layout in enumerate(HELD)),
        ("qwen3_vl", "tp2 pp2+sp", True),
        ("internvl", "cp2", True),
    ],
)


@pytest.fixture(scope="module")
def store(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("images")
    ranks.run("rl_core.testing.torch.vision_rows:use_store", [(str(folder),)] * 4)
    return ImageStore(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def written(family, **text):
        path = folder / "-".join(map(str, text.values())) / family
        if not path.exists():
            write_tiny_vision_model(path, family, **{"num_hidden_layers": 4, **text})
        return path

    return written


def config_of(folder, vision=TRAINED, *, is_packed=True, **fields):
    return ModelConfig(
        model_name=str(folder),
        precision="float32",
        optimizer=SGD,
        vision=vision,
        sequence_packing=SequencePackingConfig(enabled=is_packed),
        max_total_sequence_length=256,
        **fields,
    )


def assert_steps_like(model, oracle, rows):
    found = model.infer(rows.batch(), [LOGPROBS]).ragged("logprobs").values
    assert found == pytest.approx(oracle.infer(rows.batch(), [LOGPROBS])["logprobs"], abs=1e-5)
    for seed in range(2):
        batch = rows.batch(seed=seed)
        metrics, expected = model.train_step(batch, TokenLoss()), oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def assert_files_like(folder, oracle):
    """Exported weights, as `transformers` loads them, against those of the oracle."""
    loaded, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    expected = oracle.model.hf.state_dict()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight.double(), expected[name].double(), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(("family", "layout", "is_packed"), CASES)
def test_reads_gradients_and_weights_are_those_of_transformers(
    ranks, models, store, tmp_path, family, layout, is_packed
):
    folder, (num_ranks, settings) = models(family), LAYOUTS[layout]
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    config = config_of(folder, is_packed=is_packed)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **settings) as model:
        assert_steps_like(model, oracle, rows)
        model.export(str(tmp_path))
    assert_files_like(tmp_path, oracle)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp2", {"distributed_data_parallel_config": {"overlap_grad_reduce": True}}),
        ("tp2 pp2+sp", {"recompute": "full"}),
        ("cp2", {"recompute": "full"}),
    ],
)
def test_rows_of_text_next_to_rows_with_images(ranks, models, store, tmp_path, layout, settings):
    """A microbatch, and a rank of `dp2`, has only text; the tower trains there as elsewhere."""
    folder, (num_ranks, sizes) = models("qwen3_vl"), LAYOUTS[layout]
    made, oracle = Rows(folder, store), VisionOracle(folder, store)
    batch = made.batch([0, 1])
    config = config_of(folder, train_micro_batch_size=1, is_packed=False)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **sizes, **settings) as model:
        metrics, expected = model.train_step(batch, TokenLoss()), oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        model.export(str(tmp_path))
    assert_files_like(tmp_path, oracle)


@pytest.mark.parametrize("rows", [[1, 1], [2]], ids=["no images at all", "a rank without rows"])
def test_ranks_without_images_take_part(ranks, models, store, tmp_path, rows):
    folder = models("qwen2_5_vl")
    made, oracle = Rows(folder, store), VisionOracle(folder, store)
    batch = made.batch(rows)
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 2) as model:
        metrics, expected = model.train_step(batch, TokenLoss()), oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        model.export(str(tmp_path))
    assert_files_like(tmp_path, oracle)


def test_a_frozen_tower_has_no_backward_pass_and_keeps_its_weights(ranks, models, store, tmp_path):
    folder = models("qwen3_vl")
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    projector = tuple(f"{name}." for name in VISION_FAMILIES["qwen3_vl"].projector)
    frozen = {
        name for name, _ in oracle.model.hf.named_parameters() if ".visual." in name and not name.startswith(projector)
    }
    for name, parameter in oracle.model.hf.named_parameters():
        parameter.requires_grad_(name not in frozen and not name.startswith("model.language_model.layers.3."))
    vision = VisionConfig(enabled=True, projector="trained")
    config = config_of(folder, vision, freeze=["model.language_model.layers.3"])
    with PooledModel(ranks, FACTORY, config, ModelSpec(), 2, tensor_model_parallel_size=2) as model:
        ranks.run("megatron_factories:note_features_of_blocks", [()] * 2)
        assert_steps_like(model, oracle, rows)
        assert ranks.run("megatron_factories:blocks_had_gradients", [()] * 2) == [{False}] * 2
        model.export(str(tmp_path))
    assert_files_like(tmp_path, oracle)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    for name, weight in before.items():
        is_frozen = name in frozen or name.startswith("model.language_model.layers.3.")
        assert after[name].equal(weight) == is_frozen, name


@pytest.mark.parametrize("layout", partly_exhaustive(HELD, always=["tp2+sp"]))
def test_adapters_are_on_the_language_model(ranks, models, store, tmp_path, layout):
    folder, (num_ranks, settings) = models("qwen2_5_vl"), LAYOUTS[layout]
    lora = LoraConfig(enabled=True)
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    adapt_parts(oracle.model.hf, lora, VISION_FAMILIES["qwen2_5_vl"].tower)
    config = config_of(folder, VisionConfig(enabled=True), lora_cfg=lora)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **settings) as model:
        assert_steps_like(model, oracle, rows)
        model.export_adapter(str(tmp_path / "adapter"))
        model.export(str(tmp_path / "merged"))
    loaded = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(loaded, tmp_path / "adapter").merge_and_unload()
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").state_dict()
    for name, weight in adapted.state_dict().items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    partly_exhaustive(
        [(family, is_tied) for family in WITH_IMAGES for is_tied in (True, False)], always=[("qwen2_5_vl", True)]
    ),
)
def test_weight_updates_have_the_names_of_files(ranks, models, family, is_tied):
    folder = models(family, tie_word_embeddings=is_tied)
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 2, pipeline_model_parallel_size=2) as model:
        (holders, sent), _ = ranks.run("megatron_factories:whole_weights", [()] * 2)
        tied = model.manifest(1).tied
    assert holders == [0, 1]
    files = WeightFiles.of(folder, is_whole=True)
    with files.open() as opened:
        assert sent.keys() | tied.keys() == files.names | tied.keys()
        for name, tensor in sent.items():
            assert np.array_equal(tensor, opened.read(name, ()).float().numpy()), name


@pytest.mark.parametrize("layout", ["tp2+sp", pytest.param("pp2", marks=exhaustive)])
def test_a_run_goes_on_bit_for_bit_from_its_checkpoint(ranks, models, store, tmp_path, layout):
    folder, (num_ranks, settings) = models("qwen2_5_vl"), LAYOUTS[layout]
    rows = Rows(folder, store)
    config = config_of(folder).model_copy(update={"optimizer": OptimizerConfig(kwargs={"lr": 1e-3})})
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **settings) as model:
        model.train_step(rows.batch(seed=0), TokenLoss())
        model.save(str(tmp_path))
        model.finish_save()
        expected = model.train_step(rows.batch(seed=1), TokenLoss())
        weights = ranks.run("megatron_factories:kept_tensors", [()] * num_ranks)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **settings) as model:
        model.load(str(tmp_path))
        found = model.train_step(rows.batch(seed=1), TokenLoss())
        resumed = ranks.run("megatron_factories:kept_tensors", [()] * num_ranks)
    assert {name: found[name] for name in ("loss", "grad_norm")} == {
        name: expected[name] for name in ("loss", "grad_norm")
    }
    for one, other in zip(weights, resumed, strict=True):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("family", "vision", "settings", "message"),
    [
        ("gemma3", TRAINED, {}, "vision.enabled: .*not supported for gemma3 models"),
        ("qwen2_5_vl", VisionConfig(), {}, "transformers has no causal language model of their text"),
        ("qwen3_vl", TRAINED, {"pipeline_model_parallel_size": 4}, "first pipeline stage has 1 layers"),
        (
            "qwen2_5_vl",
            VisionConfig(enabled=True, tower="adapters"),
            {},
            "vision.tower: .*adapters are on Megatron's layers only",
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(ranks, models, family, vision, settings, message):
    lora = LoraConfig(enabled=vision.tower == "adapters")
    folder = models(family, num_hidden_layers=2 if family == "gemma3" else 4)
    with pytest.raises(WorkerError, match=message):
        PooledModel(ranks, FACTORY, config_of(folder, vision, lora_cfg=lora), ModelSpec(), 4, **settings)


def test_a_critic_sees_no_images(ranks, models):
    with pytest.raises(WorkerError, match=r"vision\.enabled: is not supported for a critic"):
        PooledModel(ranks, FACTORY, config_of(models("qwen2_5_vl")), ModelSpec(role="critic"), 1)
