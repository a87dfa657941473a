from __future__ import annotations

import base64
import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from data.image_files import animated, bomb, picture, png
from images.vision_tokenizers import family
from PIL import Image

from rl_algos.data import row_images
from rl_algos.data.config import DataConfig
from rl_algos.data.examples import load_datasets
from rl_algos.data.preview import Text, spans
from rl_algos.data.prompts import NO_TOOLS, EncodePrompt, validation_prompts
from rl_algos.data.rows.example import by_keys
from rl_algos.data.rows.preference import preference
from rl_algos.preference.data import pair_rows
from rl_algos.preference.rows import pair_batch
from rl_algos.sft.data import EncodeExample, to_batch, training_rows
from rl_core.errors import DataError
from rl_core.images import IMAGES, ImageStore, digest_of, image_refs

ONE, TWO = png(60, 30), png(28, 56, (200, 0, 0))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("RL_IMAGES", str(tmp_path / "store"))
    return ImageStore(tmp_path / "store")


def written(folder: Path, *rows: Any) -> Path:
    """A file of rows, with two images next to it."""
    folder.mkdir(exist_ok=True)
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / "pictures/one.png").write_bytes(ONE)
    (folder / "pictures/two.png").write_bytes(TWO)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def loaded(path: Path, *, default: Any = by_keys, root: Any = None, **settings: Any) -> Any:
    config = DataConfig.model_validate({"train": {"data_path": str(path), **settings}, **(root or {})})
    [dataset] = load_datasets(config, "train", default)
    return dataset


def shapes(messages: Any) -> list[Any]:
    """The contents of messages, with the digest in place of each image."""
    return [
        [part.get("text", part.get("image")) for part in message["content"]]
        if isinstance(message["content"], tuple)
        else message["content"]
        for message in messages
    ]


def asked(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "answer": "x"}


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_images_come_as_paths_data_urls_and_in_the_form_of_openai(tmp_path: Path, store: ImageStore) -> None:
    parts = [
        {"type": "image", "image": "pictures/one.png"},
        {"type": "image", "path": "pictures/one.png"},
        {"type": "image", "image": str(tmp_path / "data/pictures/one.png")},
        {"type": "image", "image": data_url(ONE)},
        {"type": "image", "base64": base64.b64encode(ONE).decode()},
        {"type": "image_url", "image_url": {"url": data_url(ONE), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(ONE)},
        {"type": "image", "image": {"path": "pictures/one.png", "bytes": None}, "text": None},
    ]
    dataset = loaded(written(tmp_path / "data", *(asked({"type": "text", "text": "?"}, part) for part in parts)))
    for example in dataset.examples.values_in_order:
        assert shapes(example.messages) == [["?", digest_of(ONE)]]
        [ref] = image_refs(example.messages)
        assert (ref.width, ref.height) == store.open(ref.digest).size == (60, 30)
    assert len([file for file in store.folder.rglob("*") if file.is_file()]) == 1


def test_a_column_fills_the_places_of_text_and_parts_in_order(tmp_path: Path) -> None:
    rows = [
        {"images": ["pictures/one.png", "pictures/two.png"], "prompt": "<image>\nand <image>?", "answer": "x"},
        {"image": "pictures/one.png", **asked({"type": "image"}, {"type": "text", "text": "?"})},
        {
            "images": ["pictures/one.png", "pictures/two.png"],
            "messages": [
                {"role": "user", "content": "<image>"},
                {"role": "assistant", "content": "Not an <image>."},
                {"role": "user", "content": [{"type": "text", "text": "a <image> b"}]},
            ],
            "answer": "x",
        },
    ]
    dataset = loaded(written(tmp_path / "data", *rows))
    one, two = digest_of(ONE), digest_of(TWO)
    found = [shapes(example.messages) for example in dataset.examples.values_in_order]
    assert found == [[[one, "\nand ", two, "?"]], [[one, "?"]], [[one], "Not an <image>.", ["a ", two, " b"]]]


def test_bytes_of_files_and_of_the_hub_stay_out_of_what_rows_keep(tmp_path: Path) -> None:
    features = datasets.Features(
        {
            "problem": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "answer": datasets.Value("string"),
        }
    )
    row = {"problem": ["<image>x?"], "images": [[{"bytes": ONE, "path": None}]], "answer": ["3"]}
    table = datasets.Dataset.from_dict(row, features=features)
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "rows.parquet"))
    for path in (tmp_path / "saved", tmp_path / "rows.parquet"):
        [example] = loaded(path, processor="geometry3k").examples.values_in_order
        assert shapes(example.messages) == [[digest_of(ONE), "x?"]]
        assert example.info == {"problem": "<image>x?", "images": [digest_of(ONE)], "answer": "3"}


def test_images_of_pillow_are_kept_upright(tmp_path: Path, store: ImageStore) -> None:
    image = picture()
    image.getexif()[0x0112] = 6
    data = row_images.RowImages(None).read(image)
    ref = store.put(data)
    assert (ref.width, ref.height) == (30, 60)


def test_prompts_rows_and_pairs_have_their_images(tmp_path: Path) -> None:
    kind = family("qwen3_vl")
    one, two = digest_of(ONE), digest_of(TWO)
    image_token = kind.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = [
        {"images": ["pictures/one.png", "pictures/two.png"], "prompt": "<image> or <image>?", "answer": "2"},
        {"images": None, "prompt": "1+1?", "answer": "2"},
    ]
    path = written(tmp_path / "data", *rows)
    dataset = loaded(path, env_name="math")
    [first, second] = validation_prompts([dataset], _config(path), kind.tokenizer, max_tokens=200)
    assert [ref.digest for ref in image_refs(first.messages)] == [one, two]
    assert (first.token_ids == image_token).sum() > (second.token_ids == image_token).sum() == 0
    batch = to_batch(training_rows(dataset, _config(path), kind.tokenizer, 200, learn="all"))
    column = batch[IMAGES]
    assert column.lengths.tolist() == [2, 0]
    assert [bytes(digest).hex() for digest in column[0]] == [one, two]
    pair = {"prompt": "<image>?", "image": "pictures/two.png", "chosen": "red", "rejected": "blue"}
    path = written(tmp_path / "pairs", pair)
    pairs = loaded(path, default=preference)
    found = pair_batch(pair_rows(pairs, _config(path), kind.tokenizer, 200, pairing="first_vs_rest"))[IMAGES]
    assert [bytes(digest).hex() for row in found for digest in row] == [two, two]


def test_text_has_no_column_of_images(tmp_path: Path) -> None:
    path = written(tmp_path / "data", {"prompt": "1+1?", "answer": "2"})
    rows = training_rows(loaded(path), _config(path), family("qwen3_vl").tokenizer, 200, learn="all")
    assert IMAGES not in to_batch(rows)


def test_rows_in_processes_and_on_disk_have_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "data", {"image": "pictures/one.png", "prompt": "<image>?", "answer": "2"})
    kind = family("gemma3")
    [here] = training_rows(loaded(path), _config(path), kind.tokenizer, 200, learn="all")
    monkeypatch.setattr("rl_algos.data.encoding.LARGE", 1)
    [there] = training_rows(loaded(path), _config(path, num_workers=1), kind.tokenizer, 200, learn="all")
    assert there.images == here.images == (digest_of(ONE),)
    assert np.array_equal(there.tokens, here.tokens)


def test_a_row_is_shown_with_the_digest_and_size_of_its_images(tmp_path: Path) -> None:
    path = written(tmp_path / "data", {"image": "pictures/one.png", "prompt": "<image>?", "answer": "2"})
    kind = family("idefics3")
    [example] = loaded(path).examples.values_in_order
    tokens, mask, _ = EncodeExample(kind.tokenizer, "all")(example)
    shown = "".join(
        part for part, _ in spans(kind.tokenizer, Text("", tokens, mask, tuple(image_refs(example.messages))))
    )
    count = int((tokens == kind.tokenizer.convert_tokens_to_ids("<image>")).sum())
    assert f"user\n[image {digest_of(ONE)}, 60 x 30, {count} tokens]?<|im_end|>" in shown


def test_a_template_of_prompts_keeps_the_images(tmp_path: Path) -> None:
    (tmp_path / "template.txt").write_text("Q: {input} A:")
    rows = [
        asked({"type": "image", "image": "pictures/one.png"}, {"type": "text", "text": "why?"}),
        {"image": "pictures/one.png", "prompt": "<image>why?", "answer": "2"},
    ]
    dataset = loaded(written(tmp_path / "data", *rows), prompt_file=str(tmp_path / "template.txt"))
    for example in dataset.examples.values_in_order:
        assert shapes(example.messages) == [["Q: ", digest_of(ONE), "why? A:"]]


@pytest.mark.parametrize(
    ("processor", "row", "content", "answer"),
    [
        ("geometry3k", {"problem": "x?", "images": ["pictures/one.png"], "answer": "3"}, ["IMAGE", "x?"], "3"),
        (
            "clevr_count",
            {"problem": "How many?", "image": "pictures/one.png", "solution": "<answer> 3 </answer>"},
            ["IMAGE", "How many?"],
            "3",
        ),
        (
            "refcoco",
            {"image": "pictures/one.png", "answer": ["the cat", "cat"], "bbox": [1.2, 2, 30, 40.4]},
            ["IMAGE", "Locate the object that this expression refers to: the cat\nAnswer with its box as "],
            "[1, 2, 31, 42]",
        ),
    ],
)
def test_known_formats_are_read(tmp_path: Path, processor: str, row: Any, content: Any, answer: str) -> None:
    [example] = loaded(written(tmp_path / "data", row), processor=processor).examples.values_in_order
    [[image, text]] = shapes(example.messages)
    assert image == digest_of(ONE)
    assert text.startswith(content[1])
    assert example.answer == answer


def test_llava_conversations_are_read(tmp_path: Path) -> None:
    turns = [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A line."},
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "Yes."},
    ]
    rows = [{"id": 1, "image": "pictures/one.png", "conversations": turns}, {"id": 2, "conversations": turns[2:]}]
    dataset = loaded(written(tmp_path / "data", *rows), processor="llava")
    first, second = dataset.examples.values_in_order
    assert shapes(first.messages) == [[digest_of(ONE), "\nWhat is it?"], "A line.", "Sure?", "Yes."]
    assert shapes(second.messages) == ["Sure?", "Yes."]


def test_images_outside_a_run_are_kept_in_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RL_IMAGES")
    loaded(written(tmp_path / "data", asked({"type": "image", "image": "pictures/one.png"})))
    assert ImageStore(cache / "images").open(digest_of(ONE)).size == (60, 30)


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path != "/missing" else 404)
        self.end_headers()
        self.wfile.write(bytes(4000) if self.path == "/large" else ONE)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Any:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()


def frames(count: int) -> list[bytes]:
    return [png(8, 8, (index, 0, 0)) for index in range(count)]


def reds(store: ImageStore, messages: Any) -> list[int]:
    """The red of each image of messages, which numbers the frames of these tests."""
    return [store.open(ref.digest).getpixel((0, 0))[0] for ref in image_refs(messages)]


def test_frames_of_a_video_become_images_in_its_place(tmp_path: Path, store: ImageStore) -> None:
    written(tmp_path / "data")
    for index, frame in enumerate(frames(20)):
        (tmp_path / f"data/pictures/{index}.png").write_bytes(frame)
    paths = [f"pictures/{index}.png" for index in range(20)]
    video = {"type": "video", "video": paths}
    path = written(tmp_path / "data", asked({"type": "text", "text": "Then"}, video, {"type": "text", "text": "what?"}))
    [example] = loaded(path, root={"max_video_frames": 4}).examples.values_in_order
    [content] = shapes(example.messages)
    assert (content[0], content[-1], len(content)) == ("Then", "what?", 6)
    assert reds(store, example.messages) == [2, 7, 12, 17]
    [example] = loaded(path, root={"max_video_frames": 20}).examples.values_in_order
    assert reds(store, example.messages) == list(range(20))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF", "WEBP"])
def test_an_animated_image_is_a_video(tmp_path: Path, store: ImageStore, kind: str) -> None:
    first, *others = (Image.new("RGB", (8, 8), (index * 80, 0, 0)) for index in range(3))
    exact = {"lossless": True} if kind == "WEBP" else {}
    written(tmp_path / "data")
    first.save(tmp_path / "data/moving", kind, save_all=True, append_images=others, **exact)
    path = written(tmp_path / "data", asked({"type": "video", "video": "moving"}, {"type": "text", "text": "?"}))
    [example] = loaded(path).examples.values_in_order
    assert reds(store, example.messages) == [0, 80, 160]


@pytest.mark.parametrize(
    ("video", "reason"),
    [
        ("clip.mp4", "video files need a decoder .* give the list of their paths"),
        ("missing.gif", "does not exist"),
        ([], "an empty list"),
        (None, "without a `video`"),
        (["pictures/one.png", "clip.mp4"], "not an image in one of the formats"),
    ],
)
def test_a_video_that_cannot_be_read_is_refused_by_name(tmp_path: Path, video: Any, reason: str) -> None:
    written(tmp_path / "data")
    (tmp_path / "data/clip.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(64))
    path = written(tmp_path / "data", asked({"type": "video", "video": video}, {"type": "text", "text": "?"}))
    with pytest.raises(DataError, match=reason):
        loaded(path)


def test_urls_are_read_only_if_allowed_and_within_bounds(tmp_path: Path, server: str) -> None:
    path = written(tmp_path / "data", asked({"type": "image", "url": f"{server}/one.png"}))
    with pytest.raises(DataError, match=r"is a URL; set data\.allow_image_urls: true"):
        loaded(path)
    [example] = loaded(path, root={"allow_image_urls": True}).examples.values_in_order
    assert [ref.digest for ref in image_refs(example.messages)] == [digest_of(ONE)]
    with pytest.raises(row_images.ImageError, match="has more than 1,000 bytes"):
        row_images.fetch(f"{server}/large", max_bytes=1000)
    with pytest.raises(row_images.ImageError, match="404"):
        row_images.fetch(f"{server}/missing")


def test_a_server_that_does_not_answer_holds_nothing_up() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        with pytest.raises(row_images.ImageError, match=r"did not arrive within 0\.2 seconds"):
            row_images.fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/", timeout_s=0.2)


def _column(*images: Any, text: str = "<image>") -> dict[str, Any]:
    return {"images": list(images), "prompt": text, "answer": "x"}


BROKEN: dict[str, tuple[Any, str]] = {
    "truncated": (_column(data_url(ONE[:60])), r"images\[0\]: the image is truncated"),
    "not an image": (_column(data_url(b"hello")), "not an image in one of the formats"),
    "empty": (_column(data_url(b"")), "0 bytes"),
    "animated": (_column(data_url(animated())), "2 frames"),
    "decompression bomb": (_column(data_url(bomb())), "9000 x 9000 pixels"),
    "mode": (_column(data_url(png(8, 8, 0, "F", form="TIFF"))), "mode 'F'"),
    "missing": (_column("pictures/three.png"), "'pictures/three.png' does not exist in .*set `image_folder`"),
    "a folder": (_column("pictures"), "'pictures' is not a file"),
    "a pipe": (_column("pipe"), "'pipe' is not a file"),
    "outside": (_column("../secret.png"), r"'\.\./secret\.png' is outside of"),
    "absolute": (_column("/etc/passwd"), "'/etc/passwd' is outside of"),
    "a link outside": (_column("link.png"), r"'link\.png' is outside of"),
    "a long name": (_column("x" * 5000), "cannot be read"),
    "a url": (_column("https://example.com/a.png"), "is a URL"),
    "another scheme": (_column("file:///etc/passwd"), "is not an http or https URL"),
    "not base64": (_column("data:image/png;base64,?"), "not valid base64"),
    "not in base64": (_column("data:image/png,abc"), "not a data URL in base64"),
    "too many": (_column("pictures/one.png", "pictures/two.png"), "has 2 images in 'images' but 1 place"),
    "too few": (_column("pictures/one.png", text="<image><image>"), "has 1 image in 'images' but 2 places"),
    "none": ({"images": None, "prompt": "<image>", "answer": "x"}, "has 0 images in 'images' but 1 place"),
    "a part without an image": (asked({"type": "image"}), "without an image; add it to the part"),
    "two sources": (asked({"type": "image", "url": "a", "path": "b"}), "both `url` and `path`"),
    "a number": (asked({"type": "image", "image": 3}), "it must be a path, .* got int"),
    "an empty object": (asked({"type": "image", "image": {"size": 3}}), "neither `bytes` nor `path`"),
    "a video": (asked({"type": "video", "video": "a.mp4"}), "a video: 'a.mp4' does not exist"),
    "a sound": (asked({"type": "input_audio", "input_audio": {}}), "part of type 'input_audio'; only parts of type"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_one_message_with_its_row(tmp_path: Path, name: str) -> None:
    row, reason = BROKEN[name]
    path = written(tmp_path / "data", {"prompt": "1+1?", "answer": "2"}, row)
    os.mkfifo(tmp_path / "data/pipe")
    (tmp_path / "secret.png").write_bytes(ONE)
    (tmp_path / "data/link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(DataError, match=reason) as raised:
        loaded(path)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 2: ")
    assert "\n" not in message
    assert len(message) < 600
    assert len(loaded(path, root={"malformed": "skip"}).examples) == 1


def test_images_that_nothing_refers_to_are_refused_only_where_images_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "data", {"image": "pictures/one.png", "prompt": "1+1?", "answer": "2"})
    dataset = loaded(path)
    with pytest.raises(DataError, match=r"line 1: the row has 1 image in a column, but no place"):
        training_rows(dataset, _config(path), family("qwen3_vl").tokenizer, 200, learn="all")
    text_only = family("qwen3_vl").text_tokenizer
    assert len(training_rows(dataset, _config(path), text_only, 200, learn="all")) == 1
    with pytest.raises(DataError, match="has 1 image in 'image' but 0 places"):
        loaded(path, images_key="image")
    with pytest.raises(DataError, match="no column 'pictures'"):
        loaded(path, images_key="pictures")


UNFILLED = {
    "a column of another name": (
        {"prompt": "<image>?", "image_path": "pictures/one.png", "answer": "2"},
        r"has 1 place for an image .* no column images or image; .* answer, image_path, prompt\. Set `images_key`",
    ),
    "a later turn": (
        {"messages": [*asked("a")["messages"], {"role": "assistant", "content": "b"}, *asked("<image>")["messages"]]},
        "has 1 place for an image",
    ),
    "places": ({"prompt": "<image><image>?", "answer": "2"}, "has 2 places for images"),
    "what the assistant says": ({"prompt": "?", "answer": "<image>"}, "models write no images"),
    "the placeholder of another model": ({"prompt": "<start_of_image>?", "answer": "2"}, "'<start_of_image>' in its"),
    "a numbered placeholder": ({"prompt": "<image_1>?", "answer": "2"}, "write <image> once where each image goes"),
    "a placeholder beside a place": (
        {"prompt": "<image> [IMG]?", "image": "pictures/one.png", "answer": "2"},
        r"in addition to the images of 'image'",
    ),
    "a video": ({"prompt": "<video>?", "video": "a.mp4", "answer": "2"}, "video is not supported"),
    "a sound": ({"prompt": "<audio>?", "answer": "2"}, "audio is not supported"),
}


@pytest.mark.parametrize("name", UNFILLED)
def test_a_place_without_an_image_is_refused_only_where_images_are_read(tmp_path: Path, name: str) -> None:
    row, reason = UNFILLED[name]
    dataset = loaded(written(tmp_path / "data", row))
    kind = family("qwen3_vl")
    [example] = dataset.examples.values_in_order
    ends_with_user = not example.has_response and example.answer is None
    encoders = [] if ends_with_user else [EncodeExample(kind.tokenizer, "all")]
    if name != "what the assistant says":  # in reinforcement learning it is only compared with
        encoders.append(EncodePrompt(kind.tokenizer, NO_TOOLS, None))
    for encode in encoders:
        with pytest.raises(DataError, match=reason):
            encode(example)
    if not example.num_unplaced_images and "image" not in row:
        EncodePrompt(kind.text_tokenizer, NO_TOOLS, None)(example)


def test_responses_hold_no_place_for_an_image(tmp_path: Path) -> None:
    path = written(tmp_path / "data", {"prompt": "?", "chosen": "<image>", "rejected": "blue"})
    with pytest.raises(DataError, match="models write no images"):
        pair_rows(
            loaded(path, default=preference), _config(path), family("qwen3_vl").tokenizer, 200, pairing="first_vs_rest"
        )


def test_a_row_that_is_too_long_with_its_images_is_excluded_whole(tmp_path: Path) -> None:
    rows = [_column("pictures/one.png"), {"prompt": "1+1?", "answer": "2"}]
    path = written(tmp_path / "data", *rows)
    tokenizer = family("internvl").tokenizer
    with pytest.raises(DataError, match="have more than 30 tokens"):
        training_rows(loaded(path), _config(path), tokenizer, 30, learn="all")
    config = _config(path, overlong="skip")
    assert len(training_rows(loaded(path), config, tokenizer, 30, learn="all")) == 1


def _config(path: Path, **other: Any) -> DataConfig:
    return DataConfig.model_validate({"train": {"data_path": str(path)}, **other})
