"""Extension of vLLM's worker, mixed into it in every engine process."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import islice
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.lora.model_manager import LoRAModelManager
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from rl_core.errors import WeightSyncError
from rl_core.model_config import LoraConfig
from rl_core.torch.transport import ReceivingEnd
from rl_core.tracing.profiling import Profile, ProfileReport
from rl_core.tracing.stacks import write_stacks_of_child
from rl_core.weights import Manifest, WeightTarget
from rl_vllm.engine.process_env import FRONT, end_with, forget_cpu_groups, forget_semaphores
from rl_vllm.patches.bare_model import without_adapters
from rl_vllm.patches.draft_files import keep_layers_of_heads, load_drafters_as_configured
from rl_vllm.patches.expert_layers import complete_routing_on_cpu, leave_out_experts_of_other_ranks_on_cpu
from rl_vllm.patches.gathered_tokens import exchange_tokens_on_cpu
from rl_vllm.patches.numbers_of_videos import spell_no_numbers
from rl_vllm.patches.per_layer_inputs import embed_tokens_for_each_layer
from rl_vllm.patches.pipeline_buffers import make_pipeline_buffers_on_cpu
from rl_vllm.patches.ranks_of_node import count_ranks_of_node_on_cpu
from rl_vllm.patches.rotary_embeddings import flatten_heads_on_cpu
from rl_vllm.patches.sampling_of_drafts import filter_no_logits, repeat_sampling_parameters_on_cpu
from rl_vllm.patches.siglip_names import name_siglip_weights
from rl_vllm.patches.sleep_memory import sleep_beside_others
from rl_vllm.weights.load_plan import NOT_TAKEN, LoadPlan, plan_load
from rl_vllm.weights.planned_load import PlannedLoad
from rl_vllm.weights.weight_receiver import AdapterReceiver, WeightReceiver

# vLLM imports this module in every process of an engine, before it makes the model.
flatten_heads_on_cpu()
complete_routing_on_cpu()
count_ranks_of_node_on_cpu()
embed_tokens_for_each_layer()
exchange_tokens_on_cpu()
keep_layers_of_heads()
leave_out_experts_of_other_ranks_on_cpu()
load_drafters_as_configured()
make_pipeline_buffers_on_cpu()
repeat_sampling_parameters_on_cpu()
filter_no_logits()
name_siglip_weights()
sleep_beside_others()
spell_no_numbers()

Report = dict[str, Any]
"""Plain data: `value`, or `error` with the names of the `tensors` at fault."""


@dataclass
class Target:
    """A model of this rank that weights are sent to, with its state between transfers.

    Args:
        model: This rank's part of it.
        config: Config of vLLM.
        end: Connection to the sender; it ends with this process.
        host: Model that it may share layers with; their weights arrive with the host's. None for the engine's own.
        planned: The last manifest, the plan of its load, and that load if the plan is sufficient for it.
    """

    model: torch.nn.Module
    config: ModelConfig
    host: torch.nn.Module | None = None
    end: ReceivingEnd | None = None
    planned: tuple[Manifest, LoadPlan, PlannedLoad | None] | None = None

    def apart(self) -> AbstractContextManager[None]:
        """Return a context without the layers that it shares."""
        return nullcontext() if self.host is None else without_layers_of(self.host, self.model)

    def plan(self, manifest: Manifest) -> tuple[LoadPlan, PlannedLoad | None]:
        """Plan the load of these tensors, once: versions of one model differ only in their values."""
        if self.planned is None or self.planned[0] != replace(manifest, version=self.planned[0].version):
            plan = plan_load(self.model, manifest)
            self.planned = manifest, plan, PlannedLoad.of(self.model, plan, self.config.dtype)
        return self.planned[1:]


@contextmanager
def without_layers_of(model: nn.Module, drafter: nn.Module) -> Iterator[None]:
    """Take out of a drafter the embedding and the output layer that belong to a model, and put them back afterwards.
    They are filled with the model's weights, and loading only the drafter's would leave them empty.

    Args:
        model: Model that may have some of its layers.
        drafter: Drafter, changed in place.
    """
    shared = {id(layer) for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)}
    places = [
        (parent, name, layer)
        for parent in drafter.modules()
        for name, layer in parent.named_children()
        if id(layer) in shared
    ]
    for parent, name, _ in places:
        parent._modules[name] = None
    try:
        yield
    finally:
        for parent, name, layer in places:
            parent._modules[name] = layer


def _reported(act: Callable[..., Any]) -> Callable[..., Report]:
    """Make a method of the worker run in the engine's context and return a report, also of a failure."""

    @wraps(act)
    def reported(self: EngineWorker, *args: Any, **kwargs: Any) -> Report:
        # Loaders make tensors on the default device. On CPU no context is needed, and one slows every torch call.
        device: AbstractContextManager[Any] = nullcontext() if self.device.type == "cpu" else self.device
        config = set_current_vllm_config(self.vllm_config)
        try:
            with torch.no_grad(), config, device, without_adapters(self.get_model()):
                return {"value": act(self, *args, **kwargs)}
        except WeightSyncError as error:
            return {"error": str(error), "tensors": list(error.tensors)}
        except Exception as error:  # noqa: BLE001 - a rank that fails reports, or the other ranks would wait for it
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            return {"error": f"engine rank {self.replica_rank}: {text}", "tensors": []}

    return reported


class EngineWorker:
    """Worker extension that receives weights; vLLM mixes it into its worker class and calls it on every rank.

    `--worker-extension-cls rl_vllm.EngineWorker` gives any vLLM the corrections of its models that rl's engines have.
    Every method returns a `Report`.
    """

    # These attributes belong to vLLM's worker.
    rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any
    get_model: Callable[[], torch.nn.Module]
    get_draft_model: Callable[[], torch.nn.Module | None]

    _manifest: Manifest | None = None
    _receiver: WeightReceiver | None = None
    _adapters: AdapterReceiver | None = None
    _recording: Profile | None = None
    _uses_oracle = False

    @property
    def replica_rank(self) -> int:
        """Number of this rank among the ranks of all engines of the replica."""
        parallel = self.vllm_config.parallel_config
        return int(parallel.data_parallel_rank * parallel.world_size + self.rank)

    @property
    def place_on_node(self) -> int:
        """Number of this rank among the ranks of the replica on its node. vLLM's own counts one engine's on some
        devices."""
        parallel = self.vllm_config.parallel_config
        engine = parallel.data_parallel_rank_local or 0
        return int(engine * parallel.local_world_size + self.rank % parallel.local_world_size)

    @_reported
    def end_with_front(self) -> None:
        """End the engine's processes on this node as soon as the process in front of them ends, with nothing left in
        shared memory."""
        forget_semaphores()
        forget_cpu_groups()
        write_stacks_of_child(f"engine-rank-{self.replica_rank}")
        end_with(int(os.environ[FRONT]))

    @_reported
    def begin_receiving(self, pickled: bytes, uses_oracle: bool = False) -> dict[str, Any]:
        """Plan the load of a manifest; return the `unknown` tensors to the reason, and the `missing` ones.

        Args:
            pickled: Pickled `Manifest` of the tensors to receive, and the `LoraConfig` of the adapters among them.
            uses_oracle: Compare quantised weights in float64 with those that arrive.
        """
        self._uses_oracle = uses_oracle
        self._manifest = self._receiver = self._adapters = None
        manifest: Manifest
        lora: LoraConfig
        manifest, lora = pickle.loads(pickled)
        unknown: dict[str, str] = {}
        missing: list[str] = []
        if manifest.form != "adapter":
            with self.target(manifest.target).apart():
                self._receiver = self.make_receiver(manifest.without_factors())
            unknown, missing = dict(self._receiver.plan.unknown), list(self._receiver.plan.missing)
        if manifest.num_factors:
            self._adapters = AdapterReceiver(self._adapter_manager(), manifest, lora)
            unknown |= self._adapters.unknown
            missing += self._adapters.missing
        self._manifest = manifest
        return {"unknown": unknown, "missing": missing}

    @_reported
    def compare_with_files(self, pickled: bytes) -> dict[str, Any]:
        """Return the tensors of a manifest of files that the engine did not load; see `begin_receiving`. Nothing is
        received.

        Args:
            pickled: Pickled `Manifest` of the tensors in the files.
        """
        manifest: Manifest = pickle.loads(pickled)
        target = self.target(manifest.target)
        with target.apart():
            plan = plan_load(target.model, manifest)
        # The files have been loaded, so that an error of a loader comes from a tensor without data.
        unknown = {name: reason for name, reason in plan.unknown.items() if reason == NOT_TAKEN}
        # Scales of quantised weights are not among the tensors.
        return {"unknown": unknown, "missing": plan.missing if self.vllm_config.quant_config is None else []}

    @_reported
    def receive_weights(self, order: bytes, first_rank: int) -> str:
        """Receive the announced tensors; return the digest of all of them.

        Args:
            order: The transport, and the device of the engine's first rank.
            first_rank: First rank of the engine's receivers.
        """
        transport, device = pickle.loads(order)
        manifest = self._announced()
        target = self.target(manifest.target)
        target.end = target.end or ReceivingEnd(device.at(self.place_on_node))
        parts = {} if self._receiver is None else self._receiver.parts
        transfer = target.end.transfer(manifest, transport, first_rank + self.replica_rank, parts)
        with target.apart(), transfer as tensors:
            receiver = self._receiver
            if receiver is not None and receiver.loads_parts and not manifest.num_factors:
                receiver.load_parts(
                    ((slot.spec.name, partial(bucket.read, slot)) for slot in bucket.slots)
                    for bucket in tensors.by_bucket()
                )
                return tensors.digest
            arriving = iter(tensors)
            if self._receiver is not None:
                self._receiver.load(islice(arriving, len(manifest.tensors) - manifest.num_factors))
            for name, tensor in arriving:
                if self._adapters is None:
                    raise WeightSyncError(f"the engine's loaders left out {name} and what follows it", (name,))
                self._adapters.take(name, tensor)
            if self._adapters is not None:
                self._adapters.apply()
        return tensors.digest

    def quantisation_error(self) -> Report:
        """Return the number of layers of this rank that quantise the weights that are being received, and the sum of
        the squares of their relative errors; None if it was not measured."""
        return {"value": (0, None) if self._receiver is None else self._receiver.quantisation.error}

    @_reported
    def check_received(self) -> list[str]:
        """Return the names of tensors that this rank does not compute with."""
        manifest = self._announced()
        with self.target(manifest.target).apart():
            stale = [] if self._receiver is None else self._receiver.stale()
        if self._adapters is not None:
            stale += self._adapters.stale()
        self._manifest = self._receiver = self._adapters = None
        return stale

    def start_recording(self, order: bytes, num_ranks: int) -> Report:
        """Begin to record this rank's process; return the files that were written, and the tools that failed.

        Args:
            order: Pickled `ProfileOrder` of the replica.
            num_ranks: Number of ranks of the engine.
        """
        self._recording = self._recording or Profile()
        report = self._recording.start(pickle.loads(order).of_rank(self.replica_rank, num_ranks))
        return {"value": (list(report.files), list(report.problems))}

    def stop_recording(self) -> Report:
        """End the recording, and write its files; return the same as `start_recording`."""
        report = self._recording.stop() if self._recording is not None else ProfileReport()
        return {"value": (list(report.files), list(report.problems))}

    def make_receiver(self, manifest: Manifest) -> WeightReceiver:
        """Return the receiver of a manifest without factors of adapters, for the model of this rank that it targets."""
        target = self.target(manifest.target)
        plan, planned = target.plan(manifest)
        return WeightReceiver(target.model, target.config, manifest, plan, planned, uses_oracle=self._uses_oracle)

    def target(self, name: WeightTarget) -> Target:
        """Return this rank's part of one of the engine's models.

        Raises:
            WeightSyncError: If the engine has no such model.
        """
        targets: dict[WeightTarget, Target] = vars(self).setdefault("_targets", {})
        if name not in targets and name == "policy":
            targets[name] = Target(self.get_model(), self.vllm_config.model_config)
        elif name not in targets:
            drafter = self.get_draft_model()
            if drafter is None:
                raise WeightSyncError("the engine has no draft model that weights could be sent to")
            config = self.vllm_config.speculative_config.draft_model_config
            targets[name] = Target(drafter, config, self.get_model())
        return targets[name]

    def _announced(self) -> Manifest:
        if self._manifest is None:
            raise WeightSyncError("no weight version was announced: call `begin` first")
        return self._manifest

    def _adapter_manager(self) -> LoRAModelManager:
        if self.vllm_config.lora_config is None:
            raise WeightSyncError("the engine was started without adapters; set policy.generation.lora_sync=adapter")
        manager: LoRAModelManager = self.model_runner.lora_manager._adapter_manager
        return manager
