"""Images that environments and tools answer."""

from __future__ import annotations

import base64
import io
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_core.environments.child import PASSED
from rl_core.environments.process import EnvironmentProcess
from rl_core.environments.tool_environment import ToolEnvironment
from rl_core.images import STORE_VARIABLE, ImageRef, ImageStore, image_digests
from rl_core.rollouts.environment import Conversation, EnvironmentFailure, StepResult, ToolCall

IMAGE = Image.new("RGB", (8, 4), (10, 20, 30))


def png() -> bytes:
    file = io.BytesIO()
    IMAGE.save(file, format="PNG")
    return file.getvalue()


DATA_URL = f"data:image/png;base64,{base64.b64encode(png()).decode()}"


class Shows:
    """An environment that answers with parts."""

    def __init__(self, *parts: Any) -> None:
        self._parts = list(parts)

    def step(self, conversations: Sequence[Conversation], states: Sequence[Any]) -> list[StepResult]:
        return [StepResult(done=False, observation=({"role": "user", "content": self._parts},)) for _ in conversations]

    def close(self, states: Sequence[Any]) -> None:
        pass


def look() -> list[Any]:
    """Look at the screen."""
    return ["The screen:", IMAGE]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path))
    return ImageStore(tmp_path)


def answered(environment: Any, **fields: Any) -> StepResult | EnvironmentFailure:
    process = EnvironmentProcess("screen", environment, memory="its limit", place="")
    conversation = Conversation("c", ({"role": "user", "content": "x"},), {}, "go", **fields)
    (answer,) = process.step([pickle.dumps(conversation)], {})
    return answer.result


@pytest.mark.parametrize("image", [png(), DATA_URL, IMAGE])
def test_an_answer_names_its_images_by_digest(store: ImageStore, image: Any) -> None:
    result = answered(Shows({"type": "text", "text": "Now:"}, {"type": "image", "image": image}))
    assert isinstance(result, StepResult)
    (message,) = result.observation
    text, shown = message["content"]
    assert text == {"type": "text", "text": "Now:"}
    assert shown == store.put(png()).part()
    assert image_digests(result.observation) == (shown["image"],)
    assert store.open(shown["image"]).getpixel((0, 0)) == (10, 20, 30)


def test_an_image_that_is_stored_stays_as_it_is(store: ImageStore) -> None:
    part = store.put(png()).part()
    result = answered(Shows(part))
    assert isinstance(result, StepResult)
    assert result.observation[0]["content"] == [part]


def test_a_tool_returns_images(store: ImageStore) -> None:
    result = answered(ToolEnvironment([look], lambda completion: 1.0), tool_calls=(ToolCall("look", {}, "call00000"),))
    assert isinstance(result, StepResult)
    (message,) = result.observation
    assert message["role"] == "tool"
    assert [part["type"] for part in message["content"]] == ["text", "image"]
    assert image_digests([message]) == (store.put(png()).digest,)


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (b"GIF89a", "truncated or damaged|not an image"),
        ("https://example.org/a.png", "give the bytes of a file, a data URL"),
        ("data:image/png,abc", "must begin with data:image/FORMAT;base64,"),
        ("data:image/png;base64,?", "is not valid base64"),
        (7, "has a int"),
    ],
)
def test_what_is_not_an_image_fails_its_conversation_by_name(image: Any, problem: str) -> None:
    result = answered(Shows({"type": "image", "image": image}))
    assert isinstance(result, EnvironmentFailure)
    assert re.search(problem, result.reason)


def test_contents_without_images_are_left_alone() -> None:
    content: list[Mapping[str, Any]] = [{"type": "text", "text": "a"}, {"kind": "other"}]
    result = answered(Shows(*content))
    assert isinstance(result, StepResult)
    assert result.observation[0]["content"] == content


def test_processes_of_environments_know_the_store() -> None:
    assert STORE_VARIABLE in PASSED
    assert ImageRef("0" * 32, 1, 1).part()["type"] == "image"
