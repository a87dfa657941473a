"""`rl convert`: conversion between the checkpoints of training backends and Hugging Face files."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_algos import hub
from rl_core.config import to_yaml
from rl_core.errors import ConfigError, RunDirectoryError
from rl_core.model_config import ModelConfig, local_hf_config
from rl_core.plugins import POLICIES, BackendPlugin, plugin
from rl_launch.adapter_folder import ADAPTER_CONFIG, AdapterFolder
from rl_launch.backends import POLICY, backends_of
from rl_launch.cluster.device import check_devices, resolve_device
from rl_launch.commands.train import with_local_models
from rl_launch.local_models import MADE_HERE
from rl_launch.model_folder import MODEL_FILES, folder_problems
from rl_launch.root import check_placement, read_model_config
from rl_launch.session.checkpoints import newest_checkpoint
from rl_launch.session.manifest import Manifest, sync_folder

if TYPE_CHECKING:
    from rl_core.ray.model import RemoteModel

CONFIG = "config.yaml"

_log = logging.getLogger(__name__)


def to_hugging_face(source: Path, target: Path, overrides: Sequence[str] = (), *, adapter: bool = False) -> None:
    """Write the weights of a checkpoint as files that `transformers` and vLLM load, with the backend of its own config;
    or an adapter in the format of `peft`, merged into the model that it sits on.

    The model is built as for resuming the run, without a reference, so that the files equal those that the run itself
    would export, bit for bit.

    Args:
        source: a checkpoint (`checkpoints/step_<n>` of a run, or one that `to_checkpoint` wrote), a run directory for
            its newest one, or the folder of an adapter.
        target: a new folder.
        overrides: keys of the config to set, such as the parallel sizes of the mesh to read it on.
        adapter: write the adapters alone, in the format of `peft`; otherwise they are merged into the weights.

    Raises:
        ConfigError, RunDirectoryError, WorkerEnvironmentError: before anything is started.
        RLError: if it fails; nothing is left at `target` then.
    """
    _check_target(target)
    if (source / ADAPTER_CONFIG).is_file():
        _merge_adapter(source, target, overrides)
        return
    checkpoint = checkpoint_of(source)
    config = read_model_config(_config_file(checkpoint), overrides)
    if adapter and not config.policy.lora_cfg.enabled:
        raise ConfigError(
            f"--adapter: {source} trained no adapters (policy.lora_cfg.enabled is false); leave --adapter out to write "
            "the whole model"
        )
    damage = _damage(checkpoint)
    if damage:
        raise RunDirectoryError(f"checkpoint {checkpoint} is damaged: {damage}; choose another one")
    with _policy(config, target) as model, _made(target) as folder:
        _log.info("reading %s", checkpoint)
        files = Manifest.read(checkpoint).files_of(POLICY)
        model.load(str((checkpoint / POLICY).absolute()), files=files)
        _log.info("writing %s", target)
        if adapter:
            model.export_adapter(str(folder))
        else:
            model.export(str(folder))


def _merge_adapter(source: Path, target: Path, overrides: Sequence[str]) -> None:
    found = AdapterFolder.read(source)
    if not found.base and not any(each.startswith("policy.model_name=") for each in overrides):
        raise ConfigError(f"{source} does not name the model that it sits on; add policy.model_name=MODEL")
    values = {"model_name": found.base, "precision": _precision(found.base), "lora_cfg": found.settings()}
    config = read_model_config({POLICY: values}, overrides)
    with _policy(config, target) as model, _made(target) as folder:
        _log.info("writing %s", target)
        model.export(str(folder))


def to_checkpoint(source: str, target: Path, backend: str, overrides: Sequence[str] = ()) -> None:
    """Write the weights of a Hugging Face model as a checkpoint of a training backend, with the config to read it by.

    Args:
        source: a folder with Hugging Face files, or a hub name.
        target: a new folder.
        backend: name of a training backend.
        overrides: keys of `policy` and `cluster` to set. `policy.precision` follows the model's files.

    Raises:
        As `to_hugging_face`.
    """
    _check_target(target)
    found: BackendPlugin = plugin(POLICIES, backend)
    problems = [problem.message for problem in folder_problems("SOURCE", source, MODEL_FILES)]
    if problems:
        raise ConfigError("\n".join(problems))
    if source not in MADE_HERE and not Path(source).expanduser().is_dir():
        if "/" not in source:
            raise ConfigError(_not_there(source))
        if problem := hub.problem("model", source):
            raise ConfigError(f"SOURCE: {source!r} is {problem}")
    folder = Path(source).expanduser()
    name = str(folder.absolute()) if folder.is_dir() else source
    values = {"model_name": name, "precision": _precision(name), found.key: {"enabled": True}}
    config = read_model_config({POLICY: values}, overrides)
    chosen = backends_of(config).models[POLICY].plugin.name
    if chosen != backend:
        raise ConfigError(f"--to {backend}, but the overrides enable {chosen}; name one backend")
    with _policy(config, target) as model, _made(target) as written:
        _log.info("writing %s", target)
        (written / POLICY).mkdir()
        model.save(str(written / POLICY))
        (written / CONFIG).write_text(to_yaml(config), encoding="utf-8")
        Manifest.of(written, 0, {}, written={POLICY: model.finish_save() or ()}, own=[CONFIG]).write(written)


def checkpoint_of(source: Path) -> Path:
    """The checkpoint that a source names.

    Raises:
        ConfigError: if there is none; the message lists the kinds of sources.
        RunDirectoryError: if a run directory has no complete checkpoint.
    """
    if not source.is_dir():
        raise ConfigError(_not_there(str(source)))
    if (source / POLICY).is_dir():
        return source
    if (source / "checkpoints").is_dir():
        return newest_checkpoint(source)
    if (source / MODEL_FILES[0][0][0]).is_file():
        raise ConfigError(
            f"{source} holds Hugging Face files; name the backend to convert them for, such as --to dtensor"
        )
    held = ", ".join(sorted(entry.name for entry in source.iterdir())[:8]) or "nothing"
    raise ConfigError(
        f"{source} holds {held}, which is neither a checkpoint (with a folder {POLICY}), nor a run directory (with a "
        "folder checkpoints), nor a model's folder (with config.json), "
        f"nor an adapter (with {ADAPTER_CONFIG})"
    )


def _not_there(source: str) -> str:
    return (
        f"there is no folder {source!r} in {Path.cwd()}. SOURCE is a run directory, a checkpoint of one "
        "(RUN/checkpoints/step_N), or a folder that rl convert --to wrote; with --to BACKEND, a folder with Hugging "
        "Face files or a name on the hub (OWNER/NAME)"
    )


def _config_file(checkpoint: Path) -> Path:
    """The config of a checkpoint: beside it if it stands alone, else its run's."""
    places = [checkpoint / CONFIG, checkpoint.absolute().parent.parent / CONFIG]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ConfigError(f"neither {places[0]} nor {places[1]} exists; put the run's {CONFIG} in one of these places")
    return found


def _check_target(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already; choose another TARGET")


def _damage(checkpoint: Path) -> str:
    try:
        return Manifest.read(checkpoint).damage(checkpoint)
    except ValueError as error:
        return str(error)


def _precision(name: str) -> str:
    """The precision of the files, so that nothing is rounded; the default if the files do not state it."""
    fields = local_hf_config(ModelConfig(model_name=name))
    return "float32" if "float32" in (fields.get("dtype"), fields.get("torch_dtype")) else "bfloat16"


@contextmanager
def _policy(config: Any, target: Path) -> Iterator[RemoteModel]:
    """The model of a config, alone on its cluster; its ranks' logs are written beside the target, a shared folder."""
    check_devices(config.cluster)
    config = with_local_models(config)

    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.runtime import Runtime, check_engines, provision_workers

    backends = backends_of(config)
    chosen = backends.models[POLICY]
    alone = replace(chosen, spec=replace(chosen.spec, keeps_reference=False))
    backends = replace(backends, models={POLICY: alone}, generation=None)
    device = resolve_device(config.cluster)
    check_placement(config.cluster, backends, device)
    envs = provision_workers(config, backends, None, device)
    check_engines(config, backends, envs)
    beside = target.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{target.name}.logs-", dir=beside) as logs,
        VirtualCluster.of(config.cluster, device) as cluster,
        Runtime(config, backends, envs, cluster, Path(logs)) as runtime,
    ):
        _log.info("starting %s on %d ranks", chosen.plugin.name, cluster.num_nodes * cluster.ranks_per_node)
        yield runtime.models()[POLICY]


@contextmanager
def _made(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into, which is renamed at the end; after a failure nothing is left."""
    aside = target.absolute().with_name(f".{target.name}.converting")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(target.absolute())
        sync_folder(target.absolute().parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
