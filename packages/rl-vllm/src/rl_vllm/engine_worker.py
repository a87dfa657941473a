"""Extension of vLLM's worker, mixed into it in every engine process."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from rl_core.devices import Device
from rl_core.errors import WeightSyncError
from rl_core.torch.transport import ReceivingEnd
from rl_core.weights import Manifest, Transport
from rl_vllm.load_plan import LoadPlan, plan_load
from rl_vllm.parent_watch import end_with, forget_cpu_groups, forget_semaphores
from rl_vllm.planned_load import PlannedLoad
from rl_vllm.weight_receiver import WeightReceiver

Report = dict[str, Any]
"""Plain data: `value`, or `error` with the names of the `tensors` at fault."""


class EngineWorker:
    """Worker extension that receives weights; vLLM mixes it into its worker class and calls it on every rank."""

    # of vLLM's worker
    rank: int
    local_rank: int
    device: torch.device
    vllm_config: Any
    get_model: Callable[[], torch.nn.Module]

    _receiver: WeightReceiver | None = None
    _planned: tuple[Manifest, LoadPlan, PlannedLoad | None] | None = None
    _receiving: ReceivingEnd | None = None

    def end_with_parent(self, pid: int) -> Report:
        """End the engine's processes as soon as process `pid` ends, with nothing left in shared memory."""
        forget_semaphores()
        forget_cpu_groups()
        return self._reported(end_with, pid)

    def begin_receiving(self, manifest: bytes) -> Report:
        """Plan the load of a manifest: `unknown` tensors to the reason, and `missing` ones."""
        return self._reported(self._begin, pickle.loads(manifest))

    def receive_weights(self, order: bytes, first_rank: int) -> Report:
        """Receive the announced tensors; returns the digest of all of them.

        Args:
            order: the transport, and the device of the engine's first rank.
            first_rank: of the engine's receivers.
        """
        transport, device = pickle.loads(order)
        return self._reported(self._receive, transport, device.at(self.local_rank), first_rank + self.rank)

    def check_received(self) -> Report:
        """Names of tensors that this rank does not compute with."""
        return self._reported(self._check)

    def make_receiver(self, manifest: Manifest) -> WeightReceiver:
        """Return the receiver of this manifest for this rank's model."""
        plan, planned = self._plan(manifest)
        return WeightReceiver(self.get_model(), self.vllm_config.model_config, manifest, plan, planned)

    def _plan(self, manifest: Manifest) -> tuple[LoadPlan, PlannedLoad | None]:
        """Plan of the load of these tensors; made once, as versions of one policy differ only in their values."""
        if self._planned is None or self._planned[0] != replace(manifest, version=self._planned[0].version):
            model = self.get_model()
            plan = plan_load(model, manifest)
            self._planned = manifest, plan, PlannedLoad.of(model, plan, self.vllm_config.model_config.dtype)
        return self._planned[1:]

    def _begin(self, manifest: Manifest) -> dict[str, Any]:
        self._receiver = None
        self._receiver = self.make_receiver(manifest)
        return {"unknown": self._receiver.plan.unknown, "missing": self._receiver.plan.missing}

    def _receive(self, transport: Transport, device: Device, rank: int) -> str:
        if self._receiving is None:
            # it ends with this process
            self._receiving = ReceivingEnd(device)
        return self._announced().receive(self._receiving, transport, rank)

    def _check(self) -> list[str]:
        stale = self._announced().stale()
        self._receiver = None
        return stale

    def _announced(self) -> WeightReceiver:
        if self._receiver is None:
            raise WeightSyncError("no weight version was announced: call `begin` first")
        return self._receiver

    def _default_device(self) -> AbstractContextManager[Any]:
        """Loaders make tensors on the default device. On CPU no context is needed, and one slows every torch call."""
        return nullcontext() if self.device.type == "cpu" else self.device

    def _reported(self, act: Callable[..., Any], *args: Any) -> Report:
        try:
            with torch.no_grad(), set_current_vllm_config(self.vllm_config), self._default_device():
                return {"value": act(*args)}
        except WeightSyncError as error:
            return {"error": str(error), "tensors": list(error.tensors)}
        except Exception as error:  # noqa: BLE001 - a rank that fails reports, or the other ranks would wait for it
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            return {"error": f"engine rank {self.rank}: {text}", "tensors": []}
