"""A model's weights as Hugging Face files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rl_core.facts.hf_config import language_fields
from rl_core.facts.template_ends import template_ends
from rl_core.model import HEADLESS_ROLES, Role
from rl_core.torch.files.model_files import CONFIG, GENERATION_CONFIG, INDEX, PRECISION, SINGLE, WeightFiles
from rl_core.torch.process_group import on_all_ranks, on_rank0
from rl_core.torch.training.backend import RankMesh, RankModel, RankWeights
from rl_core.weights import buckets, num_bytes

FILE_BYTES = 2 * 2**30
"""Maximum number of bytes of one safetensors file, and of the tensors that a writing rank gathers at a time."""


_WIDE = ("F32", "F64")
"""Dtypes in safetensors of tensors that lose bits in half precision."""

_LOWER = ("bfloat16", "float16")
"""Dtypes in configs of models in half precision."""


def export_dtype(folder: Path, precision: str) -> str:
    """Return float32 if the model computes in it, else the dtype that its source has on disk; the compute dtype if the
    source does not say.

    Args:
        folder: Folder of the model's source.
        precision: Compute dtype of the model.
    """
    if precision == "float32":
        return precision
    return stated_dtype(folder) or precision


def stated_dtype(folder: Path) -> str | None:
    """Return the dtype of a model's files by its config; None if it has none."""
    config = json.loads((folder / CONFIG).read_text())
    stated = (each.get(name) for each in (config, language_fields(config)) for name in ("dtype", "torch_dtype"))
    source = next((dtype for dtype in stated if dtype), None)
    return None if source is None else str(source).removeprefix("torch.")


def float32_among_others(files: WeightFiles) -> set[str]:
    """Return the float32 tensors of files with other dtypes, if the model is of less by its config or most values."""
    with files.open() as opened:
        wide = {name for name in files.names if opened.dtype(name) in _WIDE}
        is_wide_model = opened.common_dtype in _WIDE and stated_dtype(files.folder) not in _LOWER
    return set() if is_wide_model or wide == set(files.names) else wide


def write_hf_config(
    model: RankModel, path: Path, *, role: Role, dtype: str, tokenizer: Path, keeps_code: bool = False
) -> None:
    """Write the config of an export for `transformers`.

    Args:
        model: Model that is exported.
        path: Folder of the export; created if it does not exist.
        role: Role of the model, which decides its head.
        dtype: Dtype of the exported weights, such as `bfloat16`.
        tokenizer: Folder of the tokenizer, which knows the padding token of a model with a scalar head.
        keeps_code: True of a model whose classes come with its files.

    Raises:
        ValueError: If `transformers` has no class for this family and role.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = type(model.hf_config).from_dict(model.hf_config.to_dict())
    config.dtype = dtype
    config.architectures = [model.architecture]
    if not keeps_code:
        # The class is transformers' own, and not code that came with the model.
        vars(config).pop("auto_map", None)
    if role in HEADLESS_ROLES:
        config.num_labels = 1
        config.pad_token_id = padding_token(tokenizer, config.to_dict())
    config.save_pretrained(path)


def complete_generation_config(folder: Path) -> None:
    """Add the stop tokens that the policy was taught to `eos_token_id` of an export, which generators stop at:
    the end of sequence, and the end of a turn in the chat template, such as `<|im_end|>` on a base model."""
    if not (folder / "tokenizer.json").is_file():
        return
    tokenizer = _tokenizer(folder)
    path = folder / GENERATION_CONFIG
    model = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    stated = fields.get("eos_token_id", model.get("eos_token_id"))
    known = stated if isinstance(stated, list) else [stated]
    missing = {tokenizer.convert_tokens_to_ids(token) for token in _taught_ends(tokenizer)} - set(known)
    if missing:
        special = {name: model[name] for name in ("bos_token_id", "pad_token_id") if model.get(name) is not None}
        ends = [each for each in known if each is not None] + sorted(missing)
        path.write_text(json.dumps({**special, **fields, "eos_token_id": ends}, indent=2), encoding="utf-8")


def padding_token(folder: Path, fields: Mapping[str, Any]) -> int | None:
    """Return the id of the padding token of a model with a scalar head: the last token that differs from it is the one
    whose score `transformers` takes. None if that token may also end a row, whose score would be found one token too
    early; `transformers` then refuses padded rows.

    Args:
        folder: Folder of the tokenizer, whose padding token comes first: rows are padded with it.
        fields: Fields of the model's Hugging Face config, which may have one if the tokenizer has none.
    """
    stated = fields.get("eos_token_id")
    ends = set(stated) if isinstance(stated, list) else {stated}
    found = fields.get("pad_token_id")
    if (folder / "tokenizer.json").is_file():
        tokenizer = _tokenizer(folder)
        ends |= {tokenizer.convert_tokens_to_ids(token) for token in _taught_ends(tokenizer)}
        found = found if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    is_token = isinstance(found, int) and 0 <= found < fields.get("vocab_size", found + 1)
    return found if is_token and found not in ends else None


def _taught_ends(tokenizer: Any) -> list[str]:
    """Return the stop tokens that the policy was taught."""
    return [token for token in (tokenizer.eos_token, template_ends(tokenizer).token) if token]


def _tokenizer(folder: Path) -> Any:
    # comes with the backends; a folder without a tokenizer has none to ask
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def export_weights(weights: RankWeights, path: Path, *, dtype: str, precision: str, mesh: RankMesh) -> None:
    """Write the weights of the whole model into a folder, in files of at most `FILE_BYTES` each; collective.

    The metadata of the files has the precision that they are computed in, which a dtype that is wider does not show.
    They are brought together one file at a time. The ranks that get them take turns to write, each while the next file
    is brought together, and hold two files at most. A shared parameter is written once, adapters are merged.
    """
    files = list(buckets(weights.specs(dtype), FILE_BYTES))
    names = [f"model-{index + 1:05d}-of-{len(files):05d}.safetensors" for index in range(len(files))]
    if len(files) == 1:
        names = [SINGLE]
    holders = weights.holders
    stream = (named for tensors in weights.stream(dtype) for named in tensors)
    metadata = {"format": "pt", PRECISION: precision}
    with ThreadPoolExecutor(1) as writer:
        writes: list[Future[None]] = []
        for index, (file, bucket) in enumerate(zip(names, files, strict=True)):
            is_writer = holders[index % len(holders)] == mesh.rank
            gathered: dict[str, Tensor] = {}
            for _ in bucket:
                name, tensor = next(stream)
                if is_writer:
                    assert tensor is not None, f"{name} did not reach the rank that writes it"
                    gathered[name] = tensor.cpu().contiguous()
            if is_writer:
                # Whether it failed or not, this rank still takes part in bringing the rest together.
                wait(writes[-1:])
                writes.append(writer.submit(save_file, gathered, path / file, metadata=metadata))

        def finish() -> None:
            for write in writes:
                write.result()

        on_all_ranks(mesh.control, finish)

    def write_index() -> None:
        if len(files) > 1:
            file_of = {spec.name: file for file, specs in zip(names, files, strict=True) for spec in specs}
            size = sum(num_bytes(spec) for specs in files for spec in specs)
            content = {"metadata": {"total_size": size}, "weight_map": file_of}
            (path / INDEX).write_text(json.dumps(content, indent=2))

    on_rank0(mesh.control, write_index)
