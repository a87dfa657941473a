"""`rl convert --quantize`: a model whose linear layers an engine serves in few bits, in an environment with torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_core.errors import ConfigError
from rl_launch.commands.torch_conversion import answer_of, torch_interpreter
from rl_launch.model_files.weight_files import INDEX, SINGLE

FORMATS = ("int4", "mxfp4", "float8")
DTYPES = ("float32", "bfloat16", "float16")

_log = logging.getLogger(__name__)

_QUANTISE = """
import sys
from rl_core.torch.quantization.files import quantise_to_stdout
quantise_to_stdout(*sys.argv[1:])
"""


@dataclass(frozen=True)
class Quantization:
    """How the linear layers of a model are quantised.

    Args:
        format: One of `FORMATS`.
        group_size: Number of inputs that share a scale, for `int4`.
        exclude: Names of modules that are left out, or endings of them, or the modules around them.
        dtype: Dtype to which weights are rounded before they are quantised; empty for the dtype of the files.
    """

    format: str
    group_size: int = 128
    exclude: tuple[str, ...] = ()
    dtype: str = ""


def write_quantized(source: Path, target: Path, how: Quantization, overrides: Sequence[str] = ()) -> None:
    """Write a model quantised, for engines that read `compressed-tensors`, with its config and tokenizer.

    Args:
        source: Folder with Hugging Face files.
        target: Empty folder.
        how: Format, and layers to leave out.
        overrides: `cluster.worker_envs=...`; no other key has an effect.

    Raises:
        ConfigError: If the source is not such a folder, or the format does not fit the model.
        WorkerEnvironmentError: If no environment with torch can be provided.
        RLError: If the conversion does not finish.
    """
    if how.format not in FORMATS:
        raise ConfigError(f"--quantize: got {how.format!r}; allowed: {', '.join(FORMATS)}")
    if how.dtype and how.dtype not in DTYPES:
        raise ConfigError(f"--dtype: got {how.dtype!r}; allowed: {', '.join(DTYPES)}")
    if how.group_size < 1:
        raise ConfigError(f"--group-size: got {how.group_size}; set it to 1 or more")
    if not ((source / SINGLE).is_file() or (source / INDEX).is_file()) or not (source / "config.json").is_file():
        raise ConfigError(
            f"--quantize: {source} is not a folder with a model in Hugging Face files. Convert it first, without "
            "--quantize, and pass the result"
        )
    python = torch_interpreter(overrides, "a model that is quantised")
    answer = answer_of(python, _QUANTISE, source, target, json.dumps(asdict(how)))
    _log.info(
        "%d linear layers in %s of %s weights, %.2f GB instead of %.2f; weights are off by %.1f %% (root mean square)",
        answer["num_quantised"],
        how.format,
        answer["dtype"],
        answer["num_bytes"] / 1e9,
        answer["num_bytes_before"] / 1e9,
        100 * answer["relative_error"],
    )
