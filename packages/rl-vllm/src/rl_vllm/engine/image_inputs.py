"""Prompts with images, as vLLM's engine takes them: expanded tokens, pixels, and the places of both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange
from vllm.multimodal.processing import BaseMultiModalProcessor, ProcessorInputs, TimingContext
from vllm.renderers import BaseRenderer

from rl_core.errors import RequestRefused
from rl_core.images import ImageError, ImageStore
from rl_vllm.patches.numbers_of_videos import spell_no_numbers

# vLLM makes the processor with the engine.
spell_no_numbers()

CACHED_BYTES = 2**30
"""Size of the processed images that are kept for the next requests of their conversations and groups."""

IMAGE = "image"
"""vLLM's name of images among the kinds of input."""


class ProcessedImage(NamedTuple):
    """An image as the engine's processor reads it.

    Args:
        item: Pixels and their further inputs.
        token_ids: Tokens between its first and its last embedding, and both.
        is_embed: Bool `[tokens]`, the tokens that embeddings replace; None for all.
    """

    item: MultiModalKwargsItem
    token_ids: list[int]
    is_embed: torch.Tensor | None


class ImageInputs:
    """Makes the prompts of requests with images; called outside the event loop, from one thread or several.

    Every image is processed separately, with the engine's own processor, and placed where its tokens are. vLLM's way of
    expanding placeholders is not used: it expands ids that are already expanded once more, without an error.

    Args:
        renderer: Renderer of vLLM, which has the processor of the model.
        image_token: Id of the tokens that represent an image.
        max_images: Maximum number of images of a request.
    """

    def __init__(self, renderer: BaseRenderer, *, image_token: int, max_images: int) -> None:
        self._processor: BaseMultiModalProcessor[Any] = renderer.get_mm_processor()
        self._image_token = image_token
        self._max_images = max_images
        self._cache: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def require_text(self, token_ids: np.ndarray) -> None:
        """Refuse tokens of images in a request without images.

        Raises:
            RequestRefused: If there are any, with their number.
        """
        num_tokens = int(np.count_nonzero(token_ids == self._image_token))
        if num_tokens:
            raise RequestRefused(
                f"the request has {num_tokens} image tokens (id {self._image_token}), but no images; a policy must not "
                "sample them, and texts must not contain them"
            )

    def prompt(self, token_ids: np.ndarray, digests: Sequence[str], salt: str | None) -> Any:
        """Return vLLM's input of a request.

        Args:
            token_ids: Int32 `[tokens]`, with all tokens of each image.
            digests: Digests of the images, in order.
            salt: Keys and values in the prefix cache are used only by requests with the same salt.

        Raises:
            RequestRefused: If an image is missing, or its tokens are not the ones that the engine's processor makes.
        """
        if len(digests) > self._max_images:
            raise RequestRefused(
                f"the request has {len(digests)} images; policy.vision.max_images allows {self._max_images}"
            )
        images = [self._processed(digest) for digest in digests]
        ids = token_ids.tolist()
        return mm_input(
            ids,
            {IMAGE: [image.item for image in images]},
            {IMAGE: list(digests)},
            {IMAGE: placed(ids, images, self._image_token)},
            cache_salt=salt,
        )

    def _processed(self, digest: str) -> ProcessedImage:
        # One thread works at a time: image processors need not be safe for several.
        with self._lock:
            if digest in self._cache:
                self._cache.move_to_end(digest)
                return self._cache[digest]
            try:
                pixels = ImageStore.of_run().open(digest)
            except ImageError as error:
                raise RequestRefused(str(error)) from error
            items = self._processor.info.parse_mm_data({IMAGE: [pixels]})
            inputs = ProcessorInputs([], items, {IMAGE: [digest]})
            result = self._processor._apply_hf_processor(inputs, TimingContext(enabled=False))
            (update,) = result.prompt_updates[IMAGE][0]
            content = update.content
            is_embed = None if content.is_embed is None else content.is_embed(content.full)
            image = self._cache[digest] = trimmed(result.kwargs[IMAGE][0], content.full, is_embed)
            self._num_bytes += _num_bytes(image.item)
            while self._num_bytes > CACHED_BYTES and len(self._cache) > 1:
                _, oldest = self._cache.popitem(last=False)
                self._num_bytes -= _num_bytes(oldest.item)
            return image


def trimmed(item: MultiModalKwargsItem, token_ids: list[int], is_embed: torch.Tensor | None) -> ProcessedImage:
    """Return an image without the tokens before its first and after its last embedding. A tokenizer may have merged
    these with the text around the image, as Gemma 3's tokenizer merges line ends.
    """
    if is_embed is None:
        return ProcessedImage(item, token_ids, None)
    places = is_embed.nonzero().flatten().tolist()
    first, last = places[0], places[-1] + 1
    within = is_embed[first:last]
    return ProcessedImage(item, token_ids[first:last], None if bool(within.all()) else within)


def placed(ids: list[int], images: Sequence[ProcessedImage], image_token: int) -> list[PlaceholderRange]:
    """Return the place of each image among the tokens of a request.

    Args:
        ids: All tokens.
        images: Images in the order of their tokens.
        image_token: Id of the tokens that represent an image.

    Raises:
        RequestRefused: If the tokens are not exactly the tokens of these images.
    """
    places: list[PlaceholderRange] = []
    start = 0
    for number, image in enumerate(images):
        start = _next(ids, image_token, start)
        end = start + len(image.token_ids)
        if ids[start:end] != image.token_ids:
            raise _mismatch(ids, start, image, number)
        places.append(PlaceholderRange(offset=start, length=end - start, is_embed=image.is_embed))
        start = end
    if (left := _next(ids, image_token, start)) < len(ids):
        if images and left == start:
            raise _mismatch(ids, places[-1].offset, images[-1], len(images) - 1)
        raise RequestRefused(
            f"the request has {len(images)} images, but its tokens have those of more: token {left} is the id of "
            f"image tokens ({image_token}); a policy must not sample it, and texts must not contain it"
        )
    return places


def _mismatch(ids: list[int], start: int, image: ProcessedImage, number: int) -> RequestRefused:
    if start == len(ids):
        return RequestRefused(f"the tokens of image {number} are not among those of the request")
    given = next((place for place in range(start, len(ids)) if ids[place] not in image.token_ids), len(ids)) - start
    return RequestRefused(
        f"image {number} has {given} tokens in the request, but vLLM's processor makes {len(image.token_ids)} of it: "
        "the trainer's and the engine's image processors differ. Both read the processor's files in "
        "policy.model_name; set policy.vision.min_pixels and max_pixels for both, not in vllm_cfg.vllm_kwargs"
    )


def _next(ids: list[int], token: int, start: int) -> int:
    """Return the next place of a token, beginning at `start`; the end if there is none."""
    try:
        return ids.index(token, start)
    except ValueError:
        return len(ids)


def _num_bytes(item: MultiModalKwargsItem) -> int:
    tensors = [each for each in item.get_data().values() if isinstance(each, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)
