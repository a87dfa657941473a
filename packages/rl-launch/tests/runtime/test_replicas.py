"""The settings that replicas are started with."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rl_core.plugins import OpponentNeed, RolloutNeeds
from rl_core.rollouts.generation import Placement
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.processes import StartTimeouts
from rl_launch.runtime.replicas import Replicas

ADAPTERS = ["policy.lora_cfg.enabled=true", "policy.generation.lora_sync=adapter"]


EXACT = ["policy.generation.backend=hf", "policy.generation.exact=true"]


def worker_spec(*overrides, awaits_weights=True, **needs):
    generation = read_plan("grpo-arithmetic", ["cluster.device=cpu", *overrides]).backends.generation
    needs = RolloutNeeds("module:Program", {}, frozenset(), **needs)
    cluster = SimpleNamespace(is_placed=None)
    topology = SimpleNamespace(num_replicas=1)
    processes = SimpleNamespace(cluster=cluster, topology=topology, logs="", timeouts=StartTimeouts(1, 1))
    with ExitStack() as stack:
        replicas = Replicas(generation, needs, None, processes, stack=stack)
        start = [(print, Placement("cpu", awaits_weights=awaits_weights))]
        return replicas._replica(start, 0)._spec


@pytest.mark.parametrize(("awaits_weights", "lora_sync"), [(True, "adapter"), (False, "merged")])
def test_replicas_of_an_evaluation_await_no_adapters(awaits_weights, lora_sync):
    assert worker_spec(*ADAPTERS, awaits_weights=awaits_weights).generator_args[0].lora_sync == lora_sync


@pytest.mark.parametrize("awaits_weights", [True, False])
def test_replicas_that_are_sent_weights_keep_the_cache_if_the_algorithm_asks_for_it(awaits_weights):
    spec = worker_spec(awaits_weights=awaits_weights, keeps_cache=True)
    assert spec.generator_args[-1].keeps_cache == awaits_weights


def test_opponents_need_not_be_exact():
    opponents = (OpponentNeed("old", {"second": 1.0}, update_every=2), OpponentNeed("fixed", {}, model_name="/other"))
    spec = worker_spec(*EXACT, opponents=opponents)
    assert spec.generator_args[0].exact
    assert [opponent.generator_args[0].exact for opponent in spec.opponents] == [False, False]
