"""Files of an export beside config and weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rl_core.model_config import TokenizerConfig
from rl_core.torch.files.model_files import WeightFiles, copy_side_files

OWN = "{{ messages[0].content }}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": OWN}))
    (folder / "model.safetensors").write_text("weights")
    return folder


def exported(source: Path, settings: TokenizerConfig) -> Path:
    target = source.with_name("target")
    target.mkdir()
    copy_side_files(target, source=source, tokenizer=source, settings=settings)
    return target


def test_side_files_are_copied_and_weights_are_not(source: Path) -> None:
    names = {path.name for path in exported(source, TokenizerConfig()).iterdir()}
    assert names == {"generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.mark.parametrize(
    ("settings", "template"),
    [
        pytest.param(TokenizerConfig(), OWN, id="its own [gradients-ai/G.O.D#1295]"),
        pytest.param(
            TokenizerConfig(chat_template="{{ x }}"), "{{ x }}", id="another one [marin-community/marin#7406]"
        ),
        (TokenizerConfig(chat_template_kwargs={"think": False}), "{% set think = False %}" + OWN),
        pytest.param(
            TokenizerConfig(chat_template="{{ x }}", chat_template_kwargs={"x": 1}),
            "{% set x = 1 %}{{ x }}",
            id="another one with values [hiyouga/LlamaFactory#7785]",
        ),
    ],
)
def test_the_template_is_the_configured_one(source: Path, settings: TokenizerConfig, template: str) -> None:
    assert (exported(source, settings) / "chat_template.jinja").read_text() == template


def test_a_tokenizer_without_a_template_stays_so(source: Path) -> None:
    (source / "tokenizer_config.json").write_text("{}")
    assert not (exported(source, TokenizerConfig()) / "chat_template.jinja").exists()


def test_templates_by_name_are_copied_with_the_tokenizer(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    target.mkdir()
    copy_side_files(target, source=source, tokenizer=source, settings=TokenizerConfig())
    assert (target / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"


def test_a_tower_is_read_by_other_names_that_files_have_for_it(tmp_path: Path) -> None:
    stored = ["vision_tower.vision_model.head.weight", "model.vision_tower.vision_model.head.bias", "lm_head.weight"]
    save_file({name: torch.full((2,), place) for place, name in enumerate(stored)}, tmp_path / "model.safetensors")
    files = WeightFiles.of(tmp_path, is_whole=True)
    with files.open() as opened:
        found = {name: int(opened.read(name, ())[0]) for name in files.names}
    assert found == {"vision_tower.head.weight": 0, "model.vision_tower.head.bias": 1, "lm_head.weight": 2}


def test_an_export_of_a_model_that_sees_images_has_the_files_of_its_processor(source: Path) -> None:
    (source / "preprocessor_config.json").write_text("{}")
    target = source.with_name("whole")
    target.mkdir()
    copy_side_files(target, source=source, tokenizer=source, settings=TokenizerConfig(), is_whole=True)
    assert (target / "preprocessor_config.json").is_file()
