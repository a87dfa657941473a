"""The folder of a run's images, which the driver names to all of the run's processes, and its images in records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_core.images import STORE_VARIABLE
from rl_core.model_config import VisionConfig

FOLDER = "images"
"""In the folder of a run or an evaluation."""


def name_images(vision: VisionConfig, folder: str | Path) -> None:
    """Set the folder of the images of this process and of the workers that it starts (`rl_core.images`).

    Args:
        vision: Config section of the policy. Without images the folder has no name, so that nothing can use it.
        folder: Folder of the run or the evaluation.
    """
    if vision.enabled:
        os.environ[STORE_VARIABLE] = str(Path(folder).expanduser().absolute() / FOLDER)
    else:
        os.environ.pop(STORE_VARIABLE, None)


def text_of_content(content: Any) -> str:
    """Return a message's content for people, each image as its size and its file in the folder of the run.

    Args:
        content: A string, or a list of parts.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text_of_part(part) for part in content)
    return "" if content is None else str(content)


def _text_of_part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    digest = part.get("image")
    if part.get("type") != "image" or not isinstance(digest, str):
        return str(part.get("text", ""))
    size = f"{part.get('width', '?')} x {part.get('height', '?')}"
    return f"[image of {size}: {FOLDER}/{digest[:2]}/{digest}]"
