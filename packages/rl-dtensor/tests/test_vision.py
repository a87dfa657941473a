"""Vision-language models on every mesh: rows with several images, with none, and with one in a later turn."""

import json
import shutil
from importlib.resources import files

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_core.data.batch import TOKENS
from rl_core.errors import WorkerError
from rl_core.images import IMAGES, ImageStore
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, SequencePackingConfig, VisionConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.testing.exhaustive import exhaustive, partly_exhaustive
from rl_core.testing.model_worker import SGD
from rl_core.testing.torch.tiny_vision import write_tiny_vision_model
from rl_core.testing.torch.vision_rows import Rows, VisionOracle, adapt_parts
from rl_core.torch.files.model_files import WeightFiles
from rl_core.torch.vision.families import VISION_FAMILIES
from rl_dtensor.model.settings import FAMILIES
from rl_dtensor.plugin import HELD_FAMILIES
from rl_dtensor.selfcheck import MESHES, streamed

FACTORY = "dtensor_factories:build"
TRAINED = VisionConfig(enabled=True, tower="trained", projector="trained")
HELD = ("1", "fsdp2", "tp2", "tp2+sp", "cp2", "cp2 ulysses")
"""Meshes on which every family is exact, except the ones of `REFUSED`."""
REFUSED = (("gemma4", "tp2+sp"),)

EVERY_CASE = [
    (family, mesh, is_packed)
    for family in FAMILIES
    for mesh in HELD
    for is_packed in (True, False)
    if (family, mesh) not in REFUSED
]
CASES = partly_exhaustive(EVERY_CASE, always=[("qwen3_vl", "tp2+sp", True), ("gemma3", "1", False)])

IN_TABLE = tuple(
    family for family in FAMILIES if AutoConfig.for_model(family).get_text_config().model_type not in HELD_FAMILIES
)
"""Families whose cases with images are in the table of the package; those of `HELD_FAMILIES` need none."""
OF_THE_TABLE = [
    (family, "frozen", mesh, is_packed)
    for family in IN_TABLE
    for mesh in ("fsdp2", "tp2")
    for is_packed in (True, False)
]
ADAPTED = partly_exhaustive(
    [*(("gemma3", part, mesh, True) for part in ("frozen", "adapters") for mesh in HELD), *OF_THE_TABLE],
    always=[("gemma3", "adapters", "tp2+sp", True)],
)


@pytest.fixture(scope="module")
def store(tmp_path_factory, ranks):
    folder = tmp_path_factory.mktemp("images")
    ranks.run("rl_core.testing.torch.vision_rows:use_store", [(str(folder),)] * 2)
    return ImageStore(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def written(family, *, is_tied=False):
        path = folder / ("tied" if is_tied else "apart") / family
        if not path.exists():
            write_tiny_vision_model(path, family, tie_word_embeddings=is_tied)
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
    # float32 rounds more in layers that carry a state along a row
    tolerance = 3e-5 if oracle.model.hf.config.model_type == "qwen3_5" else 1e-5
    assert found == pytest.approx(oracle.infer(rows.batch(), [LOGPROBS])["logprobs"], abs=tolerance)
    for seed in range(2):
        batch = rows.batch(seed=seed)
        metrics, expected = model.train_step(batch, TokenLoss()), oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def assert_weights_like(weights, oracle):
    """Weights by file names, against those of the oracle, saved as `transformers` saves them."""
    expected = oracle.model.hf.state_dict()
    assert len(weights) == len(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name].double(), weight.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "mesh", "is_packed"), CASES)
def test_reads_and_steps_are_those_of_transformers(ranks, models, store, family, mesh, is_packed):
    folder, (num_ranks, settings) = models(family), MESHES[mesh]
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    config = config_of(folder, is_packed=is_packed)
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **settings) as model:
        assert_steps_like(model, oracle, rows)


@pytest.mark.parametrize(
    "rows",
    [pytest.param([0, 1], id="a rank with text only"), pytest.param([2], id="a rank without rows", marks=exhaustive)],
)
def test_ranks_without_images_take_part(ranks, models, store, rows):
    folder = models("qwen3_vl")
    made, oracle = Rows(folder, store), VisionOracle(folder, store)
    batch = made.batch(rows)
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 2) as model:
        metrics, expected = model.train_step(batch, TokenLoss()), oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        weights = streamed(model)
    assert_weights_like(weights, oracle)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    partly_exhaustive(
        [(family, is_tied) for family in FAMILIES for is_tied in (True, False)], always=[("gemma3", True)]
    ),
)
def test_exports_and_weight_updates_are_files_of_transformers(ranks, models, store, tmp_path, family, is_tied):
    folder = models(family, is_tied=is_tied)
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 2, tensor_parallel_size=1 + is_tied) as model:
        model.train_step(rows.batch(), TokenLoss())
        oracle.train_step(rows.batch(), TokenLoss(), SGD, 1.0)
        model.export(str(tmp_path / "exported"))
        sent = streamed(model)
        assert set(model.manifest(1).tied.values()) == (
            {next(name for name in sent if "embed_tokens" in name)} if is_tied else set()
        )
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(info.values()), info
    assert_weights_like(loaded.state_dict(), oracle)
    assert (tmp_path / "exported" / "preprocessor_config.json").read_text() == (
        folder / "preprocessor_config.json"
    ).read_text()
    shutil.rmtree(tmp_path / "exported")
    loaded.save_pretrained(tmp_path / "exported")
    files = WeightFiles.of(tmp_path / "exported", is_whole=True)
    with files.open() as opened:
        assert sent.keys() == files.names
        for name, tensor in sent.items():
            assert torch.equal(tensor, opened.read(name, ())), name


def test_experts_are_read_in_both_layouts_of_files(ranks, models, tmp_path):
    folder = tmp_path / "qwen3_vl_moe"
    shutil.copytree(models("qwen3_vl_moe"), folder)
    stored = load_file(folder / "model.safetensors")
    experts = {name: each.mT.contiguous() for name, each in stored.items() if ".experts." in name}
    assert len(experts) == 4
    save_file({**stored, **experts}, folder / "model.safetensors", metadata={"format": "pt"})
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 2, tensor_parallel_size=2) as model:
        weights = streamed(model)
    loaded = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, loaded[name]), name
        assert torch.equal(weight, stored[name]), name


def test_frozen_parts_keep_their_weights_and_have_no_state(ranks, models, store):
    folder = models("qwen3_vl")
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    family = VISION_FAMILIES["qwen3_vl"]
    before = {name: weight.clone() for name, weight in oracle.model.hf.named_parameters()}
    frozen = {
        name
        for name in before
        if name.startswith(family.tower) and not any(name.startswith(f"{each}.") for each in family.projector)
    }
    for name, parameter in oracle.model.hf.named_parameters():
        parameter.requires_grad_(name not in frozen)
    vision = VisionConfig(enabled=True, projector="trained")
    with PooledModel(ranks, FACTORY, config_of(folder, vision), ModelSpec(), 2) as model:
        assert_steps_like(model, oracle, rows)
        weights = streamed(model)
    for name, weight in before.items():
        assert torch.equal(weights[name], weight.float()) == (name in frozen), name


@pytest.mark.parametrize(("family", "part", "mesh", "is_packed"), ADAPTED)
def test_adapters_sit_on_the_language_model_and_on_the_parts_that_ask_for_them(
    ranks, models, store, tmp_path, family, part, mesh, is_packed
):
    folder = models(family)
    lora = LoraConfig(enabled=True)
    rows, oracle = Rows(folder, store), VisionOracle(folder, store)
    parts = VISION_FAMILIES[family]
    adapt_parts(oracle.model.hf, lora, [*parts.tower, *parts.projector] if part == "frozen" else parts.unused)
    vision = VisionConfig(enabled=True, tower=part, projector=part)
    config = config_of(folder, vision, is_packed=is_packed, lora_cfg=lora)
    num_ranks, settings = MESHES[mesh]
    with PooledModel(ranks, FACTORY, config, ModelSpec(), num_ranks, **settings) as model:
        assert_steps_like(model, oracle, rows)
        model.export_adapter(str(tmp_path / "adapter"))
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert any("vision_tower" in name for name in file.keys()) == (part == "adapters")  # noqa: SIM118


def test_the_table_of_families_has_the_cases_with_images_that_are_held_here(models):
    table = json.loads(files("rl_dtensor").joinpath("families.json").read_text(encoding="utf-8"))["images"]
    assert sorted(table) == sorted(IN_TABLE)
    full = {(family, mesh, packed, False) for family, mesh, packed in EVERY_CASE}
    adapted = {(family, mesh, packed, True) for family, _, mesh, packed in OF_THE_TABLE}
    for family, held in table.items():
        config = AutoConfig.from_pretrained(models(family))
        fields = {**config.get_text_config().to_dict(), "tie_word_embeddings": config.tie_word_embeddings}
        fields["layer_types"] = sorted(set(fields.get("layer_types") or ()))
        assert held["kind"] == {name: fields[name] for name in held["kind"]}
        found = set()
        for case in held["cases"]:
            assert (case["num_ranks"], case["settings"]) == MESHES[case["mesh"]]
            assert (case["verdict"] == "refused") == ((family, case["mesh"]) in REFUSED)
            if case["verdict"] == "exact":
                found.add((family, case["mesh"], case["is_packed"], case["has_adapters"]))
        assert found == {each for each in full | adapted if each[0] == family}


def test_rows_without_images_are_bit_equal_to_those_of_a_model_that_sees_none(ranks, models, store):
    folder = models("gemma3")
    batch = Rows(folder, store).batch([1, 1])
    found = {}
    for vision in (VisionConfig(), TRAINED):
        with PooledModel(ranks, FACTORY, config_of(folder, vision), ModelSpec(), 2) as model:
            found[vision] = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
    assert np.array_equal(found[VisionConfig()], found[TRAINED])


def test_a_checkpoint_resumes_on_another_mesh(ranks, models, store, tmp_path):
    folder = models("qwen2_5_vl")
    rows = Rows(folder, store)
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 2) as model:
        model.train_step(rows.batch(seed=0), TokenLoss())
        model.save(str(tmp_path))
        model.finish_save()
        expected = model.train_step(rows.batch(seed=1), TokenLoss())
    with PooledModel(ranks, FACTORY, config_of(folder), ModelSpec(), 1) as model:
        model.load(str(tmp_path))
        metrics = model.train_step(rows.batch(seed=1), TokenLoss())
    assert {name: metrics[name] for name in ("loss", "grad_norm")} == pytest.approx(
        {name: expected[name] for name in ("loss", "grad_norm")}, rel=1e-5
    )


def test_rows_whose_images_cannot_be_used_are_refused_by_name(ranks, models, store):
    folder = models("qwen2_5_vl")
    rows = Rows(folder, store)
    batch = rows.batch([0])
    digests = batch.ragged(IMAGES)
    fewer = batch.with_columns({IMAGES: type(digests).from_rows([digests[0][:1]], np.uint8, (16,))})
    unknown = np.zeros((1, 16), np.uint8)
    missing = batch.with_columns({IMAGES: type(digests).from_rows([unknown], np.uint8, (16,))})
    one = VisionConfig(enabled=True, max_images=1)
    with PooledModel(ranks, FACTORY, config_of(folder, one), ModelSpec(), 1) as model:
        for broken, message in (
            (batch, "row 0 has 2 images and vision.max_images is 1"),
            (fewer, r"row 0 has 12 image tokens .* its 1 images have \[4\]"),
            (missing, "row 0: the image 00000000000000000000000000000000 is not in"),
            (batch.only([TOKENS]), "row 0 has 12 image tokens .* no images"),
        ):
            with pytest.raises(WorkerError, match=message):
                model.infer(broken, [LOGPROBS])
    with (
        PooledModel(ranks, FACTORY, config_of(models("gemma3"), VisionConfig()), ModelSpec(), 1) as model,
        pytest.raises(WorkerError, match="row 0 has 2 images, but this model is used as a language model"),
    ):
        model.infer(batch, [LOGPROBS])


@pytest.mark.parametrize(
    ("family", "role", "settings", "message"),
    [
        ("qwen2_5_vl", "critic", {}, "vision.enabled: .*not supported for a critic"),
        ("llava", "policy", {}, "vision.enabled: .*not supported for llava models"),
        ("qwen3", "policy", {}, "qwen3 models see no images; set vision.enabled=false"),
        ("qwen2_5_vl", "policy", {"pipeline_parallel_size": 2}, "pipeline_parallel_size: .*must be 1"),
    ],
)
def test_what_is_not_exact_is_refused_by_name(ranks, tmp_path, family, role, settings, message):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(WorkerError, match=message):
        PooledModel(ranks, FACTORY, config_of(tmp_path), ModelSpec(role=role), 2, **settings)
