"""Images of prompts and of observations, on their way through rollouts to rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_algos.rollouts.config import RolloutConfig
from rl_algos.rollouts.training.batch import build_batch
from rl_algos.rollouts.worker.worker import RolloutWorker, RolloutWorkerSpec
from rl_algos.tokenizer import encode_prompt, load_tokenizer
from rl_core.data.batch import TOKENS
from rl_core.environments.observed_images import with_kept_images
from rl_core.errors import RequestRefused
from rl_core.images import IMAGES, ImageRef, ImageStore
from rl_core.model_config import TokenizerConfig, VisionConfig
from rl_core.rollouts.environment import Conversation, StepResult
from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.group import RolloutGroup
from rl_core.rollouts.pool import RolloutTask
from rl_core.rollouts.rollout import Completion, Prompt, Rollout, WeightSpan
from rl_core.testing.torch.tiny_vision import tiny_png, write_tiny_vision_model

VISION = VisionConfig(enabled=True)
RED = (220, 20, 20)


def picture(*colours: tuple[int, int, int]) -> Image.Image:
    """Squares of these colours in a row."""
    image = Image.new("RGB", (56 * len(colours), 56))
    for place, colour in enumerate(colours):
        image.paste(colour, (56 * place, 0, 56 * (place + 1), 56))
    return image


class CountingPolicy:
    """A generator that opens the images of a request, counts red squares in the last one, and says the number.

    It keeps the requests, and refuses one whose tokens do not fit its images.
    """

    num_ranks = 1

    def __init__(self, folder: str, says: str) -> None:
        self._tokenizer = load_tokenizer(TokenizerConfig(), folder, VISION)
        self._image_token = self._tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._says = says
        self.requests: list[GenerationRequest] = []

    async def start(self) -> None:
        """Nothing is loaded."""

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        opened = [ImageStore.of_run().open(digest) for digest in request.images]
        tokens_of_images = sum(_num_tokens(image.width, image.height) for image in opened)
        if int((request.token_ids == self._image_token).sum()) != tokens_of_images:
            raise RequestRefused(f"{len(opened)} images have {tokens_of_images} tokens")
        squares = np.asarray(opened[-1])[28, 28::56]
        answer = self._says or str(int((squares[:, 0] > 200).sum()))
        ids = self._tokenizer.encode(answer, add_special_tokens=False)
        tokens = np.array([*ids, self._tokenizer.eos_token_id], np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), "stop", (WeightSpan(0, len(tokens)),))


class CountingGame:
    """Shows another picture after the first answer, and rewards both."""

    async def step(self, conversation: Conversation) -> StepResult:
        right = conversation.completion == conversation.info["answers"][conversation.turn]
        if conversation.turn:
            return StepResult(float(right))
        content = [{"type": "text", "text": "And here? "}, {"type": "image", "image": picture(RED, RED, (0, 0, 0))}]
        # as the environment's process does before it answers
        observation = with_kept_images([{"role": "user", "content": content}])
        return StepResult(float(right), done=False, observation=observation)

    async def abandon(self, conversation_ids: Sequence[str]) -> None:
        """Nothing is held."""


def _num_tokens(width: int, height: int) -> int:
    return (width // 28) * (height // 28)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    monkeypatch.setenv("RL_IMAGES", str(tmp_path / "images"))
    return ImageStore.of_run()


def prompt_with(folder: Path, *images: ImageRef) -> Prompt:
    parts = [image.part() for image in images]
    content: Any = [*parts, {"type": "text", "text": "How many red squares?"}] if parts else "How many red squares?"
    messages = ({"role": "user", "content": content},)
    tokens = encode_prompt(load_tokenizer(TokenizerConfig(), str(folder), VISION), messages)
    return Prompt(f"p{len(images)}", messages, tokens, "game", {"answers": ["1", "2"]})


def roll_out(folder: Path, prompt: Prompt, *, split: bool = False, says: str = "") -> tuple[Rollout, CountingPolicy]:
    spec = RolloutWorkerSpec(
        generator=f"{__name__}:CountingPolicy",
        generator_args=(str(folder), says),
        program="rl_algos.rollouts.worker.program:MultiTurnProgram",
        program_args={"max_turns": 2, "max_tokens": 400, "split": split},
        tokenizer=TokenizerConfig(),
        model_name=str(folder),
        vision=VISION,
    )
    worker = RolloutWorker(spec, {"game": CountingGame()})

    async def run() -> Any:
        await worker.start()
        await worker.begin([(0, RolloutTask(prompt, SamplingParams(max_new_tokens=8), (1,)))])
        await worker._any_finished.wait()
        [(_, finished)] = worker._finished
        return finished.result()

    _, (rollout,) = asyncio.run(run())
    return rollout, worker._generator  # type: ignore[return-value]  # the one that the spec names


def squares(store: ImageStore, *colours: tuple[int, int, int]) -> ImageRef:
    message = {"role": "user", "content": [{"type": "image", "image": picture(*colours)}]}
    (kept,) = with_kept_images([message])
    part = kept["content"][0]
    return ImageRef(part["image"], part["width"], part["height"])


@pytest.mark.parametrize("split", [False, True])
def test_images_of_prompts_and_observations_go_with_requests_and_rows(
    folder: Path, store: ImageStore, split: bool
) -> None:
    shown = store.put(tiny_png(0)), squares(store, RED, (0, 0, 0))
    prompt = prompt_with(folder, *shown)
    rollout, policy = roll_out(folder, prompt, split=split)
    assert rollout.failure == ""
    assert rollout.reward == 2.0
    first, second = policy.requests
    assert first.images == tuple(image.digest for image in shown)
    assert second.images[:2] == first.images
    assert rollout.images == (second.images,)
    np.testing.assert_array_equal(first.token_ids, prompt.token_ids)
    # nothing is tokenised again, and an image of the observation has all its tokens
    sampled = rollout.tokens[: len(second.token_ids)]
    np.testing.assert_array_equal(second.token_ids, sampled)
    image_tokens = rollout.tokens == policy._image_token
    assert int(image_tokens.sum()) == _num_tokens(56, 56) + _num_tokens(112, 56) + _num_tokens(168, 56)
    assert not rollout.loss_mask[image_tokens].any()


def test_a_row_names_its_images_next_to_rows_without(folder: Path, store: ImageStore) -> None:
    with_image = prompt_with(folder, squares(store, RED, (0, 0, 0)))
    rollout, _ = roll_out(folder, with_image)
    text = prompt_with(folder)
    plain = replace(Rollout.failed(text, "no images"), status="ok")
    groups = [RolloutGroup.of(text, [plain, plain]), RolloutGroup.of(with_image, [rollout])]
    assert IMAGES not in groups[0].columns
    batch = build_batch(groups, RolloutConfig(num_prompts_per_step=2)).local()
    images = batch.ragged(IMAGES)
    assert images.lengths.tolist() == [0, 0, 2]
    assert images.values.dtype == np.uint8
    assert tuple(bytes(digest).hex() for digest in images[2]) == rollout.images[0]
    assert len(batch.ragged(TOKENS)) == 3


def test_a_policy_that_samples_the_token_of_an_image_fails_by_name(folder: Path, store: ImageStore) -> None:
    rollout, _ = roll_out(folder, prompt_with(folder, squares(store, RED)), says="<|image_pad|>")
    assert rollout.status == "failed"
    assert "sampled the token '<|image_pad|>'" in rollout.failure
    # the row still has the images of its prompt, whose tokens it has
    assert len(rollout.images[0]) == 1


def test_tokens_of_images_count_towards_the_limit_of_a_rollout(folder: Path, store: ImageStore) -> None:
    large = store.put(tiny_png(1, 840, 840))
    rollout, policy = roll_out(folder, replace(prompt_with(folder, large), token_ids=np.zeros(401, np.int32)))
    assert not policy.requests
    assert "the prompt has 401 tokens" in rollout.failure
