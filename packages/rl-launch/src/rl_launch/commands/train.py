"""`rl train`: one run of an algorithm, from its resolved config to its last checkpoint."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_core.environments.trial import Trial
from rl_core.errors import RLError
from rl_core.plugins import ALGORITHMS, AlgorithmPlugin, plugin, resolve
from rl_launch.backends import backends_of, model_sections, section_of, with_section
from rl_launch.cluster.device import check_devices, resolve_device
from rl_launch.cluster.ray_address import check_ray_address
from rl_launch.local_models import MADE_HERE, TINY, WARMED_UP, models_folder, tiny_model
from rl_launch.model_folder import check_models
from rl_launch.placement.bundles import PlacementError
from rl_launch.root import check_placement, read_config
from rl_launch.runtime.environment_trials import trials_of, try_here, try_in
from rl_launch.runtime.restoration import Restoration
from rl_launch.session import RunDirectory, RunSession
from rl_launch.session.checkpoints import newest_checkpoint
from rl_launch.session.lock import FILE_NAME as LOCK
from rl_launch.session.writers import check_writers

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        metrics: of its last step.
        stop_signal: the signal that ended it, saved, before its last step; None if none did.
    """

    metrics: Mapping[str, float]
    stop_signal: signal.Signals | None = None

    def exit_if_stopped(self) -> None:
        """End this process as the signal would have, if one ended the run: what follows needs a run that is finished.

        Raises:
            SystemExit: with 128 and the number of the signal.
        """
        if self.stop_signal is not None:
            _log.warning(
                "%s ended the run before its last step; the same command goes on from there", self.stop_signal.name
            )
            raise SystemExit(128 + self.stop_signal)


def train(config: Any, *, run_dir: str | Path, title: str = "", fresh: bool = False) -> Outcome:
    """Run the configured algorithm in a run directory, resuming what is there; a run that lost a model worker or a node
    goes on from its newest checkpoint, on what is left.

    What can be found wrong without a worker is, before a process is started, and what is found soonest comes first.

    Args:
        config: resolved root.
        run_dir: made, or resumed.
        title: shown with the progress.
        fresh: refuse to go on with an earlier run.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: before anything is started.
        RLError: where the run fails, with role, rank, node and phase.
    """
    started = time.monotonic()
    algorithm: AlgorithmPlugin = plugin(ALGORITHMS, config.algorithm)
    check_writers(config.logger)
    check_ray_address()
    check_devices(config.cluster)
    check_run_dir(run_dir, config, fresh=fresh)
    check_models(model_names(config))
    loaded = resolve(algorithm.load)(config)
    untried = try_here(trials_of(config, algorithm, loaded), config.cluster.worker_envs)
    restoration = Restoration(saves=config.checkpointing.enabled)
    session = RunSession(run_dir, config, title=title, fresh=fresh, since=started)
    while True:
        try:
            _run(config, loaded, untried, session, restoration)
            return Outcome(session.last_metrics, session.stop_signal)
        except PlacementError as error:
            raise restoration.failed(error) from None
        except RLError:
            if not restoration.goes_on:
                raise
        untried = []
        session = RunSession(run_dir, config, title=title, since=started)


def _run(config: Any, loaded: Any, untried: Sequence[Trial], session: RunSession, restoration: Restoration) -> None:
    # imports transformers, which takes a second
    from rl_algos.tokenizer import load_tokenizer

    restoration.goes_on = False
    config = with_local_models(config)
    algorithm: AlgorithmPlugin = plugin(ALGORITHMS, config.algorithm)
    tokenizer = load_tokenizer(config.policy.tokenizer, config.policy.model_name)
    data = resolve(algorithm.prepare)(config, tokenizer, loaded)
    needs = resolve(algorithm.rollouts)(config, data) if algorithm.generates else None

    # Ray takes a second to import: only a run that will start may pay for it
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.commands.family_proof import prove_family
    from rl_launch.runtime.runtime import Runtime, check_engines, provision_workers

    backends = backends_of(config)
    device = resolve_device(config.cluster)
    check_placement(config.cluster, backends, device)
    envs = provision_workers(config, backends, needs, device)
    try_in(envs.interpreters, untried)
    check_engines(config, backends, envs)
    for role, model in backends.models.items():
        prove_family(section_of(config, model.section), model.section, model.plugin, envs.interpreters[role])
    # the run directory is taken when nothing is left to refuse, so that another config may have it after a refusal
    with (
        session,
        VirtualCluster.of(config.cluster, device, after_a_loss=restoration.follows_a_loss) as cluster,
        Runtime(config, backends, envs, cluster, session.directory.logs) as runtime,
    ):
        try:
            with session.phase("starting"):
                components = runtime.components(data, needs, vocabulary=len(tokenizer))
            with session.with_models():
                resolve(algorithm.run)(config, components, session)
        except RLError as error:
            restoration.judge(error, session, runtime.lost_nodes)
            raise


def check_run_dir(run_dir: str | Path, config: Any, *, fresh: bool) -> None:
    """Refuse a folder that is there and that the run could not have. One that is not there, is empty, or holds a start
    that was cut short is left as it is: it becomes a run once all else is right.

    Raises:
        RunDirectoryError: as `RunDirectory.open`.
    """
    directory = RunDirectory(run_dir)
    if not directory.path.exists():
        return
    names = {entry.name for entry in directory.path.iterdir()} if directory.path.is_dir() else {directory.path.name}
    if names and (LOCK not in names or directory.config.is_file()):
        directory.open(config, fresh=fresh)
        directory.close()


def model_names(config: Any) -> dict[str, str]:
    """Folders and hub names that a run loads models and tokenizers from, by key; without those that are made here."""
    names = {f"{key}.model_name": section_of(config, key).model_name for key in model_sections(config)}
    tokenizer = config.policy.tokenizer.name
    if tokenizer is not None:
        names["policy.tokenizer.name"] = tokenizer
    return {key: name for key, name in names.items() if name not in MADE_HERE}


def with_local_models(config: Any) -> Any:
    """The config with the folders of models that are made on this machine in the place of their names, and the text of
    the chat template in the place of its file, which other machines may not have.
    """
    for key in model_sections(config):
        section = section_of(config, key)
        tokenizer = section.tokenizer.model_copy(update={"chat_template": section.tokenizer.template_text()})
        if tokenizer.name is not None:
            tokenizer = tokenizer.model_copy(update={"name": _local_model(tokenizer.name)})
        changed = {"model_name": _local_model(section.model_name), "tokenizer": tokenizer}
        config = with_section(config, key, section.model_copy(update=changed))
    return config


def _local_model(name: str) -> str:
    """The folder of a model that is made here, made if it is not there yet; any other name as it is, a folder below the
    home folder written out.
    """
    if name == TINY:
        return str(tiny_model())
    if name == WARMED_UP:
        return str(_warmed_up_model())
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _warmed_up_model() -> Path:
    models = models_folder()
    run_dir, finished = models / "sft-arithmetic", models / WARMED_UP
    if not finished.is_symlink():
        _log.info("warming up %s by SFT in %s; this is done once", TINY, run_dir)
        train(read_config("sft-arithmetic").config, run_dir=run_dir, title="warm-up").exit_if_stopped()
        finished.symlink_to((newest_checkpoint(run_dir) / "hf").relative_to(models), target_is_directory=True)
    return finished
