"""Settings of vision-language models that are refused before anything starts."""

import pytest

from rl_core.model_config import VisionConfig
from rl_core.torch.vision.families import VISION_FAMILIES
from rl_dtensor.config import DTensorConfig
from rl_dtensor.model.settings import FAMILIES, vision_problems

SEEING = VisionConfig(enabled=True)


def test_every_family_that_is_accepted_is_there():
    assert set(FAMILIES) == set(VISION_FAMILIES)


@pytest.mark.parametrize(
    ("vision", "backend", "kind", "key"),
    [
        (SEEING, {"pipeline_parallel_size": 2}, "qwen2_5_vl", "dtensor_cfg.pipeline_parallel_size"),
        (SEEING, {}, "llava", "vision.enabled"),
        (SEEING, {"attention_backend": "flash_attention_2"}, "gemma3", "dtensor_cfg.attention_backend"),
        (VisionConfig(enabled=True, max_pixels=100), {}, "internvl", "vision.max_pixels"),
    ],
)
def test_what_cannot_run_is_named(vision, backend, kind, key):
    (problem,) = vision_problems(vision, DTensorConfig(**backend), {"model_type": kind})
    assert problem.key == key


def test_flash_attention_is_refused_for_models_of_gemma_4_whose_images_are_seen_both_ways():
    flash = DTensorConfig(attention_backend="flash_attention_2")
    fields = {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}
    (problem,) = vision_problems(SEEING, flash, fields)
    assert problem.key == "dtensor_cfg.attention_backend"
    fields = {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": None}}
    assert not list(vision_problems(SEEING, flash, fields))


def test_what_can_run_is_accepted():
    sized = VisionConfig(enabled=True, min_pixels=10, max_pixels=100)
    assert not list(vision_problems(sized, DTensorConfig(), {"model_type": "qwen3_vl"}))
    assert not list(vision_problems(VisionConfig(), DTensorConfig(), {"model_type": "llava"}))
