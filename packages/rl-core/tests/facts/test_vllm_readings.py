"""Arguments with which vLLM computes a model as transformers does."""

import json
import shlex
from typing import Any

import pytest

from rl_core.facts.vllm_readings import (
    CORRECTED_ROUTING,
    EXTENSION,
    SERVING_NOTE,
    arguments_for_vllm,
    write_serving_note,
)

LONGROPE = {
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0},
}
YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "qwen3", "sliding_window": 4096, "dtype": "bfloat16"}, {}),
        ({"model_type": "cohere2", "sliding_window": 4096}, {"hf_overrides": {"sliding_window": 4095}}),
        ({"model_type": "cohere2", "sliding_window": None}, {}),
        ({"model_type": "qwen3", "dtype": "float32"}, {"dtype": "float32"}),
        (
            {"model_type": "llama4_text", "attn_temperature_tuning": False},
            {"override_generation_config": {"attn_temperature_tuning": False}},
        ),
        ({"model_type": "gemma3n_text"}, EXTENSION),
        ({"model_type": "lfm2"}, EXTENSION),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, {"hf_overrides": CORRECTED_ROUTING, **EXTENSION}),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "topk_method": "noaux_tc"},
            {"hf_overrides": CORRECTED_ROUTING, **EXTENSION},
        ),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, **CORRECTED_ROUTING}, EXTENSION),
    ],
)
def test_arguments_follow_from_the_fields_of_a_config(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert arguments_for_vllm(fields, 1024) == expected


@pytest.mark.parametrize(("longest", "expected"), [(1024, {"max_model_len": 4096}), (8192, {})])
def test_factors_of_longrope_are_those_of_training(longest: int, expected: dict[str, Any]) -> None:
    assert arguments_for_vllm({"model_type": "phi3", **LONGROPE}, longest) == expected


def test_an_export_has_the_command_that_serves_it(tmp_path) -> None:
    write_serving_note(tmp_path, {"model_type": "cohere2", "sliding_window": 31, "dtype": "float32"}, 256)
    note = (tmp_path / SERVING_NOTE).read_text()
    words = shlex.split(next(line for line in note.splitlines() if line.startswith("vllm serve")))
    assert words[:3] == ["vllm", "serve", "MODEL"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(given["--hf-overrides"]) == {"sliding_window": 30}
    assert given["--dtype"] == "float32"
    assert "adds one token" in note


def test_a_difference_without_an_argument_is_still_listed(tmp_path) -> None:
    write_serving_note(tmp_path, {"model_type": "deepseek_v2", "kv_lora_rank": 512, **YARN}, 256)
    assert "vLLM scales attention by other numbers. No argument changes this" in (tmp_path / SERVING_NOTE).read_text()


def test_an_export_that_needs_no_argument_has_no_note(tmp_path) -> None:
    write_serving_note(tmp_path, {"model_type": "qwen3", "dtype": "bfloat16"}, 256)
    assert not list(tmp_path.iterdir())
