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
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError, FailureOrigin, GeneratorError, RequestRefused, RLError
from rl_core.model import ADAPTER, AdapterLosses, AdapterSettings, Metrics, Model, StepSettings, read_columns
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
from rl_launch.runtime.processes import check_engines, provision_workers
from rl_launch.runtime.replica import Replica
from rl_launch.runtime.rollout_pool import ReplicaPool
from rl_launch.runtime.runtime import Runtime
from rl_launch.tinker.host import AdapterWork

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
