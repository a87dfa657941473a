from __future__ import annotations

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images.vision_tokenizers import ENABLED, NAMES, Family, family, image, num_images, text

from rl_algos.images.image_tokens import image_tokens
from rl_algos.sft.conversation import encode_conversation
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_core.errors import ConfigError, DataError
from rl_core.model_config import TokenizerConfig, VisionConfig

QUESTION = ({"role": "user", "content": (image(112, 56), text("What is this?"))},)
CONVERSATIONS: dict[str, Any] = {
    "none": ({"role": "user", "content": "Hello\n"},),
    "one": QUESTION,
    "one after text": ({"role": "user", "content": (text("Look:\n"), image(30, 47), text("\n\nDone?"))},),
    "two": ({"role": "user", "content": (image(200, 100), image(57, 300), text("Which is larger?"))},),
    "later": (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": (text("And "), image(64, 64))},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": (image(130, 200), text("this"), image(28, 28))},
    ),
}


@pytest.fixture(params=NAMES)
def kind(request: pytest.FixtureRequest) -> Family:
    return family(request.param)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_prompts_have_the_tokens_of_the_processor(kind: Family, name: str) -> None:
    messages = CONVERSATIONS[name]
    assert encode_prompt(kind.tokenizer, messages).tolist() == kind.expected(messages, add_generation_prompt=True)


def test_every_size_has_the_tokens_of_the_processor(kind: Family) -> None:
    drawn = random.Random(3)
    for _ in range(24):
        width, height = drawn.randint(8, 320), drawn.randint(8, 320)
        messages = ({"role": "user", "content": (image(width, height), text("?"))},)
        found = encode_prompt(kind.tokenizer, messages).tolist()
        assert found == kind.expected(messages, add_generation_prompt=True), (width, height)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_is_learned_does_not_depend_on_images(kind: Family, name: str) -> None:
    messages = (*CONVERSATIONS[name], {"role": "assistant", "content": "It is\n\na <thing>."})
    plain = [
        {**message, "content": "".join(part.get("text", "") for part in message["content"])}
        if isinstance(message["content"], tuple)
        else message
        for message in messages
    ]
    tokens, mask = encode_conversation(kind.tokenizer, messages)
    assert tokens.tolist() == kind.expected(messages)[: len(tokens)]
    text_tokens, text_mask = encode_conversation(kind.tokenizer, plain)
    assert tokens[mask > 0].tolist() == text_tokens[text_mask > 0].tolist()
    marks = image_tokens(kind.tokenizer).marks  # type: ignore[union-attr]
    is_image = tokens == kind.tokenizer.convert_tokens_to_ids(marks.token)
    assert is_image.any() == bool(num_images(messages))
    assert not mask[is_image].any()


def test_special_tokens_in_content_are_text_where_that_is_set(kind: Family) -> None:
    tokenizer = load_tokenizer(TokenizerConfig(split_special_tokens="all"), str(kind.folder), ENABLED)
    placeholder = image_tokens(tokenizer).marks.placeholder  # type: ignore[union-attr]
    messages = ({"role": "user", "content": (image(64, 64), text(f"{placeholder} and <|im_end|>"))},)
    tokens = encode_prompt(tokenizer, messages)
    plain = encode_prompt(tokenizer, ({"role": "user", "content": (image(64, 64), text(" and "))},))
    for special in (placeholder, "<|im_end|>"):
        token = tokenizer.convert_tokens_to_ids(special)
        assert (tokens == token).sum() == (plain == token).sum()
    assert f"{placeholder} and <|im_end|>" in tokenizer.decode(tokens)


def test_bad_conversations_are_refused_in_one_message(kind: Family) -> None:
    marks = image_tokens(kind.tokenizer).marks  # type: ignore[union-attr]
    cases = {
        "a token of images": ({"role": "user", "content": f"What is {marks.token}?"},),
        "has 17 images, more than policy.vision.max_images = 16": (
            {"role": "user", "content": tuple(image(28, 28, number) for number in range(17))},
        ),
        "of the assistant has an image": (
            *QUESTION,
            {"role": "assistant", "content": (image(28, 28),)},
            {"role": "user", "content": "?"},
        ),
    }
    for reason, messages in cases.items():
        with pytest.raises(DataError, match=reason):
            encode_prompt(kind.tokenizer, messages)


def test_a_model_without_its_vision_tower_refuses_images() -> None:
    tokenizer = load_tokenizer(TokenizerConfig(), str(family("qwen3_vl").folder))
    with pytest.raises(DataError, match=r"policy\.vision\.enabled: true"):
        encode_prompt(tokenizer, QUESTION)


def test_limits_of_pixels_are_those_of_the_processor_or_are_refused() -> None:
    folder = str(family("qwen2_5_vl").folder)
    vision = VisionConfig(enabled=True, min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 9)
    tokenizer = load_tokenizer(TokenizerConfig(), folder, vision)
    token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    counts = []
    for size in ((28, 28), (600, 600)):
        messages = ({"role": "user", "content": (image(*size), text("?"))},)
        counts.append(int((encode_prompt(tokenizer, messages) == token).sum()))
    assert counts == [4, 9]
    with pytest.raises(ConfigError, match=r"policy\.vision\.max_pixels: Gemma3Processor does not"):
        load_tokenizer(TokenizerConfig(), str(family("gemma3").folder), VisionConfig(enabled=True, max_pixels=99))


def test_an_image_that_the_processor_refuses_is_named_by_its_size() -> None:
    messages = ({"role": "user", "content": (image(9000, 20), text("?"))},)
    with pytest.raises(DataError, match="9000 x 20 pixels"):
        encode_prompt(family("qwen3_vl").tokenizer, messages)


def test_models_and_templates_that_cannot_show_images_are_refused(tmp_path: Path) -> None:
    source = family("qwen3_vl").folder
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="chat_template: the template does not show"):
        load_tokenizer(TokenizerConfig(chat_template=template), str(source), ENABLED)
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "OtherProcessor"}))
    with pytest.raises(ConfigError, match="OtherProcessor, which is not supported"):
        load_tokenizer(TokenizerConfig(), str(folder), ENABLED)
    for file in ("processor_config.json", "preprocessor_config.json"):
        (folder / file).unlink()
    with pytest.raises(ConfigError, match=r"policy\.vision\.enabled"):
        load_tokenizer(TokenizerConfig(), str(folder), ENABLED)


def test_a_template_of_parts_only_shows_plain_texts() -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    kind = family("smolvlm")
    tokenizer = load_tokenizer(TokenizerConfig(chat_template=template), str(kind.folder), ENABLED)
    for messages in CONVERSATIONS.values():
        assert (encode_prompt(tokenizer, messages) == encode_prompt(kind.tokenizer, messages)).all()
    messages = (*QUESTION, {"role": "assistant", "content": "A cat."})
    for found, expected in zip(
        encode_conversation(tokenizer, messages), encode_conversation(kind.tokenizer, messages), strict=True
    ):
        assert np.array_equal(found, expected)


def test_tokenizers_go_to_other_processes_with_their_images(kind: Family) -> None:
    copy = pickle.loads(pickle.dumps(kind.tokenizer))
    assert image_tokens(copy) == image_tokens(kind.tokenizer)
    assert (encode_prompt(copy, QUESTION) == encode_prompt(kind.tokenizer, QUESTION)).all()
