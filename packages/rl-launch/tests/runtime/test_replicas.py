"""The settings that replicas are started with."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rl_core.plugins import RolloutNeeds
from rl_core.rollouts.generation import Placement
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.processes import StartTimeouts
from rl_launch.runtime.replicas import Replicas

ADAPTERS = ["policy.lora_cfg.enabled=true", "policy.generation.lora_sync=adapter"]


def generator_args(*, awaits_weights, **needs):
    generation = read_plan("grpo-arithmetic", ["cluster.device=cpu", *ADAPTERS]).backends.generation
    needs = RolloutNeeds("module:Program", {}, frozenset(), **needs)
    cluster = SimpleNamespace(is_placed=None)
    topology = SimpleNamespace(num_replicas=1)
    processes = SimpleNamespace(cluster=cluster, topology=topology, logs="", timeouts=StartTimeouts(1, 1))
    with ExitStack() as stack:
        replicas = Replicas(generation, needs, None, processes, stack=stack)
        start = [(print, Placement("cpu", awaits_weights=awaits_weights))]
        return replicas._replica(start, 0)._spec.generator_args


@pytest.mark.parametrize(("awaits_weights", "lora_sync"), [(True, "adapter"), (False, "merged")])
def test_replicas_of_an_evaluation_await_no_adapters(awaits_weights, lora_sync):
    assert generator_args(awaits_weights=awaits_weights)[0].lora_sync == lora_sync


@pytest.mark.parametrize("awaits_weights", [True, False])
def test_replicas_that_are_sent_weights_keep_the_cache_if_the_algorithm_asks_for_it(awaits_weights):
    assert generator_args(awaits_weights=awaits_weights, keeps_cache=True)[-1].keeps_cache == awaits_weights
