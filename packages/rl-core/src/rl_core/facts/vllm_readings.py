"""Models that vLLM computes differently from transformers unless it is given an argument.

The table is the one place for these differences. rl's own engine passes the arguments by itself, an export lists them
in `SERVING.md` for other users of vLLM, and the table of `docs/model-families.md` is compared with it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rl_core.facts.hf_config import rope_of_layers, switches_at, with_overrides

Fields = Mapping[str, Any]
"""Fields of a language model's Hugging Face config, with their defaults."""

SERVING_NOTE = "SERVING.md"

EXTENSION = {"worker_extension_cls": "rl_vllm.EngineWorker"}
"""Argument that makes vLLM load rl's corrections of its models, if rl-vllm is installed next to it."""

NO_ARGUMENT = "No argument changes this: serve it with transformers, or set policy.generation.backend=hf"

CORRECTED_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Fields of DeepSeek-V3's config that vLLM reads and transformers takes for granted."""

SIGMOID_ROUTING = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "dots1", "ernie4_5_moe")


class Reading(NamedTuple):
    """One difference.

    Args:
        models: Name of the models, for readers.
        difference: What vLLM (0.32) does differently, as a sentence.
        applies: Function from the fields of a config and the maximum number of tokens of a row to whether the model is
            one of them.
        arguments: Function from the same to arguments of vLLM that mend it; empty if there are none.
        on_cpu: True if only vLLM's build for CPUs differs.
    """

    models: str
    difference: str
    applies: Callable[[Fields, int], bool]
    arguments: Callable[[Fields, int], dict[str, Any]]
    on_cpu: bool = False


def scales_read_otherwise(fields: Fields) -> dict[str, Any]:
    """Return the parameters of rotary embeddings that vLLM and transformers turn into different scales of attention,
    with the type under `rope_type`; empty if there are none.

    LongRoPE: transformers takes `attention_factor`, else a function of `factor`; vLLM takes `short_mscale` and
    `long_mscale`, else the same function of the ratio of both lengths. YaRN with latent attention (DeepSeek-V3): vLLM
    reads no `attention_factor`, and takes one of `mscale` and `mscale_all_dim` without the other.
    """
    for each in rope_of_layers(fields):
        if names := _scales(fields, each):
            return {name: each[name] for name in names} | {"rope_type": each.get("rope_type")}
    return {}


def _scales(fields: Fields, rope: Mapping[str, Any]) -> list[str]:
    given = {name for name, value in rope.items() if value is not None}
    if rope.get("rope_type") in ("longrope", "su") and fields.get("model_type") != "phimoe":
        longest, original = fields.get("max_position_embeddings"), switches_at(fields)
        if longest and original and rope.get("factor") == longest / original:
            given.discard("factor")
        return sorted(given & {"attention_factor", "factor", "short_mscale", "long_mscale"})
    if rope.get("rope_type") == "yarn" and fields.get("kv_lora_rank") is not None:
        scales = {name for name in ("mscale", "mscale_all_dim") if rope.get(name)}
        return sorted((given & {"attention_factor"}) | (scales if len(scales) == 1 else set()))
    return []


READINGS = (
    Reading(
        "Command R7B and Command A (`cohere2`)",
        "vLLM adds one token to the config's sliding window.",
        lambda fields, longest: (
            fields.get("model_type") in ("cohere2", "cohere2_moe") and bool(fields.get("sliding_window"))
        ),
        lambda fields, longest: {"hf_overrides": {"sliding_window": fields["sliding_window"] - 1}},
    ),
    Reading(
        "DeepSeek-V3 without `topk_method` or `scoring_func` in its config",
        "vLLM has no biases that correct the load of experts, or routes by softmax.",
        lambda fields, longest: (
            fields.get("model_type") == "deepseek_v3" and not CORRECTED_ROUTING.items() <= fields.items()
        ),
        lambda fields, longest: {"hf_overrides": CORRECTED_ROUTING},
    ),
    Reading(
        "Llama 4",
        "vLLM reads whether the temperature of attention follows the length of rows only from the generation config.",
        lambda fields, longest: fields.get("model_type") == "llama4_text",
        lambda fields, longest: {
            "override_generation_config": {"attn_temperature_tuning": bool(fields.get("attn_temperature_tuning", True))}
        },
    ),
    Reading(
        "LongRoPE (Phi-3.5, Phi-4-mini), trained with the short factors",
        "vLLM chooses the factors by the longest row that it may serve, by default the long ones.",
        lambda fields, longest: (
            (switch := switches_at(fields)) is not None
            and longest <= switch < (fields.get("max_position_embeddings") or 0)
        ),
        lambda fields, longest: {"max_model_len": switches_at(fields)},
    ),
    Reading(
        "Models in float32",
        "vLLM computes them in half precision by default.",
        lambda fields, longest: str(fields.get("dtype")).removeprefix("torch.") == "float32",
        lambda fields, longest: {"dtype": "float32"},
    ),
    Reading(
        "Gemma 3n as a language model (`gemma3n_text`)",
        "vLLM leaves out the embeddings of tokens for each layer.",
        lambda fields, longest: fields.get("model_type") == "gemma3n_text",
        lambda fields, longest: EXTENSION,
    ),
    Reading(
        "LFM2, and latent attention (DeepSeek)",
        "vLLM rotates queries and keys by the positions of other tokens.",
        lambda fields, longest: (
            str(fields.get("model_type")).startswith("lfm2") or fields.get("kv_lora_rank") is not None
        ),
        lambda fields, longest: EXTENSION,
        on_cpu=True,
    ),
    Reading(
        "Routers with sigmoids or correcting biases (GLM-4.5, MiniMax-M2, ERNIE 4.5)",
        "vLLM ignores both in routers without groups of experts.",
        lambda fields, longest: fields.get("model_type") in SIGMOID_ROUTING,
        lambda fields, longest: EXTENSION,
        on_cpu=True,
    ),
    Reading(
        "LongRoPE with `attention_factor`, or YaRN with latent attention and one of `mscale` and `mscale_all_dim`",
        "vLLM scales attention by other numbers.",
        lambda fields, longest: bool(scales_read_otherwise(fields)),
        lambda fields, longest: {},
    ),
)
"""All of them."""


def arguments_for_vllm(fields: Fields, longest: int = 0) -> dict[str, Any]:
    """Return the arguments that make vLLM compute a model as transformers does, by Python name.

    Args:
        fields: Fields of the language model's Hugging Face config, with their defaults.
        longest: Maximum number of tokens of a row in training.
    """
    found: dict[str, Any] = {}
    for reading in READINGS:
        if reading.applies(fields, longest):
            found = with_overrides(found, reading.arguments(fields, longest))
    return found


def command_for_vllm(arguments: Mapping[str, Any]) -> str:
    """Return the command that serves a model with these arguments."""
    words = ["vllm", "serve", "MODEL"]
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}", value if isinstance(value, str) else json.dumps(value)]
    return shlex.join(words)


def write_serving_note(folder: Path, fields: Fields, longest: int) -> None:
    """Write into the folder of an export how vLLM computes the model that was trained, if it needs arguments.

    Args:
        folder: Folder of the export.
        fields: Fields of the language model's Hugging Face config, with their defaults.
        longest: Maximum number of tokens of a row in training.
    """
    found = [reading for reading in READINGS if reading.applies(fields, longest)]
    if not found:
        return
    lines = [
        "# Serving this model with vLLM",
        "",
        "transformers computes the model that was trained. vLLM 0.32 does so only with these arguments:",
        "",
        "```sh",
        command_for_vllm(arguments_for_vllm(fields, longest)),
        "```",
        "",
    ]
    for reading in found:
        arguments = reading.arguments(fields, longest)
        where = "On CPU, " if reading.on_cpu else ""
        remedy = ", ".join(f"`--{name.replace('_', '-')}`" for name in arguments)
        needs = " (needs rl-vllm in the same environment)" if arguments == EXTENSION else ""
        lines.append(
            f"- **{reading.models}.** {where}{reading.difference} "
            + (f"Mended by {remedy}{needs}." if arguments else f"{NO_ARGUMENT}.")
        )
    (folder / SERVING_NOTE).write_text("\n".join(lines) + "\n", encoding="utf-8")
