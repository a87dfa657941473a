"""The tiny vision-language model that is made without torch, as transformers reads it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.row_images import RowImages
from rl_algos.data.rows.example import by_keys
from rl_algos.data.sources.figures import COLOURS, SQUARE, load
from rl_algos.sft.conversation import encode_conversation
from rl_algos.tiny_model import make_tiny_vision_model
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_core.errors import DataError
from rl_core.images import ImageStore, image_refs
from rl_core.model_config import TokenizerConfig, VisionConfig

SETTINGS = DatasetConfig(dataset_name="figures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_tiny_vision_model(folder)
    return folder


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("RL_IMAGES", str(tmp_path))
    return ImageStore(tmp_path)


def example(row):
    placed, _ = RowImages.of(SETTINGS, DataConfig(train=SETTINGS)).place(by_keys(row, SETTINGS), row)
    return placed


def test_transformers_loads_every_weight_and_reads_a_picture(folder, store):
    model, loading = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = load_tokenizer(TokenizerConfig(), str(folder), VisionConfig(enabled=True))
    row = example(load({}, "train")[0])
    tokens = encode_prompt(tokenizer, row.messages)
    [ref] = image_refs(row.messages)
    processor = AutoProcessor.from_pretrained(folder)
    inputs = processor(
        text=[processor.apply_chat_template(list(_shown(row.messages)), add_generation_prompt=True)],
        images=[store.open(ref.digest)],
        return_tensors="pt",
    )
    assert inputs["input_ids"][0].tolist() == tokens.tolist()
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()


def _shown(messages):
    for message in messages:
        yield {**message, "content": [{"type": p["type"], "text": p.get("text", "")} for p in message["content"]]}


def test_the_answer_is_what_is_learned(folder, store):
    tokenizer = load_tokenizer(TokenizerConfig(), str(folder), VisionConfig(enabled=True))
    row = example(load({"task": "area"}, "validation")[0])
    tokens, mask = encode_conversation(tokenizer, (*row.messages, {"role": "assistant", "content": row.answer}))
    assert tokenizer.decode(tokens[mask > 0]) == f"{row.answer}<|end|>"


@pytest.mark.parametrize(
    ("task", "grid", "num_colours", "num"),
    [("count", 2, 3, 243), ("count", 3, 3, 59049), ("count", 3, 2, 1024), ("area", 2, 3, 216), ("area", 2, 2, 72)],
)
def test_splits_share_no_question_and_answers_are_right(task, grid, num_colours, num):
    settings = {"task": task, "grid": grid, "num_colours": num_colours}
    train, validation = load(settings, "train"), load(settings, "validation")
    assert len(train) + len(validation) == num
    seen = set()
    for row in [*validation[:20], *train[:20]]:
        pixels = np.asarray(Image.open(io.BytesIO(row["images"][0])))
        name = next(name for name in COLOURS if name in row["messages"][0]["content"])
        squares = pixels[SQUARE // 2 :: SQUARE, SQUARE // 2 :: SQUARE]
        assert len(np.unique(squares.reshape(-1, 3), axis=0)) <= num_colours
        assert int((squares == COLOURS[name]).all(-1).sum()) == int(row["answer"])
        seen.add((row["images"][0], row["messages"][0]["content"]))
    assert len(seen) == len(validation[:20]) + 20


def test_more_rows_than_questions_and_unknown_splits_are_refused():
    with pytest.raises(DataError, match="validation has 24 different questions, got num_rows: 25"):
        load({"num_rows": 25}, "validation")
    with pytest.raises(DataError, match="splits train and validation"):
        load({}, "test")
