"""The models of a recipe as the host of a server of training steps."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError

from rl_algos.rollouts.worker.programs import DEFAULT_PROGRAM, PROGRAMS
from rl_core.data.batch import Batch
from rl_core.errors import ConfigError, FailureOrigin, GeneratorError, RequestRefused, RLError
from rl_core.model import Metrics, Model
from rl_core.plugins import RolloutNeeds
from rl_core.ray.calls import translate
from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.commands.train import with_local_models
from rl_launch.model_files.model_folder import hf_config_fields
from rl_launch.placement.topology import GENERATION
from rl_launch.root_config import POLICY
from rl_launch.run_config.checks import check_models, check_placement
from rl_launch.run_config.plan import RunPlan
from rl_launch.runtime.adapter_places import AdapterPlaces, AdapterWork
from rl_launch.runtime.processes import check_engines, provision_workers
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.rollout_pool import ReplicaPool
from rl_launch.runtime.runtime import Runtime

_log = logging.getLogger(__name__)

NEEDS = RolloutNeeds(PROGRAMS[DEFAULT_PROGRAM], {"max_turns": 1, "max_tokens": 1}, frozenset())
"""Needs of the engines, which answer requests and run no rollouts."""


@contextmanager
def run_host(plan: RunPlan, folder: Path) -> Iterator[RunHost]:
    """Enter a context in which the policy and the engines of a plan run.

    Args:
        plan: Of `served_plan`.
        folder: Folder for logs.

    Raises:
        RLError: If they do not start.
    """
    local, device = with_local_models(plan), plan.device
    check_placement(local, device)
    check_models(local, {section: section for section in local.model_sections})
    envs = provision_workers(local, NEEDS, device)
    check_engines(local, envs, device)
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with VirtualCluster.of(local.config.cluster, device) as cluster, Runtime(local, envs, cluster, logs) as runtime:
        if runtime.topology.takes_turns(GENERATION):
            raise ConfigError(
                "policy.generation.colocated.enabled: clients sample while others train, so the engines need devices "
                "of their own; set it to false, and policy.generation.colocated.resources to their number"
            )
        pool = runtime.evaluation_pool(NEEDS)
        base = folder / "base"
        shutil.rmtree(base, ignore_errors=True)  # of a server that was killed
        yield RunHost(plan, local, runtime.ranks[POLICY], pool, base)


class RunHost(AdapterPlaces):
    """The `rl_launch.tinker.host.AdapterHost` over the policy and the engines of a run.

    Args:
        plan: Plan as the user wrote it, whose names clients see.
        local: Plan with the folders of its models.
        model: The policy.
        pool: Its engines.
        base: New folder for an adapter whose product is zero, with which the base is sampled.

    Attributes:
        base_model, tokenizer, max_length, vocab_size, max_rank: As in the protocol.
    """

    def __init__(self, plan: RunPlan, local: RunPlan, model: Model, pool: ReplicaPool, base: Path) -> None:
        policy = local.config.policy
        super().__init__(model, policy.lora_cfg.max_adapters)
        self.base_model = plan.config.policy.model_name
        self.tokenizer = policy.tokenizer.name or policy.model_name
        self.max_length = policy.max_total_sequence_length
        self.vocab_size = int(hf_config_fields(policy.model_name)["vocab_size"])
        self.max_rank = policy.lora_cfg.dim
        self._pool = pool
        self._asked: Counter[Replica] = Counter()
        # On CPU vLLM computes rows without an adapter wrongly next to others with one.
        self._base = base
        model.adapters.export(0, str(self._base))

    def evaluate(self, work: AdapterWork) -> tuple[Metrics, Batch]:
        """Return the metrics of a loss and the columns of its reads."""
        rows = self.columns(work.adapter, work.batch)
        columns = self._model.infer(rows, work.loss.reads, temperature=work.loss.temperature).local()
        return self.measure(work), columns

    async def sample(self, request: GenerationRequest, adapter: Path | None = None) -> Completion:
        """Sample one completion.

        Raises:
            RequestRefused: If the engine refuses the request.
            GeneratorError: If no engine could answer.
        """
        found: Completion = await self._ask("generate", replace(request, adapter=str(adapter or self._base)))
        return found

    async def score(self, token_ids: Sequence[int], adapter: Path | None = None) -> list[float]:
        """Return the logprob of each token after those before it."""
        scores = await self._ask("score", np.asarray(token_ids, dtype=np.int32), str(adapter or self._base))
        return [float(score) for score in scores]

    async def _ask(self, method: str, *args: Any) -> Any:
        """Call the engine that has the fewest requests."""
        replicas = self._pool.living_replicas
        if not replicas:
            raise GeneratorError("no engine is alive")
        replica = min(replicas, key=lambda each: (self._asked[each], each.index))
        self._asked[replica] += 1
        try:
            return await replica.actor.call.remote("generator", method, *args)
        except RayError as error:
            failure: RLError = translate(error, FailureOrigin(GENERATION, replica.index, replica.node, method))
        finally:
            self._asked[replica] -= 1
        raise failure if isinstance(failure, RequestRefused | GeneratorError) else GeneratorError(str(failure))
