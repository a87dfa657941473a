"""The recipes of vision-language models read data in the format of the datasets that they name."""

import io
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner

from rl_algos.data.examples import load_examples
from rl_algos.data.prompts import validation_prompts
from rl_algos.sft.data import prepare_examples, to_batch
from rl_algos.tokenizer import load_tokenizer
from rl_core.images import IMAGES, image_refs
from rl_launch.cli import app
from rl_launch.model_files.local_models import tiny_vision_model
from rl_launch.run_config.reading import read_plan

ON_CPU = ["cluster.device=cpu"]


def picture():
    file = io.BytesIO()
    Image.new("RGB", (56, 84), (9, 120, 200)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RL_IMAGES", str(tmp_path / "images"))
    return tmp_path


@pytest.fixture
def tokenizer():
    config = read_plan("sft-vlm-tiny", ON_CPU).config.policy
    return load_tokenizer(config.tokenizer, str(tiny_vision_model()), config.vision)


def test_the_tiny_recipe_of_sft_learns_the_answers_about_its_pictures(tokenizer):
    config = read_plan("sft-vlm-tiny", ON_CPU).config
    rows = prepare_examples(config, tokenizer, load_examples(config)).train.take(16)
    batch = to_batch(rows)
    assert batch[IMAGES].lengths.tolist() == [1] * 16
    for row in rows:
        assert tokenizer.decode(row.tokens[row.loss_mask == 1]) in [f"{count}<|end|>" for count in range(5)]


@pytest.mark.parametrize("recipe", ["grpo-clevr-count-tiny", "grpo-vlm-geometry-tiny"])
def test_the_tiny_recipes_of_grpo_show_pictures_and_leave_room_for_answers(recipe, tokenizer):
    config = read_plan(recipe, ON_CPU).config
    room = config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens
    datasets = load_examples(config)
    prompts = validation_prompts(datasets.validation, config.data, tokenizer, max_tokens=room)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for prompt in prompts:
        [ref] = image_refs(prompt.messages)
        assert np.count_nonzero(prompt.token_ids == image) == ref.width * ref.height // 28**2
        assert prompt.environment == "math"


@pytest.mark.parametrize(
    ("recipe", "row", "asked", "answer"),
    [
        (
            "grpo-vlm-geometry",
            {"images": [{"bytes": picture(), "path": None}], "problem": "<image>Find x.", "answer": "3"},
            "Find x.",
            "3",
        ),
        (
            "grpo-clevr-count",
            {"image": {"bytes": picture(), "path": None}, "problem": "How many?", "solution": "<answer> 3 </answer>"},
            "How many?",
            "3",
        ),
    ],
)
def test_a_recipe_reads_a_file_in_its_datasets_format(folder, tokenizer, recipe, row, asked, answer):
    processor = "geometry3k" if "geometry" in recipe else "clevr_count"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), folder / "rows.parquet")
    source = f"{{data_path: rows.parquet, processor: {processor}, env_name: math}}"
    config = read_plan(recipe, [f"data.train={source}", f"data.validation={source}"]).config
    [prompt, _] = validation_prompts(load_examples(config).validation, config.data, tokenizer, max_tokens=400)
    image, text = prompt.messages[0]["content"]
    assert (image["width"], image["height"], text["text"]) == (56, 84, asked)
    assert prompt.info["answer"] == answer


def test_the_recipe_of_sft_reads_the_format_of_its_dataset(folder, tokenizer):
    def text(value):
        return {"index": None, "text": value, "type": "text"}

    messages = [
        {"content": [text("What is it?\n"), {"index": 0, "text": None, "type": "image"}], "role": "user"},
        {"content": [text("A colour.")], "role": "assistant"},
    ]
    row = {"messages": messages, "images": [{"bytes": picture(), "path": None}]}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * 4), folder / "rows.parquet")
    overrides = [f"data.{part}={{data_path: rows.parquet}}" for part in ("train", "validation")]
    config = read_plan("sft-vlm", [*overrides, "policy.train_global_batch_size=4"]).config
    rows = prepare_examples(config, tokenizer, load_examples(config)).train.take(4)
    assert {tokenizer.decode(row.tokens[row.loss_mask == 1]) for row in rows} == {"A colour.<|end|>"}
    assert {len(row.images) for row in rows} == {1}


def test_the_processor_of_llava_reads_its_json(folder, tokenizer):
    (folder / "pictures").mkdir()
    (folder / "pictures/a.png").write_bytes(picture())
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A colour."}]
    (folder / "rows.json").write_text(json.dumps([{"id": "1", "image": "a.png", "conversations": turns}] * 4))
    source = "{data_path: rows.json, image_folder: pictures, processor: llava}"
    overrides = [f"data.train={source}", f"data.validation={source}", "policy.train_global_batch_size=4"]
    config = read_plan("sft-vlm", overrides).config
    rows = prepare_examples(config, tokenizer, load_examples(config)).train.take(4)
    assert {tokenizer.decode(row.tokens[row.loss_mask == 1]) for row in rows} == {"A colour.<|end|>"}


def test_data_show_names_images_by_digest_and_size():
    answer = CliRunner().invoke(app, ["data", "show", "sft-vlm-tiny", "--over", "1", *ON_CPU])
    assert answer.exit_code == 0, answer.output
    assert ", 56 x 56, 4 tokens]" in answer.stdout
    assert "<|image_pad|>" not in answer.stdout
    shown = CliRunner().invoke(app, ["data", "show", "sft-vlm-tiny", "--over", "1", "--json", *ON_CPU])
    [text] = json.loads(shown.stdout)["datasets"][0]["rows"][0]["texts"]
    assert (text["images"][0]["width"], text["images"][0]["height"]) == (56, 56)
    assert len(text["images"][0]["digest"]) == 32
