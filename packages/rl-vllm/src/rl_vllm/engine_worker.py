"""Extension of vLLM's worker, mixed into it in every engine process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from vllm.config import ModelConfig, set_current_vllm_config
from vllm.lora.model_manager import LoRAModelManager

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.profiling import Profile, ProfileReport
from rl_core.stacks import write_stacks_of_child
from rl_core.torch.transport import ReceivingEnd
from rl_core.weights import Manifest, Transport, WeightTarget
from rl_vllm.engine.parent_watch import end_with, forget_cpu_groups, forget_semaphores
from rl_vllm.patches.bare_model import without_adapters
from rl_vllm.patches.draft_files import load_drafters_as_configured
from rl_vllm.patches.empty_top_k import filter_no_logits
from rl_vllm.patches.expert_routing import complete_routing_on_cpu
from rl_vllm.patches.layers_of_heads import keep_layers_of_heads
from rl_vllm.patches.numbers_of_videos import spell_no_numbers
from rl_vllm.patches.per_layer_inputs import embed_tokens_for_each_layer
from rl_vllm.patches.rotary_embeddings import flatten_heads_on_cpu
from rl_vllm.patches.sampling_of_drafts import repeat_sampling_parameters_on_cpu
from rl_vllm.patches.siglip_names import name_siglip_weights
from rl_vllm.weights.adapter_receiver import AdapterReceiver
from rl_vllm.weights.load_plan import NOT_TAKEN, LoadPlan, plan_load
from rl_vllm.weights.planned_load import PlannedLoad
from rl_vllm.weights.quantisation_check import QuantisationError
from rl_vllm.weights.shared_layers import without_layers_of
from rl_vllm.weights.weight_receiver import WeightReceiver

# vLLM imports this module in every process of an engine, before it makes the model
flatten_heads_on_cpu()
complete_routing_on_cpu()
embed_tokens_for_each_layer()
keep_layers_of_heads()
load_drafters_as_configured()
repeat_sampling_parameters_on_cpu()
filter_no_logits()
name_siglip_weights()
spell_no_numbers()

Report = dict[str, Any]
"""Plain data: `value`, or `error` with the names of the `tensors` at fault."""


@dataclass
class Target:
    """A model of this rank that weights are sent to, and what stays from one transfer to the next.

    Args:
        model: This rank's part of it.
        config: vLLM's.
        end: Connection to the sender; it ends with this process.
        host: Model that it may share layers with, whose weights arrive with that model's; None for the engine's own.
        planned: The last manifest, the plan of its load, and that load if the plan is all it takes.
    """

    model: torch.nn.Module
    config: ModelConfig
    host: torch.nn.Module | None = None
    end: ReceivingEnd | None = None
    planned: tuple[Manifest, LoadPlan, PlannedLoad | None] | None = None

    def apart(self) -> AbstractContextManager[None]:
        """Context in which it has only the layers that it does not share."""
        return nullcontext() if self.host is None else without_layers_of(self.host, self.model)

    def plan(self, manifest: Manifest) -> tuple[LoadPlan, PlannedLoad | None]:
        """Plan of the load of these tensors; made once, as versions of one model differ only in their values."""
        if self.planned is None or self.planned[0] != replace(manifest, version=self.planned[0].version):
            plan = plan_load(self.model, manifest)
            self.planned = manifest, plan, PlannedLoad.of(self.model, plan, self.config.dtype)
        return self.planned[1:]


class EngineWorker:
    """Worker extension that receives weights; vLLM mixes it into its worker class and calls it on every rank.

    `--worker-extension-cls rl_vllm.EngineWorker` gives any vLLM the corrections of its models that rl's engines have.
    """

    # of vLLM's worker
    rank: int
    local_rank: int
    device: torch.device
    vllm_config: Any
    model_runner: Any
    get_model: Callable[[], torch.nn.Module]

    _manifest: Manifest | None = None
    _receiver: WeightReceiver | None = None
    _adapters: AdapterReceiver | None = None
    _recording: Profile | None = None
    _uses_oracle = False

    def end_with_parent(self, pid: int) -> Report:
        """End the engine's processes as soon as process `pid` ends, with nothing left in shared memory."""
        forget_semaphores()
        forget_cpu_groups()
        write_stacks_of_child(f"engine-rank-{self.rank}")
        return self._reported(end_with, pid)

    def begin_receiving(self, manifest: bytes, scale: float, uses_oracle: bool = False) -> Report:
        """Plan the load of a manifest: `unknown` tensors to the reason, and `missing` ones.

        Args:
            manifest: Pickled `Manifest` of the tensors to receive.
            scale: Factor of an adapter's product, for the factors of adapters among the tensors.
            uses_oracle: Compare quantised weights in float64 with those that arrive.
        """
        self._uses_oracle = uses_oracle
        return self._reported(self._begin, pickle.loads(manifest), scale)

    def compare_with_files(self, manifest: bytes) -> Report:
        """Return the tensors of a manifest of files that the engine did not load: `unknown` ones to the reason, and
        `missing` ones, as `begin_receiving`. Nothing is received.

        Args:
            manifest: Pickled `Manifest` of the tensors in the files.
        """
        return self._reported(self._compare, pickle.loads(manifest))

    def receive_weights(self, order: bytes, first_rank: int) -> Report:
        """Receive the announced tensors; returns the digest of all of them.

        Args:
            order: The transport, and the device of the engine's first rank.
            first_rank: First rank of the engine's receivers.
        """
        transport, device = pickle.loads(order)
        return self._reported(self._receive, transport, device.at(self.local_rank), first_rank + self.rank)

    def quantisation_error(self) -> Report:
        """Number of layers of this rank that quantise the weights that are being received, and the sum of the squares
        of their relative errors; None if it was not measured."""
        error = QuantisationError(0, None) if self._receiver is None else self._receiver.quantisation_error
        return {"value": (error.num_layers, error.sum_of_squares)}

    def check_received(self) -> Report:
        """Names of tensors that this rank does not compute with."""
        return self._reported(self._check)

    def start_recording(self, order: bytes, num_ranks: int) -> Report:
        """Begin to record this rank's process; files that were written, and tools that failed.

        Args:
            order: Pickled `ProfileOrder` of the replica.
            num_ranks: Number of ranks of the engine.
        """
        self._recording = self._recording or Profile()
        return _plain(self._recording.start(pickle.loads(order).of_rank(self.rank, num_ranks)))

    def stop_recording(self) -> Report:
        """End the recording, and write its files; as `start_recording`."""
        return _plain(self._recording.stop() if self._recording is not None else ProfileReport())

    def make_receiver(self, manifest: Manifest) -> WeightReceiver:
        """Return the receiver of a manifest without factors of adapters, for this rank's model that it is for."""
        target = self.target(manifest.target)
        plan, planned = target.plan(manifest)
        return WeightReceiver(target.model, target.config, manifest, plan, planned, uses_oracle=self._uses_oracle)

    def target(self, name: WeightTarget) -> Target:
        """This rank's part of one of the engine's models.

        Raises:
            WeightSyncError: If the engine has no such model.
        """
        targets: dict[WeightTarget, Target] = vars(self).setdefault("_targets", {})
        if name not in targets and name == "policy":
            targets[name] = Target(self.get_model(), self.vllm_config.model_config)
        elif name not in targets:
            drafter = getattr(getattr(self.model_runner, "drafter", None), "model", None)
            if drafter is None:
                raise WeightSyncError("the engine has no draft model that weights could be sent to")
            config = self.vllm_config.speculative_config.draft_model_config
            targets[name] = Target(drafter, config, self.get_model())
        return targets[name]

    def _begin(self, manifest: Manifest, scale: float) -> dict[str, Any]:
        self._manifest = self._receiver = self._adapters = None
        unknown: dict[str, str] = {}
        missing: list[str] = []
        if manifest.form != "adapter":
            with self.target(manifest.target).apart():
                self._receiver = self.make_receiver(manifest.without_factors())
            unknown, missing = dict(self._receiver.plan.unknown), list(self._receiver.plan.missing)
        if manifest.num_factors:
            self._adapters = AdapterReceiver(self._adapter_manager(), manifest, scale)
            unknown |= self._adapters.unknown
            missing += self._adapters.missing
        self._manifest = manifest
        return {"unknown": unknown, "missing": missing}

    def _compare(self, manifest: Manifest) -> dict[str, Any]:
        target = self.target(manifest.target)
        with target.apart():
            plan = plan_load(target.model, manifest)
        # the files have been loaded, so that an error of a loader comes from a tensor without data
        unknown = {name: reason for name, reason in plan.unknown.items() if reason == NOT_TAKEN}
        # scales of quantised weights are not among the tensors
        return {"unknown": unknown, "missing": plan.missing if self.vllm_config.quant_config is None else []}

    def _receive(self, transport: Transport, device: Device, rank: int) -> str:
        manifest = self._announced()
        target = self.target(manifest.target)
        target.end = target.end or ReceivingEnd(device)
        parts = {} if self._receiver is None else self._receiver.parts
        with target.apart(), target.end.transfer(manifest, transport, rank, parts) as tensors:
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

    def _check(self) -> list[str]:
        manifest = self._announced()
        with self.target(manifest.target).apart():
            stale = [] if self._receiver is None else self._receiver.stale()
        if self._adapters is not None:
            stale += self._adapters.stale()
        self._manifest = self._receiver = self._adapters = None
        return stale

    def _announced(self) -> Manifest:
        if self._manifest is None:
            raise WeightSyncError("no weight version was announced: call `begin` first")
        return self._manifest

    def _adapter_manager(self) -> LoRAModelManager:
        if self.vllm_config.lora_config is None:
            raise WeightSyncError("the engine was started without adapters; set policy.generation.lora_sync=adapter")
        manager: LoRAModelManager = self.model_runner.lora_manager._adapter_manager
        return manager

    def _default_device(self) -> AbstractContextManager[Any]:
        """Loaders make tensors on the default device. On CPU no context is needed, and one slows every torch call."""
        return nullcontext() if self.device.type == "cpu" else self.device

    def _reported(self, act: Callable[..., Any], *args: Any) -> Report:
        try:
            with (
                torch.no_grad(),
                set_current_vllm_config(self.vllm_config),
                self._default_device(),
                without_adapters(self.get_model()),
            ):
                return {"value": act(*args)}
        except WeightSyncError as error:
            return {"error": str(error), "tensors": list(error.tensors)}
        except Exception as error:  # noqa: BLE001 - a rank that fails reports, or the other ranks would wait for it
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            return {"error": f"engine rank {self.rank}: {text}", "tensors": []}


def _plain(report: ProfileReport) -> Report:
    return {"value": (list(report.files), list(report.problems))}
