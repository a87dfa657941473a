"""The language model of composite models, against the same model in files of its own."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rl_core.model_config import ModelConfig, local_hf_config, num_experts_of
from rl_core.selfcheck.torch.tiny_model import SIZES, write_composite, write_tiny_model
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
        ("vision_tower.layers.0.weight", None),
        ("model.visual.head.weight", None),
        ("mtp.layers.0.weight", None),
    ],
)
def test_names_are_found_in_every_layout(stored: str, name: str | None) -> None:
    assert language_names([stored]) == ({} if name is None else {name: stored})


def test_a_composite_model_without_a_language_model_of_its_own_stays_whole(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen2_5_vl").save_pretrained(tmp_path)
    assert read_hf_config(tmp_path, {}).model_type == "qwen2_5_vl"


def test_a_config_that_is_not_composite_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES}))
    config = read_hf_config(tmp_path, {"rms_norm_eps": 0.5})
    assert (config.hidden_size, config.rms_norm_eps) == (SIZES["hidden_size"], 0.5)
