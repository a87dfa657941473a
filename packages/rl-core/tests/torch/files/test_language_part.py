"""The language model of composite models, against the same model in files of its own."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
)

from rl_core.facts.hf_config import num_experts_of
from rl_core.model_config import ModelConfig, local_hf_config
from rl_core.selfcheck.torch.tiny_model import SIZES, write_composite, write_tiny_model
from rl_core.testing.exhaustive import exhaustive
from rl_core.torch.files.language_part import KEY_MAPPING, language_names, read_language_config
from rl_core.torch.files.model_files import WeightFiles, read_hf_config
from rl_core.torch.training.export import export_dtype

KINDS = {
    "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    "llama4": ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 24}),
    "mistral3": ("mistral", {"tie_word_embeddings": False}),
    "qwen3_5": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
}
"""Kind of a composite model to the family of its text, and fields of that."""


def written(folder: Path, kind: str) -> tuple[Path, Path]:
    """A composite model, and its language model alone."""
    family, fields = KINDS[kind]
    language = write_tiny_model(folder / "language", family, **fields)
    return write_composite(folder / "composite", kind, language), language


@pytest.mark.parametrize("kind", KINDS)
def test_config_and_weights_are_those_of_the_language_model(tmp_path: Path, kind: str) -> None:
    composite, language = written(tmp_path, kind)
    config = read_hf_config(composite, {"initializer_range": 0.5})
    assert config.model_type == KINDS[kind][0]
    assert config.architectures == read_hf_config(language, {}).architectures
    assert config.initializer_range == 0.5
    within, alone = WeightFiles.of(composite), WeightFiles.of(language)
    assert within.names == alone.names
    with within.open() as found, alone.open() as expected:
        for name in alone.names:
            assert found.shape(name) == expected.shape(name)
            assert torch.equal(found.read(name, (slice(1, None),)), expected.read(name, (slice(1, None),)))
    tokens = torch.arange(3, 20)[None]
    whole = AutoModelForImageTextToText.from_pretrained(composite, attn_implementation="eager")
    part = AutoModelForCausalLM.from_pretrained(
        composite, config=read_language_config(composite, {}), key_mapping=KEY_MAPPING, attn_implementation="eager"
    )
    with torch.no_grad():
        assert torch.equal(part.eval()(tokens).logits, whole.eval()(input_ids=tokens).logits)


def test_fields_without_the_libraries_are_those_of_the_language_model(tmp_path: Path) -> None:
    composite, language = written(tmp_path, "llama4")
    fields = local_hf_config(ModelConfig(model_name=str(composite), hf_config_overrides={"head_dim": 16}))
    assert fields["model_type"] == "llama4_text"
    assert fields["head_dim"] == 16
    assert num_experts_of(fields) == 4
    assert export_dtype(composite, "bfloat16") == export_dtype(language, "bfloat16") == "float32"


def test_an_override_is_a_field_of_the_language_model(tmp_path: Path) -> None:
    composite, _ = written(tmp_path, "gemma3")
    with pytest.raises(ValueError, match=r"\['text_config'\] are not fields of a Gemma3TextConfig"):
        read_hf_config(composite, {"text_config": {"head_dim": 16}})


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("vision_tower.layers.0.weight", None),
        ("model.visual.head.weight", None),
        ("mtp.layers.0.weight", None),
    ],
)
def test_names_are_found_in_every_layout(stored: str, name: str | None) -> None:
    assert language_names([stored]) == ({} if name is None else {name: stored})


def test_a_composite_model_without_a_language_model_of_its_own_stays_whole(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    assert read_language_config(tmp_path, {}).model_type == "qwen2_5_vl"


def test_a_config_that_is_not_composite_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    config = read_hf_config(tmp_path, {"rms_norm_eps": 0.5})
    assert (config.hidden_size, config.rms_norm_eps) == (SIZES["hidden_size"], 0.5)


def composites() -> list[str]:
    """Types of all models of transformers that have another model's config within."""
    found = []
    for kind, config in CONFIG_MAPPING.items():
        try:
            made = config()
            is_composite = made.get_text_config() is not made
        except Exception:  # noqa: BLE001  # some have no default, or no text
            continue
        if is_composite:
            found.append(kind)
    return found


WHOLE = (AutoModelForImageTextToText, AutoModelForMultimodalLM)
WITH_TEXT = ("blip-2", "gemma3", "idefics2", "llava", "qwen2_audio", "voxtral")
WITHOUT_TEXT = ("florence2", "qwen2_5_vl", "qwen2_5_omni", "t5gemma")


@pytest.mark.parametrize("kind", [*WITH_TEXT, *WITHOUT_TEXT, pytest.param("every", marks=exhaustive)])
def test_a_composite_model_is_a_language_model_of_the_same_weights_or_refused(kind: str, tmp_path: Path) -> None:
    kinds = composites() if kind == "every" else [kind]
    assert kind != "every" or {*WITH_TEXT, *WITHOUT_TEXT} < set(kinds)
    for each in kinds:
        whole = CONFIG_MAPPING[each]()
        folder = tmp_path / each
        whole.save_pretrained(folder)
        try:
            config = read_hf_config(folder, {})
        except ValueError as error:
            assert each not in WITH_TEXT
            assert "vision.enabled=true" in str(error)  # noqa: PT017  # either outcome is right for other kinds
            continue
        assert each not in WITHOUT_TEXT
        assert not config.is_encoder_decoder
        auto = next((auto for auto in WHOLE if type(whole) in auto._model_mapping), None)
        with torch.device("meta"):
            try:
                alone = AutoModelForCausalLM.from_config(config)
                inside = None if auto is None else auto.from_config(CONFIG_MAPPING[each]())
            except Exception:  # noqa: BLE001  # defaults that its own code does not take, or a library that is missing
                assert each not in WITH_TEXT
                continue
        if inside is not None:
            names = language_names(name for name, _ in inside.named_parameters(remove_duplicate=False))
            own = {name for name, _ in alone.named_parameters()}
            every = {name for name, _ in alone.named_parameters(remove_duplicate=False)}
            assert own <= names.keys() <= every, each
