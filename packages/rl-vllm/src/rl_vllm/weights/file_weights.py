"""Weights in a model's files that transformers computes with, to compare them with those that the engine loads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from rl_core.facts.hf_config import language_fields
from rl_core.model_config import ModelConfig
from rl_core.torch.files.model_files import WeightFiles, model_folder, read_hf_config, weights_differ
from rl_core.weights import Manifest, TensorSpec, WeightTarget

MAX_NAMED = 4


@dataclass(frozen=True)
class FileWeights:
    """The weights of a model's files.

    Args:
        folder: Folder of the files.
        manifest: Tensors that transformers computes with. Two names of one weight are one tensor.
        apart: Names of weights that the config ties and the files hold with other values under each name.
        is_quantised: True if some of its weights are quantised in the files, so that not all are in the manifest.
    """

    folder: Path
    manifest: Manifest
    apart: Sequence[str] = ()
    is_quantised: bool = False

    @classmethod
    def of(cls, model: ModelConfig, *, target: WeightTarget = "policy", as_sent: bool = False) -> FileWeights:
        """Read the headers of a model's files, and the values that its config ties.

        Args:
            model: Config of the model.
            target: Model of the engine that loads them.
            as_sent: Name tensors as a policy sends them, dequantised and without the other parts of a composite model,
                instead of as the files do.

        Raises:
            ValueError: If the folder has no safetensors, or transformers has no such model.
        """
        folder, is_whole = model_folder(model.model_name), model.vision.enabled
        config = read_hf_config(folder, model.hf_config_overrides, is_whole=is_whole)
        family = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
        with torch.device("meta"):
            hf = family.from_config(config)
        files = WeightFiles.of(folder, is_whole=is_whole)
        stored, _ = type(config).get_config_dict(folder)
        is_quantised = "quantization_config" in {**stored, **language_fields(stored)}
        read = names_read(hf, files.names if as_sent else files.file_of)
        with files.open() as opened:
            # Two names in the files may be tied: they belong to one weight of the model.
            stored_as = {own: name for name, own in read.items()}
            pairs = [(stored_as.get(x), stored_as.get(y)) for x, y in (hf.all_tied_weights_keys or {}).items()]
            tied = {alias: owner for alias, owner in pairs if alias is not None and owner is not None}
            apart = next((pair for pair in tied.items() if weights_differ(opened, *pair)), ())
            tensors = []
            for name in (name for name in sorted(read) if name not in tied):
                if as_sent:
                    tensors.append(TensorSpec(name, opened.shape(name), model.precision))
                    continue
                weight = opened.weights[name]
                dtype = weight.read((slice(0, 0),) if weight.shape else ()).dtype
                known = files.stored_as.get(name, name)
                tensors.append(TensorSpec(known, weight.shape, str(dtype).removeprefix("torch.")))
        manifest = Manifest(version=0, tensors=tuple(tensors), tied=tied, target=target)
        return cls(folder, manifest, apart, is_quantised)

    def problem(self, unknown: Mapping[str, str], missing: Collection[str]) -> str:
        """Return why an engine that left out weights computes another model; empty if it does not.

        Args:
            unknown: Tensors that no parameter of the engine takes, to the reason.
            missing: Tensors that parameters of the engine wait for.
        """
        if self.apart:
            return (
                f"its config ties {' and '.join(self.apart)}, and the files hold other values under each name. vLLM "
                "follows the config, and transformers the files. Set "
                "policy.hf_config_overrides={tie_word_embeddings: false}"
            )
        found = {"vLLM does not load": list(unknown), "vLLM needs and the files lack": sorted(missing)}
        parts = []
        for clause, names in found.items():
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            if names:
                parts.append(f"{clause} {', '.join(names[:MAX_NAMED])}{more}")
        if not parts:
            return ""
        return (
            f"{'; '.join(parts)}. vLLM would compute another model than transformers. Set "
            "policy.generation.backend=hf, or choose a model without these tensors"
        )


def names_read(hf: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names of tensors in files that a model of transformers reads, to the names in its state that they
    are a part of. Buffers that it computes and layers that it leaves out are not among them.

    Args:
        hf: The model; its weights may be on the meta device.
        names: Names of the tensors in the files.
    """
    conversions = get_model_conversion_mapping(hf)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    state = hf.state_dict()
    owned = {name: rename_source_key(name, renamings, converters, hf.base_model_prefix, state)[0] for name in names}
    return {name: own for name, own in owned.items() if own in state}
