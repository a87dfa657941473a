"""The folder of a run's images, which the driver names to all of the run's processes."""

from __future__ import annotations

import os
from pathlib import Path

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
