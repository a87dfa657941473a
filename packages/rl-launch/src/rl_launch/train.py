"""`rl train`: one run of an algorithm, from its resolved config to its last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_algos.tokenizer import load_tokenizer
from rl_core.registry import ALGORITHMS, AlgorithmPlugin, plugin, resolve
from rl_launch.device import resolve_device
from rl_launch.local_models import local_model
from rl_launch.root import backends_of
from rl_launch.session import RunSession


def train(config: Any, *, run_dir: str | Path, title: str = "", fresh: bool = False) -> Mapping[str, float]:
    """Run the configured algorithm in a run directory, resuming what is there.

    Data, environments of workers and the run directory are checked before a process is started.

    Args:
        config: resolved root.
        run_dir: made, or resumed.
        title: shown with the progress.
        fresh: refuse to go on with an earlier run.

    Returns:
        The metrics of the last step.

    Raises:
        ConfigError, DataError, RunDirectoryError, WorkerEnvironmentError: before anything is started.
        RLError: where the run fails, with role, rank, node and phase.
    """
    written, config = config, with_local_model(config)
    algorithm: AlgorithmPlugin = plugin(ALGORITHMS, config.algorithm)
    tokenizer = load_tokenizer(config.policy.tokenizer, config.policy.model_name)
    data = resolve(algorithm.prepare)(config, tokenizer)
    needs = resolve(algorithm.rollouts)(config, data) if algorithm.generates else None
    with RunSession(run_dir, written, title=title, fresh=fresh) as session:
        # Ray takes a second to import: only a run that will start may pay for it
        from rl_launch.cluster import VirtualCluster
        from rl_launch.runtime import Runtime, check_engines, provision_workers

        backends = backends_of(config)
        device = resolve_device(config.cluster.device)
        pythons = provision_workers(config, backends, needs, device)
        check_engines(config, backends, pythons)
        with (
            VirtualCluster.of(config.cluster, device) as cluster,
            Runtime(config, backends, pythons, cluster, session.directory.logs) as runtime,
        ):
            with session.phase("starting"):
                components = runtime.components(algorithm, data, needs, vocabulary=len(tokenizer))
            resolve(algorithm.run)(config, components, session)
    return session.last_metrics


def with_local_model(config: Any) -> Any:
    """The config with the folder of a model that is made on this machine in the place of its name."""
    folder = local_model(config.policy.model_name)
    return config.model_copy(update={"policy": config.policy.model_copy(update={"model_name": folder})})
