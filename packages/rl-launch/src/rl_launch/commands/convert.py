"""`rl convert`: conversion between the checkpoints of training backends, adapters and Hugging Face files."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl_core.config import as_written, tree_to_yaml
from rl_core.errors import ConfigError
from rl_core.model import HEADLESS_ROLES
from rl_core.model_config import LoraConfig
from rl_core.plugins import POLICIES, plugin, plugins
from rl_launch.cluster.device import check_devices, resolve_device
from rl_launch.commands.conversion_check import Probe
from rl_launch.commands.conversion_source import (
    CONFIG,
    PRECISION,
    Source,
    adapter_source,
    check_overrides,
    checkpoint_source,
    is_adapter,
    is_checkpoint,
    model_source,
    recast_source,
    without_adapters,
)
from rl_launch.commands.convert_pickled import is_pickled, write_safetensors
from rl_launch.commands.convert_quantized import Quantization, write_quantized
from rl_launch.commands.train import with_local_models
from rl_launch.model_files.adapter_folder import AdapterFolder
from rl_launch.model_files.model_folder import hf_config_fields
from rl_launch.root_config import POLICY
from rl_launch.run_config.checks import check_placement
from rl_launch.run_config.plan import RunPlan
from rl_launch.session.checkpoints.manifest import Manifest, sync_folder
from rl_launch.session.directory.checkpoint_name import CheckpointName

if TYPE_CHECKING:
    from rl_core.ray.model import RemoteModel

Start = Callable[[Source], AbstractContextManager["RemoteModel"]]
"""Build the model of a source in separate processes, which end with the context."""

HUGGING_FACE = "hf"
"""In place of a training backend: the format that is the default."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verification:
    """How a conversion proves itself.

    Args:
        enabled: Load what was written into other processes, and compare what the models compute.
        backend: Training backend that loads the Hugging Face files for it, so that both backends must read the same
            files alike; the one that converts if None.
    """

    enabled: bool = True
    backend: str | None = None


VERIFIED = Verification()


def named_source(source: str) -> str:
    """Return the folder of the checkpoint that a source names by its run; any other source as it is."""
    found = CheckpointName.parse(source)
    return source if found is None or found.part else str(found.checkpoint())


def to_hugging_face(
    source: Path,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    adapter: bool = False,
    verification: Verification = VERIFIED,
) -> None:
    """Write the weights of a checkpoint as files that `transformers` and vLLM load, with the backend of its own config;
    or an adapter in the format of `peft`, merged into the model that it sits on.

    The model is built as for resuming the run, without a reference, so that the files equal those that the run itself
    would export, bit for bit.

    Args:
        source: A checkpoint (`checkpoints/step_<n>` of a run, or one that `to_checkpoint` wrote), a run directory for
            its newest one, the folder of an adapter, or a folder with pickled weights (`pytorch_model.bin`), which are
            written as they are.
        target: A new folder.
        overrides: Keys of the config to set, such as the parallel sizes of the mesh to read it on. `policy.precision`
            is then the dtype of the files, to which weights are rounded once, as in a run of that precision.
        adapter: Write the adapters alone, in the format of `peft`; otherwise they are merged into the weights.
        verification: How the files are compared with the source.

    Raises:
        ConfigError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If it fails, or the files compute something else; nothing is left at `target` then.
    """
    _check_target(target)
    if is_pickled(source):
        _from_pickled(source, target, overrides, adapter=adapter, verification=verification)
        return
    is_cast = any(each.startswith(f"{PRECISION}=") for each in overrides)
    if adapter and is_cast:
        raise ConfigError(f"{PRECISION} has no effect on adapters, which are written as they were trained. Remove it")
    if is_adapter(source):
        if adapter:
            raise ConfigError(f"--adapter: {source} is already an adapter. Omit --adapter to merge it")
        found = adapter_source(source, overrides)
    else:
        found = checkpoint_source(source, overrides)
    check_overrides(overrides)
    if adapter:
        _check_adapted(found, source)
    with _Conversion.of(target, verification, found) as conversion, _made(target) as folder:
        conversion.write_files(found, folder, adapter=adapter, dtype=found.policy.precision if is_cast else None)
        if adapter and found.role in HEADLESS_ROLES:
            _log.info("the adapters are not verified, because adapters with a %s head cannot be read here", found.role)
        elif verification.enabled:
            conversion.check_files(_at(folder, found, adapter=adapter), f"the files in {target}")


def to_quantized(source: Path, target: Path, how: Quantization, overrides: Sequence[str] = ()) -> None:
    """Write a model in Hugging Face files with its linear layers quantised, as vLLM reads them.

    Args:
        source: Folder with Hugging Face files of a model that is not quantised.
        target: A new folder.
        how: Format, and layers to leave out.
        overrides: `cluster.worker_envs=...`; no other key has an effect.

    Raises:
        ConfigError, WorkerEnvironmentError: Before anything is written.
        RLError: If it fails; nothing is left at `target` then.
    """
    _check_target(target)
    with _made(target) as folder:
        write_quantized(source, folder, how, overrides)


def to_checkpoint(
    source: str,
    target: Path,
    backend: str,
    overrides: Sequence[str] = (),
    *,
    adapter: bool = False,
    verification: Verification = VERIFIED,
) -> None:
    """Write a model as a checkpoint of a training backend, with the config to read it by.

    Args:
        source: A folder with Hugging Face files, a hub name, the folder of an adapter, a checkpoint of any backend, or
            a run directory for its newest one.
        target: A new folder.
        backend: Name of a training backend.
        overrides: Keys of `policy` and `cluster` to set. `policy.precision` follows the model's files. Keys of another
            backend, which a checkpoint is of, are those of the mesh to read it on.
        adapter: Keep the adapters apart from the weights; otherwise they are merged into them.
        verification: How the checkpoint is compared with the source.

    Raises:
        As `to_hugging_face`.
    """
    _check_target(target)
    plugin(POLICIES, backend)
    folder = Path(source).expanduser()
    if is_adapter(folder):
        found = adapter_source(folder, overrides, backend=backend)
        _through_files(found, found, target, adapter=adapter, verification=verification)
    elif is_checkpoint(folder):
        found, other = _recast(folder, backend, overrides)
        check_overrides(overrides)
        if adapter:
            _check_adapted(found, folder)
        _through_files(found, other, target, adapter=adapter, verification=verification)
    elif adapter:
        raise ConfigError("--adapter needs a checkpoint or an adapter; SOURCE is a model")
    else:
        found = model_source(source, overrides, backend=backend)
        with _Conversion.of(target, verification, found) as conversion, _made(target) as made:
            written = conversion.write_checkpoint(found, made)
            if verification.backend is not None:
                conversion.check_files(found, source)
            conversion.check(written, f"the checkpoint {target}")


def _from_pickled(
    source: Path, target: Path, overrides: Sequence[str], *, adapter: bool, verification: Verification
) -> None:
    if adapter or verification.backend is not None:
        option = "--adapter" if adapter else "--verify-with"
        raise ConfigError(
            f"{option}: {source} has pickled weights, which are converted to safetensors and compared bit by bit. "
            f"Omit {option}"
        )
    with _made(target) as folder:
        write_safetensors(source, folder, overrides)


def _recast(folder: Path, backend: str, overrides: Sequence[str]) -> tuple[Source, Source]:
    """A checkpoint, and its model on another backend; each has the overrides that are about it."""
    meshes = tuple(f"policy.{each.key}." for each in plugins(POLICIES).values())
    found = checkpoint_source(folder, [each for each in overrides if each.startswith(("cluster.", *meshes))])
    own = f"policy.{found.backend.key}."
    is_other = found.backend.name != backend
    others = [each for each in overrides if not (is_other and each.startswith(own))]
    return found, recast_source(found, others, backend=backend)


def _through_files(found: Source, other: Source, target: Path, *, adapter: bool, verification: Verification) -> None:
    """Write the model of one source as a checkpoint of another, through Hugging Face files that are removed again."""
    with (
        _Conversion.of(target, verification, found, other) as conversion,
        _made(target) as made,
        _folder_beside(target, "files") as files,
    ):
        conversion.write_files(found, files, adapter=adapter)
        built = _at(files, other, adapter=adapter)
        if verification.backend is not None:
            conversion.check_files(
                built, f"the files between {found.checkpoint or found.policy.model_name} and {target}"
            )
        lora = built.policy.lora_cfg.model_copy(update={"adapter": None})
        written = conversion.write_checkpoint(built, made, as_source=other.with_policy(lora_cfg=lora))
        conversion.check(written, f"the checkpoint {target}")


class _Conversion:
    """Models that are started one after another on one cluster, of which the first says what all must compute.

    Args:
        start: Builds models.
        verification: True if and how they are compared.
    """

    def __init__(self, start: Start, verification: Verification) -> None:
        self._start = start
        self._verification = verification
        self._probe: Probe | None = None
        self._expected = np.empty(0, np.float32)

    @classmethod
    @contextmanager
    def of(cls, target: Path, verification: Verification, *sources: Source) -> Iterator[_Conversion]:
        """A cluster for the models of these sources, and of the backend that verifies.

        Raises:
            ConfigError, WorkerEnvironmentError: If one of them cannot be started.
        """
        readers = () if verification.backend is None else (sources[-1].on_backend(verification.backend),)
        with _cluster(target, (*sources, *readers)) as start:
            yield cls(start, verification)

    def write_files(self, source: Source, folder: Path, *, adapter: bool, dtype: str | None = None) -> None:
        """Write a model, in a dtype or that of its source, or only its adapters, as Hugging Face files."""
        with self._started(source) as model:
            _log.info("writing Hugging Face files")
            if adapter:
                model.export_adapter(str(folder))
            else:
                model.export(str(folder), dtype)

    def write_checkpoint(self, source: Source, folder: Path, *, as_source: Source | None = None) -> Source:
        """Write a model as a checkpoint, and the config to read it by; returns the checkpoint as a source.

        Args:
            source: Model to write.
            folder: Existing folder to write to.
            as_source: Source with the config to write; `source` if None.
        """
        stated = as_source or source
        with self._started(source) as model:
            _log.info("writing a checkpoint of %s", source.backend.name)
            (folder / POLICY).mkdir()
            model.save(str(folder / POLICY))
            written = model.finish_save() or ()
        tree = stated.plan.without_unused(as_written(stated.plan.root))
        (folder / CONFIG).write_text(tree_to_yaml(tree), encoding="utf-8")
        Manifest.of(folder, 0, {}, written={POLICY: written}, own=[CONFIG]).write(folder)
        return replace(stated, checkpoint=folder)

    def check_files(self, source: Source, subject: str) -> None:
        """Compare Hugging Face files with the first model, with the backend that verifies."""
        backend = self._verification.backend
        self.check(source if backend is None else source.on_backend(backend), subject)

    def check(self, source: Source, subject: str) -> None:
        """Compare what a source computes with the first model.

        Raises:
            RLError: If it computes something else.
        """
        if self._verification.enabled:
            assert self._probe is not None, "nothing was written before"
            with self._start(source) as model:
                _log.info("%s", self._probe.compare(self._expected, self._probe.results(model), subject))

    @contextmanager
    def _started(self, source: Source) -> Iterator[RemoteModel]:
        with self._start(source) as model:
            if self._verification.enabled and self._probe is None:
                policy = _local(source).policy
                fields = {**hf_config_fields(policy.model_name), **policy.hf_config_overrides}
                self._probe = Probe.of(
                    fields, role=source.role, precision=policy.precision, max_length=policy.max_total_sequence_length
                )
                self._expected = self._probe.results(model)
            yield model


def _at(folder: Path, source: Source, *, adapter: bool) -> Source:
    """A source with the files of a folder in the place of its weights, or of its adapters."""
    if adapter:
        return source.with_policy(lora_cfg=LoraConfig(**AdapterFolder.read(folder).settings()))
    return without_adapters(source.with_policy(model_name=str(folder.absolute()), hf_config_overrides={}))


def _check_target(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} already exists. Choose another TARGET")


def _check_adapted(found: Source, source: Path) -> None:
    if not found.policy.lora_cfg.enabled:
        raise ConfigError(
            f"--adapter: {source} trained no adapters (policy.lora_cfg.enabled is false). Omit --adapter to write the "
            "whole model"
        )


@contextmanager
def _cluster(target: Path, sources: Sequence[Source]) -> Iterator[Start]:
    """A cluster on which the models of these sources are started, each alone; their ranks' logs are written beside the
    target, a shared folder.

    Raises:
        ConfigError, WorkerEnvironmentError: If one of them cannot be started; nothing is started then.
    """
    cluster_config = sources[0].plan.config.cluster
    check_devices(cluster_config)

    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.runtime import Runtime, check_engines, provision_workers

    device = resolve_device(cluster_config)
    envs = {}
    for source in map(_local, sources):
        plan = _alone(source)
        check_placement(plan, device)
        envs[source.backend.name] = found = provision_workers(plan, None, device)
        check_engines(plan, found, device)

    @contextmanager
    def start(source: Source) -> Iterator[RemoteModel]:
        source = _local(source)
        with Runtime(_alone(source), envs[source.backend.name], cluster, logs) as runtime:
            num_ranks = cluster.num_nodes * cluster.ranks_per_node
            _log.info("starting %s on %d ranks", source.backend.name, num_ranks)
            model = runtime.models()[POLICY]
            if source.checkpoint is not None:
                _log.info("reading %s", source.checkpoint)
                files = Manifest.read(source.checkpoint).files_of(POLICY)
                model.load(str((source.checkpoint / POLICY).absolute()), files=files)
            yield model

    _log.info("starting Ray")
    with _folder_beside(target, "logs") as logs, VirtualCluster.of(cluster_config, device) as cluster:
        yield start


def _local(source: Source) -> Source:
    """The source with folders in the place of the names of models that are made on this machine."""
    return replace(source, plan=with_local_models(source.plan))


def _alone(source: Source) -> RunPlan:
    """The plan of the source's model and of no other, without a reference, and with an optimizer only if a checkpoint
    may hold one."""
    backends = source.plan.backends
    chosen = backends.models[POLICY]
    trains = chosen.spec.trains and source.checkpoint is not None
    alone = replace(chosen, spec=replace(chosen.spec, keeps_reference=False, trains=trains))
    return replace(source.plan, backends=replace(backends, models={POLICY: alone}, generation=None))


@contextmanager
def _folder_beside(target: Path, purpose: str) -> Iterator[Path]:
    """Yield a folder next to the target that is removed at the end."""
    beside = target.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.{purpose}-", dir=beside) as folder:
        yield Path(folder)


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
