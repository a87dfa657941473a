"""vLLM's scheduler, which holds the tokens of a request in its process until the request ends.

vLLM sends every token of every request to the process in front of it, which costs that process 30 microseconds a token.
Nobody reads a token before the request ends, except for stop strings: the front searches the text of these requests, so
their tokens are sent as they are sampled.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import LoRAConfig, VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rl_vllm.engine.speculation import DraftCounts

REPORT_ID = "report"
"""Request id of the output that carries a report; vLLM's own ids end in random digits."""
REPORT_S = 0.05
"""Minimum time in seconds between two reports while no request ends."""

_NOTHING = np.empty((1, 0), np.int32)

# The class is chosen on purpose, and each engine would warn of it.
logging.getLogger("vllm.config.scheduler").addFilter(lambda record: "custom scheduler class" not in record.getMessage())


@dataclass
class Held:
    """Tokens of one request.

    Attributes:
        is_sent: True if each token is sent at once.
        has_logprobs: True if tokens have logprobs.
        num_steps: Steps that gave it tokens.
        num_tokens: Tokens that it got.
        token_ids: Tokens that have not been sent.
        logprobs: Their logprobs.
        routed_experts: Experts of the tokens, by step.
    """

    is_sent: bool
    has_logprobs: bool
    num_steps: int = 0
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    routed_experts: list[np.ndarray] = field(default_factory=list)

    def put_into(self, output: EngineCoreOutput) -> None:
        """Make an output contain everything that is held."""
        output.new_token_ids = self.token_ids
        if self.logprobs:
            # Ids and ranks are left out: the first are the tokens, and nobody reads the second.
            output.new_logprobs = LogprobsLists(_NOTHING, np.array([self.logprobs], np.float32), _NOTHING)
        if self.routed_experts:
            output.routed_experts = np.concatenate(self.routed_experts)


class HoldingScheduler(Scheduler):
    """Scheduler that sends the output of a request when the request ends, aborted ones with the tokens they have.

    With every end, and from time to time, it sends a report as the output of a request that does not exist.
    """

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> HoldingScheduler:
        """Return a scheduler of the kind that vLLM would choose."""
        return object.__new__(HoldingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adapters: LoRAConfig | None = self.vllm_config.lora_config
        if adapters is not None and adapters.max_loras > 1:
            # One place is always taken by the adapters of the weight version, which a step may not need.
            self.lora_config = copy(adapters)
            self.lora_config.max_loras -= 1
        self.drafts = DraftCounts(self.num_spec_tokens)
        self.num_sampled = self.num_steps = self.num_preempted = 0
        self._held: dict[str, Held] = {}
        self._aborted: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._reported = 0.0

    def report(self) -> dict[str, Any]:
        """Return the load of the engine, and counts since its start."""
        num_running, num_waiting = self.get_request_counts()
        return {
            "engine": self.parallel_config.data_parallel_rank,
            "num_running": num_running,
            "num_waiting": num_waiting,
            "kv_cache_usage": self.kv_cache_manager.usage,
            "num_preempted": self.num_preempted,
            "num_sampled": self.num_sampled,
            "num_steps": self.num_steps,
            "drafts": self.drafts.read(),
        }

    def add_request(self, request: Request) -> None:
        """Take a request in."""
        super().add_request(request)
        params = request.sampling_params
        is_sent, has_logprobs = True, False
        if params is not None:
            is_sent, has_logprobs = bool(params.detokenize), params.num_logprobs is not None
        self._held.setdefault(request.request_id, Held(is_sent, has_logprobs))

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """End requests from outside; the tokens that they have are sent with the next step."""
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended:
            held = self._held.pop(request.request_id)
            if finished_status is RequestStatus.FINISHED_ABORTED:
                output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT)
                held.put_into(output)
                self._aborted[request.client_index].append(output)
        return ended

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return the outputs of a step, by client: requests that ended, and a report if it is time."""
        # vLLM would cut three arrays for each request, which takes longer than reading all values at once.
        logprobs, model_runner_output.logprobs = model_runner_output.logprobs, None
        found = super().update_from_output(scheduler_output, model_runner_output)
        values = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        is_time = time.monotonic() - self._reported > REPORT_S
        for outputs in found.values():
            sent = []
            for output in outputs.outputs:
                place = model_runner_output.req_id_to_index.get(output.request_id)
                held = self._held.get(output.request_id)
                if held is None or place is None:
                    # It failed before it got a token.
                    sent.append(output)
                    continue
                if logprobs is not None and held.has_logprobs:
                    num_tokens = len(output.new_token_ids)
                    if held.is_sent:
                        output.new_logprobs = logprobs.slice_request(place, num_tokens)
                    else:
                        counts = logprobs.cu_num_generated_tokens
                        start = place if counts is None else counts[place]
                        held.logprobs.extend(values[start : start + num_tokens])
                if self._count(held, output):
                    sent.append(output)
            outputs.outputs = sent
        for client, aborted in self._aborted.items():
            found.setdefault(client, EngineCoreOutputs()).outputs.extend(aborted)
        self._aborted.clear()
        if is_time or any(output.finished for outputs in found.values() for output in outputs.outputs):
            self._reported = time.monotonic()
            report = EngineCoreOutput(REPORT_ID, [], kv_transfer_params=self.report())
            found.setdefault(0, EngineCoreOutputs()).outputs.append(report)
        return {
            client: outputs
            for client, outputs in found.items()
            if outputs.outputs or outputs.finished_requests or outputs.scheduler_stats is not None
        }

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        """Count a draft."""
        if num_draft_tokens:
            self.drafts.take(num_draft_tokens - (num_invalid_spec_tokens or {}).get(request_id, 0), num_accepted_tokens)
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.num_preempted += 1
        super()._preempt_request(*args, **kwargs)

    def _count(self, held: Held, output: EngineCoreOutput) -> bool:
        """Count the tokens of an output, and return whether it is sent."""
        num_tokens = len(output.new_token_ids)
        self.num_sampled += num_tokens
        self.num_steps += num_tokens > 0
        held.num_steps += num_tokens > 0
        held.num_tokens += num_tokens
        if output.finished:
            del self._held[output.request_id]
            if output.spec_decode_metrics is not None:
                self.drafts.cut(output.spec_decode_metrics, held.num_steps, held.num_tokens)
        if held.is_sent:
            return True
        held.token_ids.extend(output.new_token_ids)
        if output.routed_experts is not None:
            held.routed_experts.append(output.routed_experts)
        if output.finished:
            held.put_into(output)
        return output.finished


class HoldingAsyncScheduler(HoldingScheduler, AsyncScheduler):
    """The same for engines that schedule a step while the one before is computed."""


def receive_held(processor: OutputProcessor, outputs: Sequence[EngineCoreOutput]) -> list[dict[str, Any]]:
    """Give the logprobs of ended requests to the front's output processor, as one array each.

    The processor itself would take them position by position.

    Args:
        processor: Output processor of the front.
        outputs: Outputs that it is about to process; their logprobs are taken out.

    Returns:
        Reports of schedulers (`HoldingScheduler.report`) among them, the newest last.
    """
    reports = []
    for output in outputs:
        if output.request_id == REPORT_ID:
            assert output.kv_transfer_params is not None
            reports.append(output.kv_transfer_params)
        elif output.new_logprobs is not None and not output.new_logprobs.sampled_token_ranks.size:
            if (state := processor.request_states.get(output.request_id)) is not None:
                assert state.logprobs_processor is not None
                state.logprobs_processor.logprobs.logprobs = output.new_logprobs.logprobs[0]
            output.new_logprobs = None
    return reports
