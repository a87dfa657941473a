"""Scoring a model on validation prompts, without a policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_algos.tokenizer import load_tokenizer
from rl_core.errors import ConfigError
from rl_core.generation import Evaluation
from rl_core.plugins import algorithm_named, resolve
from rl_launch.backends import backends_of
from rl_launch.cluster.device import check_devices, resolve_device
from rl_launch.commands.train import model_names, with_local_models
from rl_launch.model_folder import check_models
from rl_launch.root import check_placement
from rl_launch.runtime.environment_trials import trials_of, try_here, try_in


def evaluate(config: Any, *, logs: Path) -> Evaluation:
    """Roll out the validation prompts of a config with the weights at `policy.model_name`.

    Args:
        config: resolved root.
        logs: folder for the workers' logs.

    Raises:
        ConfigError: if the algorithm does not evaluate by rollouts, or this machine does not have the devices or
            nodes, before anything is loaded.
    """
    check_devices(config.cluster)
    algorithm = algorithm_named(config.algorithm)
    if not algorithm.evaluate:
        raise ConfigError(
            f"algorithm: {algorithm.name} has no evaluation by rollouts; use a config of another algorithm"
        )
    check_models(model_names(config))
    loaded = resolve(algorithm.load)(config)
    untried = try_here(trials_of(config, algorithm, loaded), config.cluster.worker_envs)
    config = with_local_models(config)
    tokenizer = load_tokenizer(config.policy.tokenizer, config.policy.model_name)
    data = resolve(algorithm.prepare)(config, tokenizer, loaded)
    needs = resolve(algorithm.rollouts)(config, data)

    # Ray takes a second to import, which checks that fail should not wait for
    from rl_launch.cluster.virtual_cluster import VirtualCluster
    from rl_launch.runtime.runtime import Runtime, provision_workers

    backends = replace(backends_of(config), models={})
    device = resolve_device(config.cluster)
    check_placement(config.cluster, backends, device)
    envs = provision_workers(config, backends, needs, device)
    try_in(envs.interpreters, untried)
    logs.mkdir(parents=True, exist_ok=True)
    with (
        VirtualCluster.of(config.cluster, device) as cluster,
        Runtime(config, backends, envs, cluster, logs) as runtime,
    ):
        evaluation: Evaluation = resolve(algorithm.evaluate)(config, data, runtime.evaluation_pool(needs))
        return evaluation
