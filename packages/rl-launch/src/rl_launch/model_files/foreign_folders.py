"""Checkpoint folders of other frameworks, recognised by their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ForeignKind:
    """A kind of checkpoint that cannot be read.

    Args:
        name: Name with an article.
        patterns: Globs. A folder that matches one of them contains such a checkpoint.
        remedy: How to get Hugging Face files from it, as a sentence without the full stop.
    """

    name: str
    patterns: tuple[str, ...]
    remedy: str

    def __str__(self) -> str:
        return f"it is {self.name}. {self.remedy}"


FOREIGN_KINDS = (
    ForeignKind(
        "a DeepSpeed checkpoint",
        ("zero_to_fp32.py", "global_step*/*_optim_states.pt", "*_optim_states.pt", "global_step*/mp_rank_*"),
        "Run its zero_to_fp32.py with --safe_serialization, and save the model's config.json next to the result",
    ),
    ForeignKind(
        "a Megatron-LM checkpoint",
        ("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*/model_optim_rng.pt", "common.pt"),
        "Convert it with Megatron Bridge, or with tools/checkpoint of the Megatron-LM that wrote it",
    ),
    ForeignKind(
        "a PyTorch distributed checkpoint (torch.distributed.checkpoint)",
        (".metadata", "*.distcp"),
        "Export it with the program that wrote it",
    ),
    ForeignKind(
        "a NeMo checkpoint", ("model_config.yaml", "*.nemo", "weights/*.distcp"), "Export it with NeMo's export_ckpt"
    ),
    ForeignKind("a GGUF file of llama.cpp", ("*.gguf",), "Use the model that it was quantised from"),
    ForeignKind(
        "a model in Meta's own format",
        ("consolidated.*.pth",),
        "Convert it with convert_llama_weights_to_hf.py of transformers",
    ),
    ForeignKind(
        "a model in Mistral's own format",
        ("consolidated*.safetensors", "params.json"),
        "Use the Hugging Face files of the same model",
    ),
    ForeignKind(
        "a Flax or TensorFlow model",
        ("flax_model*.msgpack", "tf_model*.h5", "model.ckpt*"),
        "Load it with from_flax=True or from_tf=True of transformers 4 and save it with `save_pretrained`",
    ),
    ForeignKind(
        "a pickled adapter", ("adapter_model.bin",), "Load it with peft and save it with safe_serialization=True"
    ),
    ForeignKind(
        "a model with pickled weights",
        ("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
        "Run `rl convert FOLDER NEW_FOLDER`, which writes safetensors files without running code from the pickle",
    ),
)


PICKLED = FOREIGN_KINDS[-1]
"""Folders that `rl convert` turns into safetensors."""


def foreign_kind(folder: Path) -> ForeignKind | None:
    """Return the framework whose checkpoint a folder contains; None if it is not known."""
    return next((kind for kind in FOREIGN_KINDS if any(any(folder.glob(each)) for each in kind.patterns)), None)
