"""The sources of a conversion: found and refused before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_algos import hub
from rl_core.config import as_written
from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.model import HEADLESS_ROLES, Role
from rl_core.model_config import ModelConfig, local_hf_config
from rl_core.plugins import POLICIES, BackendPlugin, plugin
from rl_launch.model_files.adapter_folder import ADAPTER_CONFIG, AdapterFolder
from rl_launch.model_files.local_models import MADE_HERE
from rl_launch.model_files.model_facts import model_problems
from rl_launch.model_files.model_folder import MODEL_FILES, folder_problems
from rl_launch.model_files.weight_files import foreign_kind
from rl_launch.root_config import POLICY, with_section, with_values
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_model_plan
from rl_launch.run_session.checkpoints.checkpoints import newest_checkpoint
from rl_launch.run_session.checkpoints.manifest import FILE_NAME, CheckpointManifest

CONFIG = "config.yaml"

PRECISION = f"{POLICY}.precision"

_OF_TRAINING = {
    *("optimizer", "scheduler", "max_grad_norm", "max_skipped_steps"),
    *("train_global_batch_size", "train_micro_batch_size"),
}
"""Keys of a model that only training reads."""


@dataclass(frozen=True)
class ConversionSource:
    """A model that can be built.

    Args:
        plan: Plan of a run or of a single model; its `policy` is the model.
        checkpoint: Loaded into it once it is built; None for the weights at `policy.model_name`.
    """

    plan: RunPlan
    checkpoint: Path | None = None

    @property
    def policy(self) -> ModelConfig:
        """The section of the model."""
        return self.plan.config.policy

    @property
    def role(self) -> Role:
        """Its purpose, which decides its head."""
        return self.plan.backends.models[POLICY].spec.role

    @property
    def backend(self) -> BackendPlugin:
        """Its training backend."""
        return self.plan.backends.models[POLICY].plugin

    def with_policy(self, **changes: Any) -> ConversionSource:
        """Return the same config with other settings of the model, and without a checkpoint."""
        config = with_section(self.plan.config, POLICY, with_values(self.policy, changes))
        return ConversionSource(self.plan.with_config(config))

    def on_backend(self, name: str) -> ConversionSource:
        """Return the same model on a training backend in its default settings; as it is if that is its backend."""
        mine, other = self.backend, plugin(POLICIES, name)
        if mine.name == other.name:
            return self
        off = getattr(self.policy, mine.key).model_copy(update={"enabled": False})
        changed = self.with_policy(**{mine.key: off, other.key: other.config(enabled=True)})
        return replace(changed, checkpoint=self.checkpoint)


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse keys that change nothing in the files that a conversion writes.

    Raises:
        ConfigError: If there are any; lists them.
    """
    keys = [each.lstrip("+~").partition("=")[0] for each in overrides]
    paths = {key: key.split(".") for key in keys}
    idle = [
        key
        for key, (section, *rest) in paths.items()
        if section not in (POLICY, "cluster") or (section == POLICY and rest and rest[0] in _OF_TRAINING)
    ]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)}: has no effect on the files. Remove it. rl convert reads the section cluster, and "
            f"the keys of {POLICY} that build the model, such as policy.precision"
        )


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter in the format of `peft`."""
    return (folder / ADAPTER_CONFIG).is_file()


def checkpoint_source(folder: Path, overrides: Sequence[str]) -> ConversionSource:
    """Return a checkpoint, or the newest one of a run directory.

    Raises:
        ConfigError: If there is none.
        RunDirectoryError: If it is damaged.
    """
    checkpoint = checkpoint_of(folder)
    # its config is next to it, or is the config of its run
    places = [checkpoint / CONFIG, checkpoint.absolute().parent.parent / CONFIG]
    config = next((place for place in places if place.is_file()), None)
    if config is None:
        raise ConfigError(f"neither {places[0]} nor {places[1]} exists. Copy the {CONFIG} of the run to one of them")
    source = ConversionSource(read_model_plan(config, overrides), checkpoint)
    damage = f"it has no {FILE_NAME}, which is written last, so it is incomplete"
    if (checkpoint / FILE_NAME).is_file():
        try:
            manifest = CheckpointManifest.read(checkpoint)
            damage = manifest.damage(checkpoint)
            if not damage and not manifest.files_of(POLICY):
                damage = f"it has no files of {POLICY}"
        except ValueError as error:
            damage = str(error)
    if damage:
        raise RunDirectoryError(f"checkpoint {checkpoint} is damaged: {damage}; choose another checkpoint")
    return source


def adapter_source(folder: Path, overrides: Sequence[str], *, backend: str | None = None) -> ConversionSource:
    """Return an adapter on its base model.

    Args:
        folder: Folder of the adapter.
        overrides: Keys to set, as `key=value`; they can replace the base model of the adapter.
        backend: Backend that builds it; by default the one that the overrides enable.
    """
    found = AdapterFolder.read(folder)
    if not found.base and not any(each.startswith("policy.model_name=") for each in overrides):
        raise ConfigError(f"{folder} does not contain the name of its base model. Add policy.model_name=MODEL")
    values = {"model_name": found.base, "precision": _precision(found.base), "lora_cfg": found.settings()}
    return _single(values, overrides, backend)


def model_source(name: str, overrides: Sequence[str], *, backend: str) -> ConversionSource:
    """Return a folder with Hugging Face files, or a model of the hub.

    Args:
        name: Path of the folder, or name on the hub.
        overrides: Keys to set, as `key=value`.
        backend: Backend that builds it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() and (folder.parent / FILE_NAME).is_file() and not (folder / MODEL_FILES[0][0][0]).is_file():
        raise ConfigError(f"{name} is a part of the checkpoint {folder.parent}. Pass that folder")
    problems = [problem.message for problem in folder_problems("SOURCE", name, MODEL_FILES)]
    if problems:
        raise ConfigError("\n".join(problems))
    if name not in MADE_HERE and not folder.is_dir():
        if "/" not in name:
            raise ConfigError(_not_there(name))
        if problem := hub.problem("model", name):
            raise ConfigError(f"SOURCE: {name!r} is {problem}")
    found = str(folder.absolute()) if folder.is_dir() else name
    source = _single({"model_name": found, "precision": _precision(found)}, overrides, backend)
    facts = model_problems(POLICY, source.policy, longest_row=0, has_scalar_head=False)
    if problems := [problem.message for problem in facts]:
        raise ConfigError("\n".join(problems))
    return source


def recast_source(source: ConversionSource, overrides: Sequence[str], *, backend: str) -> ConversionSource:
    """Return the model of a checkpoint on another backend, not yet with its weights.

    Args:
        source: Checkpoint, whose config gives the model.
        overrides: Keys of the model and of `cluster` to set, as `key=value`.
        backend: Backend that builds the model.

    Raises:
        ConfigError: If the model has no language-model head, which the config of a single model cannot express.
    """
    if source.role in HEADLESS_ROLES:
        raise ConfigError(
            f"{source.checkpoint} holds a {source.role.replace('_', ' ')}, and --to makes checkpoints of language "
            "models; leave --to out to write it as Hugging Face files"
        )
    kept = ("model_name", "precision", "tokenizer", "hf_config_overrides", "lora_cfg")
    written = as_written(source.plan.root)
    return _single({name: written[POLICY][name] for name in kept}, overrides, backend, cluster=written["cluster"])


def checkpoint_of(source: Path) -> Path:
    """Return the checkpoint of a source.

    Raises:
        ConfigError: If there is none; the message lists the kinds of sources.
        RunDirectoryError: If a run directory has no complete checkpoint.
    """
    if not source.is_dir():
        raise ConfigError(_not_there(str(source)))
    if (source / POLICY).is_dir():
        return source
    if (source / "checkpoints").is_dir():
        return newest_checkpoint(source)
    if (source.absolute().parent / FILE_NAME).is_file():
        raise ConfigError(f"{source} is a part of the checkpoint {source.absolute().parent}. Pass that folder")
    if (source / MODEL_FILES[0][0][0]).is_file() and any((source / name).is_file() for name in MODEL_FILES[1][0]):
        raise ConfigError(
            f"{source} contains Hugging Face files. Pass the backend to convert them for, such as --to dtensor"
        )
    held = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) or "nothing"
    if foreign := foreign_kind(source):
        raise ConfigError(f"{source} (it contains {held}) is not a valid SOURCE: {foreign}")
    raise ConfigError(
        f"{source} contains {held}, which is neither a checkpoint (with a folder {POLICY}), nor a run directory "
        "(with a folder checkpoints), nor a model's folder (with config.json and safetensors), "
        f"nor an adapter (with {ADAPTER_CONFIG})"
    )


def _single(
    values: Mapping[str, Any], overrides: Sequence[str], backend: str | None, **sections: Mapping[str, Any]
) -> ConversionSource:
    """Return a single model.

    Args:
        values: Values of the model's section.
        overrides: Keys to set, as `key=value`.
        backend: Backend that must be enabled; any backend if None.
        sections: Values of further sections, whose keys otherwise have their defaults.
    """
    enabling = {plugin(POLICIES, backend).key: {"enabled": True}} if backend is not None else {}
    given = {name: dict(section) for name, section in sections.items()}
    source = ConversionSource(read_model_plan({POLICY: {**values, **enabling}, **given}, overrides))
    chosen = source.backend.name
    if backend is not None and chosen != backend:
        raise ConfigError(f"--to {backend}, but the overrides enable {chosen}; name one backend")
    return source


def _not_there(source: str) -> str:
    return (
        f"folder {source!r} does not exist in {Path.cwd()}. SOURCE is a run directory, a checkpoint of one "
        "(RUN/checkpoints/step_N), an adapter, or a folder that rl convert --to wrote; with --to BACKEND, also a "
        "folder with Hugging Face files or a name on the hub (OWNER/NAME)"
    )


def _precision(name: str) -> str:
    """Return the precision of the files, so that nothing is rounded; the default if the files do not state it."""
    fields = local_hf_config(ModelConfig(model_name=name))
    return "float32" if "float32" in (fields.get("dtype"), fields.get("torch_dtype")) else "bfloat16"
