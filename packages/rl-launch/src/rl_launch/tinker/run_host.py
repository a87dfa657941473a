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
from rl_core.algorithm import Algorithm
from rl_core.data.batch import Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError, FailureOrigin, GeneratorError, RequestRefused, RLError
from rl_core.model import ADAPTER, AdapterLosses, AdapterSettings, Metrics, Model, ModelSpec, StepSettings, read_columns
from rl_core.plugins import AlgorithmPlugin, ModelNeed, RolloutNeeds
from rl_core.ray.calls import translate
from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion
from rl_launch.backends import LOSSES, backends_of
from rl_launch.cluster.virtual_cluster import VirtualCluster
from rl_launch.commands.train import with_local_models
from rl_launch.model_files.model_folder import hf_config_fields
from rl_launch.placement.topology import GENERATION
from rl_launch.root_config import POLICY
from rl_launch.run_config.checks import check_models, check_placement
from rl_launch.run_config.plan import RunPlan
from rl_launch.run_config.reading import read_plan
from rl_launch.runtime.processes import check_engines, provision_workers
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.rollout_pool import ReplicaPool
from rl_launch.runtime.runtime import Runtime
from rl_launch.tinker.host import AdapterWork

_log = logging.getLogger(__name__)


class Served(Algorithm[Any, None, None]):
    """An algorithm that reads no data: programs bring it."""


SERVED = AlgorithmPlugin(
    name="tinker",
    sections={},
    implementation=f"{__name__}:{Served.__name__}",
    generates=True,
    models=lambda config: {POLICY: ModelNeed(POLICY, ModelSpec())},
    requirements=(LOSSES,),
)
"""The algorithm of a recipe that is served: the policy trains, and nothing else of the recipe's own algorithm runs."""

NEEDS = RolloutNeeds(PROGRAMS[DEFAULT_PROGRAM], {"max_turns": 1, "max_tokens": 1}, frozenset())
"""Needs of the engines, which answer requests and run no rollouts."""

SETTINGS = {
    "policy.lora_cfg.enabled": "true",
    "policy.generation.backend": "vllm",
    "policy.generation.lora_sync": "adapter",
    "policy.max_grad_norm": "null",
}
"""What a recipe needs for clients with adapters, who set the limit of the gradient of each step."""

DEFAULTS = {
    "policy.lora_cfg.max_adapters": "8",
    "policy.lora_cfg.dim": "32",
    "policy.generation.colocated.enabled": "false",
    "policy.generation.colocated.resources.gpus_per_node": "1",
}
"""Values of keys that the user does not write."""

ADAMW = "torch.optim.AdamW"


def served_plan(recipe: str, overrides: Sequence[str] = ()) -> RunPlan:
    """Return the plan of a recipe with what a server of its policy needs.

    Raises:
        ConfigError: If the recipe has problems, does not generate, or has an optimizer that clients cannot set.
    """
    # Keys of adapters are refused where there are none, and a server always has some.
    given = read_plan(recipe, ["policy.lora_cfg.enabled=true", *overrides])
    if given.raw is None or not given.plugin.generates:
        raise ConfigError(
            f"algorithm: {given.plugin.name} does not generate, so its recipes have no engine to sample with. Serve a "
            "recipe that generates, such as grpo-arithmetic"
        )
    added = [f"{key}={value}" for key, value in DEFAULTS.items() if not given.raw.is_written(key)]
    plan = read_plan(recipe, [*overrides, *added, *(f"{key}={value}" for key, value in SETTINGS.items())])
    optimizer = plan.config.policy.optimizer.name
    if optimizer != ADAMW:
        raise ConfigError(
            f"policy.optimizer.name: clients set betas, eps and weight decay of AdamW in each step, but it is "
            f"{optimizer}; set {ADAMW}, or remove this key"
        )
    if plan.config.policy.lora_cfg.max_adapters == 1:
        raise ConfigError("policy.lora_cfg.max_adapters: set the number of adapters that train at a time, at least 2")
    return replace(plan, plugin=SERVED, backends=backends_of(SERVED, plan.config))


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


class RunHost:
    """The `rl_launch.tinker.host.AdapterHost` over the policy and the engines of a run.

    Args:
        plan: Plan as the user wrote it, whose names clients see.
        local: Plan with the folders of its models.
        model: The policy.
        pool: Its engines.
        base: New folder for an adapter whose product is zero, with which the base is sampled.

    Attributes:
        base_model, tokenizer, max_length, vocab_size, max_rank, num_slots: As in the protocol.
    """

    def __init__(self, plan: RunPlan, local: RunPlan, model: Model, pool: ReplicaPool, base: Path) -> None:
        policy = local.config.policy
        self.base_model = plan.config.policy.model_name
        self.tokenizer = policy.tokenizer.name or policy.model_name
        self.max_length = policy.max_total_sequence_length
        self.vocab_size = int(hf_config_fields(policy.model_name)["vocab_size"])
        self.max_rank, self.num_slots = policy.lora_cfg.dim, policy.lora_cfg.max_adapters
        self._model, self._pool = model, pool
        self._places: dict[str, int] = {}
        self._asked: Counter[Replica] = Counter()
        # On CPU vLLM computes rows without an adapter wrongly next to others with one.
        self._base = base
        model.adapters.export(0, str(self._base))

    def create(self, adapter: str, settings: AdapterSettings) -> None:
        """Make a new adapter.

        Raises:
            ValueError: If all places are taken.
        """
        self._model.adapters.make(self._take_place(adapter), settings)

    def accumulate(self, works: Sequence[AdapterWork]) -> list[tuple[Metrics, Batch]]:
        """Add the gradients of several adapters in one pass."""
        batch, losses = self._joined(works)
        metrics, columns = self._model.accumulate(batch, losses)
        return self._parted(works, metrics, columns)

    def evaluate(self, work: AdapterWork) -> tuple[Metrics, Batch]:
        """Return the metrics of a loss and the columns of its reads."""
        batch, losses = self._joined([work])
        columns = self._model.infer(batch, losses.reads, temperature=losses.temperature)
        ((metrics, found),) = self._parted([work], self._model.evaluate(batch, losses), columns)
        return metrics, found

    def apply(self, adapter: str, settings: StepSettings) -> Metrics:
        """Make one optimizer step of an adapter."""
        return self._model.apply(settings, adapter=self._places[adapter])

    def save(self, adapter: str, folder: Path) -> None:
        """Write an adapter and its optimizer state."""
        self._model.adapters.save(self._places[adapter], str(folder))

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Make or replace an adapter by a saved one."""
        place = self._places[adapter] if adapter in self._places else self._take_place(adapter)
        self._model.adapters.load(place, str(folder), with_optimizer=with_optimizer)

    def export(self, adapter: str, folder: Path) -> None:
        """Write an adapter for engines."""
        self._model.adapters.export(self._places[adapter], str(folder))

    def release(self, adapter: str) -> None:
        """Forget an adapter."""
        place = self._places.pop(adapter, None)
        if place is not None:
            self._model.discard(adapter=place)

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

    def _take_place(self, adapter: str) -> int:
        free = set(range(self.num_slots)) - set(self._places.values())
        if not free:
            raise ValueError(f"all {self.num_slots} places are taken; release an adapter first")
        self._places[adapter] = place = min(free)
        return place

    def _joined(self, works: Sequence[AdapterWork]) -> tuple[Batch, AdapterLosses]:
        """Return the rows of all works, which have zeros in columns of others, and their losses."""
        losses = AdapterLosses({self._places[work.adapter]: work.loss for work in works})
        names = tuple(dict.fromkeys((*losses.columns, *read_columns(losses.reads))))
        likes = {name: work.batch[name] for work in works for name in names if name in work.batch}
        parts = []
        for work in works:
            rows = work.batch.with_columns(
                {ADAPTER: np.full(len(work.batch), self._places[work.adapter], dtype=np.int32)}
            )
            missing = [name for name in names if name not in rows]
            parts.append(rows.with_columns({name: _zeros(likes[name], rows) for name in missing}))
        return Batch.concat([part.only(["tokens", *names]) for part in parts]), losses

    def _parted(self, works: Sequence[AdapterWork], metrics: Metrics, columns: Batch) -> list[tuple[Metrics, Batch]]:
        """Return the metrics and the rows of each work."""
        parts = columns.local().split([len(work.batch) for work in works])
        found: list[tuple[Metrics, Batch]] = []
        for work, part in zip(works, parts, strict=True):
            prefix = f"{self._places[work.adapter]}/"
            own = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
            found.append((own, part.only([name for read in work.loss.reads for name in read.columns])))
        return found


def _zeros(column: Ragged | np.ndarray, rows: Batch) -> Ragged | np.ndarray:
    """Return zeros in the form of another batch's column, for these rows."""
    if isinstance(column, Ragged):
        offsets = rows.ragged("tokens").offsets
        return Ragged(np.zeros((int(offsets[-1]), *column.values.shape[1:]), column.values.dtype), offsets)
    return np.zeros((len(rows), *column.shape[1:]), column.dtype)
