"""`rl convert`: conversion between the checkpoints of training backends, adapters and Hugging Face files."""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_core.config import as_written, tree_to_yaml
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError, RLError
from rl_core.model import HEADLESS_ROLES, LOGPROBS, SCORES, Model, Read, Role
from rl_core.model_config import LoraConfig
from rl_core.plugins import POLICIES, plugin, plugins
from rl_launch.cluster.device import check_devices, resolve_device
from rl_launch.commands.conversion.source import (
    CONFIG,
    PRECISION,
    ConversionSource,
    adapter_source,
    check_overrides,
    checkpoint_source,
    is_adapter,
    model_source,
    recast_source,
)
from rl_launch.commands.conversion.weight_files import (
    Quantization,
    is_megatron,
    is_pickled,
    write_from_megatron,
    write_quantized,
    write_safetensors,
)
from rl_launch.commands.train import with_local_models
from rl_launch.model_files.adapter_folder import AdapterFolder
from rl_launch.model_files.local_models import model_of_run
from rl_launch.model_files.model_folder import hf_config_fields
from rl_launch.root_config import POLICY
from rl_launch.run_config.checks import check_placement
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_session.checkpoints.manifest import CheckpointManifest, sync_path
from rl_launch.run_session.directory.checkpoint_name import CheckpointName

if TYPE_CHECKING:
    from rl_core.ray.model import RemoteModel

Start = Callable[[ConversionSource], AbstractContextManager["RemoteModel"]]
"""Build the model of a source in separate processes, which end with the context."""

HUGGING_FACE = "hf"
"""In place of a training backend: the format that is the default."""

_TOLERANCES = {"float32": 1e-5}
_HALF_TOLERANCE = 0.1
"""Of half precision: merged adapters and other kernels round otherwise, and wrong weights are off by more than 1."""

_NUM_ROWS, _LENGTH = 4, 32
_log = logging.getLogger(__name__)


def convert(
    source: str,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    to: str | None = None,
    adapter: bool = False,
    verify: bool = True,
    verify_with: str | None = None,
    quantize: str | None = None,
    group_size: int | None = None,
    exclude: Sequence[str] = (),
    dtype: str | None = None,
) -> None:
    """Convert as `rl convert` does; its help describes the arguments.

    Raises:
        ConfigError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If it fails, or the result computes something else; nothing is left at `target` then.
    """
    if quantize is not None:
        if to is not None or adapter or verify_with is not None or not verify:
            raise ConfigError("--quantize cannot be combined with --to, --adapter, --no-verify or --verify-with")
        if group_size is not None and quantize != "int4":
            raise ConfigError(f"--group-size has no effect with --quantize {quantize}")
        found = model_of_run(source) or Path(source).expanduser()
        _check_target(target)
        with _made(target) as folder:
            how = Quantization(quantize, group_size or 128, tuple(exclude), dtype or "")
            write_quantized(found, folder, how, overrides)
        return
    if group_size is not None or exclude:
        raise ConfigError("--group-size and --exclude have no effect without --quantize")
    if dtype is not None:
        raise ConfigError("--dtype has no effect without --quantize. Set policy.precision for the dtype of the files")
    if verify_with is not None and not verify:
        raise ConfigError("--verify-with and --no-verify cannot be combined")
    named = named_source(source)
    if to is None or to == HUGGING_FACE:
        folder = Path(named).expanduser()
        to_hugging_face(folder, target, overrides, adapter=adapter, verify=verify, verify_with=verify_with)
    else:
        to_checkpoint(named, target, to, overrides, adapter=adapter, verify=verify, verify_with=verify_with)


def named_source(source: str) -> str:
    """Return the folder of the checkpoint if a source is a run or a run and a step; any other source as it is."""
    found = CheckpointName.parse(source)
    return source if found is None or found.part else str(found.checkpoint())


def to_hugging_face(
    source: Path,
    target: Path,
    overrides: Sequence[str] = (),
    *,
    adapter: bool = False,
    verify: bool = True,
    verify_with: str | None = None,
) -> None:
    """Write the weights of a checkpoint as files that `transformers` and vLLM load, with the backend of its own config;
    or an adapter in the format of `peft`, merged into its base model.

    The model is built as for resuming the run, without a reference, so that the files equal those that the run itself
    would export, bit for bit.

    Args:
        source: A checkpoint (`checkpoints/step_<n>` of a run, or one that `to_checkpoint` wrote), a run directory for
            its newest one, the folder of an adapter, or a folder with pickled weights (`pytorch_model.bin`) or with a
            checkpoint of Megatron-LM, which are written as they are.
        target: A new folder.
        overrides: Keys of the config to set, such as the parallel sizes of the mesh to read it on. `policy.precision`
            is then the dtype of the files. Weights are rounded to it once, as in a run of that precision.
        adapter: Write only the adapters, in the format of `peft`; otherwise they are merged into the weights.
        verify: Load the files into other processes, and compare their results with the source's.
        verify_with: Training backend that loads the files for it, so that both backends must read the same files alike;
            the one that converts if None.

    Raises:
        ConfigError, RunDirectoryError, WorkerEnvironmentError: Before anything is started.
        RLError: If it fails, or the files compute something else; nothing is left at `target` then.
    """
    _check_target(target)
    if is_pickled(source):
        if adapter or verify_with is not None:
            option = "--adapter" if adapter else "--verify-with"
            raise ConfigError(
                f"{option}: {source} has pickled weights, which are converted to safetensors and compared bit by bit. "
                f"Omit {option}"
            )
        with _made(target) as folder:
            write_safetensors(source, folder, overrides)
        return
    if is_megatron(source):
        if adapter or verify_with is not None:
            option = "--adapter" if adapter else "--verify-with"
            raise ConfigError(
                f"{option}: {source} is a checkpoint of Megatron, whose weights are written as they are. Omit {option}"
            )
        with _made(target) as folder:
            write_from_megatron(source, folder, overrides)
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
    with _Conversion.of(target, verify, verify_with, found) as conversion, _made(target) as folder:
        conversion.write_files(found, folder, adapter=adapter, dtype=found.policy.precision if is_cast else None)
        if adapter and found.role in HEADLESS_ROLES:
            _log.info("the adapters are not verified, because adapters with a %s head cannot be read here", found.role)
        elif verify:
            conversion.check_files(_at(folder, found, adapter=adapter), f"the files in {target}")


def to_checkpoint(
    source: str,
    target: Path,
    backend: str,
    overrides: Sequence[str] = (),
    *,
    adapter: bool = False,
    verify: bool = True,
    verify_with: str | None = None,
) -> None:
    """Write a model as a checkpoint of a training backend, with the config to read it by.

    Args:
        source: A folder with Hugging Face files, a hub name, the folder of an adapter, a checkpoint of any backend, or
            a run directory for its newest one.
        target: A new folder.
        backend: Name of a training backend.
        overrides: Keys of `policy` and `cluster` to set. `policy.precision` follows the model's files. For a checkpoint
            of another backend, the keys of that backend describe the mesh to read it on.
        adapter: Keep the adapters apart from the weights; otherwise they are merged into them.
        verify: See `to_hugging_face`.
        verify_with: See `to_hugging_face`.

    Raises:
        As `to_hugging_face`.
    """
    _check_target(target)
    plugin(POLICIES, backend)
    folder = Path(source).expanduser()
    if is_adapter(folder):
        found = other = adapter_source(folder, overrides, backend=backend)
    elif (folder / POLICY).is_dir() or (folder / "checkpoints").is_dir():
        # each of the two has the overrides that are about it
        meshes = tuple(f"policy.{each.key}." for each in plugins(POLICIES).values())
        found = checkpoint_source(folder, [each for each in overrides if each.startswith(("cluster.", *meshes))])
        own = f"policy.{found.backend.key}."
        is_other = found.backend.name != backend
        others = [each for each in overrides if not (is_other and each.startswith(own))]
        other = recast_source(found, others, backend=backend)
        check_overrides(overrides)
        if adapter:
            _check_adapted(found, folder)
    elif adapter:
        raise ConfigError("--adapter needs a checkpoint or an adapter; SOURCE is a model")
    else:
        found = model_source(source, overrides, backend=backend)
        with _Conversion.of(target, verify, verify_with, found) as conversion, _made(target) as made:
            written = conversion.write_checkpoint(found, made)
            if verify_with is not None:
                conversion.check_files(found, source)
            conversion.check(written, f"the checkpoint {target}")
        return
    # through Hugging Face files that are removed again
    with (
        _Conversion.of(target, verify, verify_with, found, other) as conversion,
        _made(target) as made,
        _folder_beside(target, "files") as files,
    ):
        conversion.write_files(found, files, adapter=adapter)
        built = _at(files, other, adapter=adapter)
        if verify_with is not None:
            subject = f"the files between {found.checkpoint or found.policy.model_name} and {target}"
            conversion.check_files(built, subject)
        lora = built.policy.lora_cfg.model_copy(update={"adapter": None})
        written = conversion.write_checkpoint(built, made, as_source=other.with_policy(lora_cfg=lora))
        conversion.check(written, f"the checkpoint {target}")


@dataclass(frozen=True)
class Probe:
    """Rows of random tokens, and the values that a model computes for them.

    Args:
        batch: The rows.
        read: Logprobs, or scores of a model without a language-model head.
        tolerance: Largest difference, relative to values above 1.
    """

    batch: Batch
    read: Read
    tolerance: float

    @classmethod
    def of(cls, hf_config: Mapping[str, Any], *, role: Role, precision: str, max_length: int = _LENGTH) -> Probe:
        """Make rows that involve every part of a model.

        Args:
            hf_config: Fields of its Hugging Face config.
            role: Role of the model.
            precision: Precision of its computation.
            max_length: Maximum number of tokens of a row in its config.
        """
        text = {**hf_config, **(hf_config.get("text_config") or {})}
        length = min(_LENGTH, max_length, int(text.get("max_position_embeddings") or _LENGTH))
        draws = np.random.default_rng(0).integers(0, int(text["vocab_size"]), (_NUM_ROWS, length), dtype=np.int32)
        read = SCORES if role in HEADLESS_ROLES else LOGPROBS
        return cls(Batch({"tokens": Ragged.from_rows(draws)}), read, _TOLERANCES.get(precision, _HALF_TOLERANCE))

    def results(self, model: Model) -> np.ndarray:
        """Compute the results of a model: float32 `[tokens]` or `[rows]`."""
        column = model.infer(self.batch, [self.read])[self.read.name]
        return column.values if isinstance(column, Ragged) else column

    def compare(self, before: np.ndarray, after: np.ndarray, subject: str) -> str:
        """Compare the results before a conversion with the results of its files; returns a sentence for the log.

        Args:
            before: Results of the source, `[tokens]` or `[rows]`.
            after: Results of the written files.
            subject: The files, for the message.

        Raises:
            RLError: If they differ.
        """
        scale = np.maximum(1.0, np.abs(before))
        difference = float(np.max(np.abs(before - after) / scale)) if before.shape == after.shape else math.inf
        if not difference <= self.tolerance:
            raise RLError(
                f"{subject} compute different {self.read.name} than the source: the largest difference is "
                f"{difference:.2g}, but only {self.tolerance:g} is allowed. The conversion is wrong, so nothing was "
                "kept. Check that the source is complete and has the architecture of its config. Use --no-verify to "
                "skip this comparison"
            )
        return f"{self.read.name} of {subject} agree with the source's to {difference:.1e}"


class _Conversion:
    """Models that are started one after another on one cluster. All must compute the same as the first of them.

    Args:
        start: Builds models.
        verify: True to compare them.
        verify_with: Backend that reads Hugging Face files for the comparison; the backend of their source if None.
    """

    def __init__(self, start: Start, verify: bool, verify_with: str | None) -> None:
        self._start = start
        self._verify = verify
        self._verify_with = verify_with
        self._probe: Probe | None = None
        self._expected = np.empty(0, np.float32)

    @classmethod
    @contextmanager
    def of(
        cls, target: Path, verify: bool, verify_with: str | None, *sources: ConversionSource
    ) -> Iterator[_Conversion]:
        """Start a cluster for the models of these sources, and of the backend that verifies.

        Raises:
            ConfigError, WorkerEnvironmentError: If one of them cannot be started.
        """
        readers = () if verify_with is None else (sources[-1].on_backend(verify_with),)
        with _cluster(target, (*sources, *readers)) as start:
            yield cls(start, verify, verify_with)

    def write_files(self, source: ConversionSource, folder: Path, *, adapter: bool, dtype: str | None = None) -> None:
        """Write a model, in a dtype or in the dtype of its source, or only its adapters, as Hugging Face files."""
        with self._started(source) as model:
            _log.info("writing Hugging Face files")
            if adapter:
                model.export_adapter(str(folder))
            else:
                model.export(str(folder), dtype)

    def write_checkpoint(
        self, source: ConversionSource, folder: Path, *, as_source: ConversionSource | None = None
    ) -> ConversionSource:
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
        CheckpointManifest.of(folder, 0, {}, written={POLICY: written}, own=[CONFIG]).write(folder)
        return replace(stated, checkpoint=folder)

    def check_files(self, source: ConversionSource, subject: str) -> None:
        """Compare Hugging Face files with the first model, with the backend that verifies."""
        backend = self._verify_with
        self.check(source if backend is None else source.on_backend(backend), subject)

    def check(self, source: ConversionSource, subject: str) -> None:
        """Compare the results of a source with the results of the first model.

        Raises:
            RLError: If it computes something else.
        """
        if self._verify:
            assert self._probe is not None, "nothing was written before"
            with self._start(source) as model:
                _log.info("%s", self._probe.compare(self._expected, self._probe.results(model), subject))

    @contextmanager
    def _started(self, source: ConversionSource) -> Iterator[RemoteModel]:
        with self._start(source) as model:
            if self._verify and self._probe is None:
                policy = _local(source).policy
                fields = {**hf_config_fields(policy.model_name), **policy.hf_config_overrides}
                limit = policy.max_total_sequence_length
                self._probe = Probe.of(fields, role=source.role, precision=policy.precision, max_length=limit)
                self._expected = self._probe.results(model)
            yield model


def _at(folder: Path, source: ConversionSource, *, adapter: bool) -> ConversionSource:
    """Return a source with the files of a folder in the place of its weights, or of its adapters."""
    if adapter:
        stored = source.policy.lora_cfg.base_quantization
        settings = AdapterFolder.read(folder).settings() | {"base_quantization": stored}
        return source.with_policy(lora_cfg=LoraConfig(**settings))
    return source.with_policy(model_name=str(folder.absolute()), hf_config_overrides={}, lora_cfg=LoraConfig())


def _check_target(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} already exists. Choose another TARGET")


def _check_adapted(found: ConversionSource, source: Path) -> None:
    if not found.policy.lora_cfg.enabled:
        raise ConfigError(
            f"--adapter: {source} trained no adapters (policy.lora_cfg.enabled is false). Omit --adapter to write the "
            "whole model"
        )


@contextmanager
def _cluster(target: Path, sources: Sequence[ConversionSource]) -> Iterator[Start]:
    """Start a cluster for the models of these sources, which run one at a time. The logs of their ranks are
    written next to the target, to a shared folder.

    Raises:
        ConfigError, WorkerEnvironmentError: If one of them cannot be started; nothing is started then.
    """
    cluster_config = sources[0].plan.config.cluster
    check_devices(cluster_config)

    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.processes import check_engines, provision_workers
    from rl_launch.runtime.runtime import Runtime

    device = resolve_device(cluster_config)
    envs = {}
    for source in map(_local, sources):
        plan = _alone(source)
        check_placement(plan, device)
        envs[source.backend.name] = found = provision_workers(plan, None, device)
        check_engines(plan, found, device)

    @contextmanager
    def start(source: ConversionSource) -> Iterator[RemoteModel]:
        source = _local(source)
        with Runtime(_alone(source), envs[source.backend.name], cluster, logs) as runtime:
            num_ranks = cluster.num_nodes * cluster.ranks_per_node
            _log.info("starting %s on %d ranks", source.backend.name, num_ranks)
            model = runtime.models()[POLICY]
            if source.checkpoint is not None:
                _log.info("reading %s", source.checkpoint)
                files = CheckpointManifest.read(source.checkpoint).files_of(POLICY)
                model.load(str((source.checkpoint / POLICY).absolute()), files=files)
            yield model

    _log.info("starting Ray")
    with _folder_beside(target, "logs") as logs, VirtualCluster.of(cluster_config, device) as cluster:
        yield start


def _local(source: ConversionSource) -> ConversionSource:
    """Return the source with the folder of each model that is made on this machine."""
    return replace(source, plan=with_local_models(source.plan))


def _alone(source: ConversionSource) -> RunPlan:
    """Return the plan of the source's model and of no other, without a reference, and with an optimizer only if a
    checkpoint may hold one."""
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
    """Yield a folder next to `target` to write into, which is renamed at the end; after a failure nothing is left."""
    aside = target.absolute().with_name(f".{target.name}.converting")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.rename(target.absolute())
        sync_path(target.absolute().parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
