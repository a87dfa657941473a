"""Read images of SmolVLM without the package that spells the times of videos.

- Fault: transformers' processor of SmolVLM, which vLLM reads images with, refuses to be made without the package
  `num2words`, which only the texts of videos need.
- vLLM 0.32.0, `vllm/model_executor/models/smolvlm.py`, with transformers 5.19,
  `transformers/models/smolvlm/processing_smolvlm.py`.
- Upstream: no upstream issue found on 2026-11-27.
- Delete when `tests/patches/test_numbers_of_videos.py::test_the_processor_asks_for_the_package_at_once` fails.
"""

from __future__ import annotations

from transformers.models.smolvlm import processing_smolvlm


def spell_no_numbers() -> None:
    """Let processors of SmolVLM be made without the package; a video is then refused."""
    if processing_smolvlm.num2words is None:
        processing_smolvlm.num2words = _spelled


def _spelled(number: int) -> str:
    raise NotImplementedError(f"videos need the package num2words, which spells {number}")
