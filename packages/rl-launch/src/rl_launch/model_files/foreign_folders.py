"""Folders of other frameworks' checkpoints, recognised by the files that they write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ForeignKind:
    """A kind of checkpoint that is not read here.

    Args:
        name: with its article.
        patterns: globs; a folder that has a match of one holds such a checkpoint.
        remedy: how to get Hugging Face files from it.
    """

    name: str
    patterns: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        return f"it is {self.name}; {self.remedy}"


FOREIGN_KINDS = (
    ForeignKind(
        "a DeepSpeed checkpoint",
        ("zero_to_fp32.py", "global_step*/*_optim_states.pt", "*_optim_states.pt", "global_step*/mp_rank_*"),
        "run its zero_to_fp32.py with --safe_serialization, and save the model's config.json beside the result",
    ),
    ForeignKind(
        "a checkpoint of Megatron-LM",
        ("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*/model_optim_rng.pt", "common.pt"),
        "convert it with Megatron Bridge, or with tools/checkpoint of the Megatron-LM that wrote it",
    ),
    ForeignKind(
        "a distributed checkpoint of PyTorch (torch.distributed.checkpoint)",
        (".metadata", "*.distcp"),
        "export it with the program that wrote it",
    ),
    ForeignKind(
        "a checkpoint of NeMo", ("model_config.yaml", "*.nemo", "weights/*.distcp"), "export it with NeMo's export_ckpt"
    ),
    ForeignKind("a GGUF file of llama.cpp", ("*.gguf",), "get the model that it was quantised from"),
    ForeignKind(
        "a model in Meta's own format",
        ("consolidated.*.pth",),
        "convert it with convert_llama_weights_to_hf.py of transformers",
    ),
    ForeignKind(
        "a model in Mistral's own format",
        ("consolidated*.safetensors", "params.json"),
        "get the Hugging Face files of the same model",
    ),
    ForeignKind(
        "a model of Flax or TensorFlow",
        ("flax_model*.msgpack", "tf_model*.h5", "model.ckpt*"),
        "load it with from_flax=True or from_tf=True of transformers 4 and save it with `save_pretrained`",
    ),
    ForeignKind(
        "an adapter that was pickled",
        ("adapter_model.bin",),
        "load it with peft and save it with safe_serialization=True",
    ),
    ForeignKind(
        "a model with pickled weights",
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
        "`rl convert FOLDER NEW_FOLDER` writes safetensors of it; it runs no code of the pickle",
    ),
)


PICKLED = FOREIGN_KINDS[-1]
"""Folders that `rl convert` turns into safetensors."""


def foreign_kind(folder: Path) -> ForeignKind | None:
    """The framework whose checkpoint a folder holds; None if it is not known."""
    return next((kind for kind in FOREIGN_KINDS if any(any(folder.glob(each)) for each in kind.patterns)), None)
