"""Generation as a loop, a rollout worker and an engine see it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from rl_core.devices import Device, device_named
from rl_core.errors import RequestRefused
from rl_core.rollouts.rollout import Completion
from rl_core.token_filter import TokenFilter
from rl_core.tracing.profiling import ProfileOrder, ProfileReport
from rl_core.weights import WeightSink


@dataclass(frozen=True)
class ThinkingBudget:
    """Limit of the thoughts that a turn begins with.

    Args:
        max_tokens: Maximum number of tokens of a turn before its thoughts end.
        closes: True if tokens that end the thoughts are appended, and the turn continues after them; False if the turn
            ends.
        text: Text of these tokens; empty for the text of the mark that opened the thoughts
            (`rl_core.rollouts.thoughts.closing_text`).
    """

    max_tokens: int
    closes: bool = True
    text: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """Settings for sampling tokens.

    Args:
        max_new_tokens: Maximum number of tokens to sample.
        temperature: Divides the logits; 0 is greedy.
        top_p: Nucleus mass kept, 1.0 keeps all.
        top_k: Most likely tokens kept, 0 keeps all.
        min_p: Smallest probability kept, as a share of the most likely token's; 0.0 keeps all.
        stop_token_ids: Tokens that end a completion (and belong to it).
        stop_strings: Texts that end a completion (and belong to it).
        grammar: Structural tag of `rl_core.rollouts.grammar` that the completion must match; empty for any text.
        thinking: Limit of thoughts, which `rl_core.rollouts.thinking` keeps; a request to an engine has none.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    grammar: str = ""
    thinking: ThinkingBudget | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        TokenFilter(self.top_k, self.top_p, self.min_p)


PauseMode = Literal["finish", "interrupt"]
"""Treatment of the requests in flight when a replica pauses: they finish first, or end with the tokens that they have
and the stop reason `abort` (`rl_core.rollouts.interruption` continues them)."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion, or for the rest of one that was interrupted.

    Args:
        token_ids: Int32 `[tokens]`, the tokens to continue; never text.
        sampling: How to draw; the token limit counts only tokens that are still to come.
        seed: Makes the draw repeatable whatever else is in the batch. The draws of the rest of a completion depend on
            `num_sampled` too, so that no random number is used twice.
        num_sampled: How many of `token_ids`, the last ones, this completion had before it was interrupted, or before
            its thoughts were ended. A stop string may begin in them.
        first_version: Weight version that sampled the first of these; None if there are none. An engine that keeps keys
            and values over weight updates has them from then (`Placement.keeps_cache`). `digest` leaves it out.
        images: Digests of the images among the tokens, in order (`rl_core.images`). `token_ids` has all tokens of each
            image, as the model sees them, not one placeholder.
        adapter: Folder of an adapter in the format of `peft` that is applied to the weights, which is never changed;
            None for what the engine serves. Only of engines that apply adapters themselves
            (`generation.lora_sync=adapter`).
    """

    token_ids: np.ndarray
    sampling: SamplingParams
    seed: int
    num_sampled: int = 0
    first_version: int | None = None
    images: tuple[str, ...] = ()
    adapter: str | None = None

    @property
    def digest(self) -> str:
        """The same for equal requests, in every process; hexadecimal."""
        tokens = np.ascontiguousarray(self.token_ids, dtype=np.int32).tobytes()
        adapter = () if self.adapter is None else (self.adapter,)
        others = repr((self.sampling, self.seed, self.num_sampled, *self.images, *adapter)).encode()
        return hashlib.blake2b(tokens + others, digest_size=16).hexdigest()

    @property
    def draw_seed(self) -> int:
        """Seed, from 0 to 2^63 - 1, for an engine that draws the same random numbers from the start of every request
        with a seed: the rest of a completion has another one.
        """
        seed = self.seed % 2**63
        if not self.num_sampled:
            return seed
        entropy = np.random.SeedSequence([seed, self.num_sampled])
        return int(entropy.generate_state(1, np.uint64)[0]) % 2**63


def refuse_adapter(request: GenerationRequest) -> None:
    """Refuse a request with an adapter, of an engine that applies none.

    Raises:
        RequestRefused: If it has one.
    """
    if request.adapter is not None:
        raise RequestRefused(
            "this engine applies no adapters of requests; set policy.generation.backend=vllm and lora_sync=adapter"
        )


class Generator(WeightSink, Protocol):
    """A replica of the engine that produces completions.

    Built as `Generator(config, backend, model, placement)` from the neutral `GenerationConfig` and `ModelConfig` of
    `rl_core.model_config`, the backend's own config and a `Placement`; `start` loads the engine. A replica may span
    ranks; this object fronts them all. After a failed sync or the engine's death every call raises `GeneratorError`.
    """

    async def start(self) -> None:
        """Load the engine."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """Return one completion; concurrent calls are batched by the engine. Raises `GeneratorError` if the engine
        died."""

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[tokens]`, logprobs of given tokens at temperature 1; index i belongs to token i, the first is 0."""

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Stop once no request is in flight; later ones wait.

        With `interrupt` those in flight end at once: each returns the tokens that it has, often none, with their
        logprobs. An engine that cannot continue a grammar in another request lets those with a grammar finish.
        """

    async def resume(self) -> None:
        """Serve again."""

    async def sleep(self) -> bool:
        """Free the device: weights and KV cache.

        Returns whether the weights are kept; if not, they are sent again before anything is served.
        """

    async def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory for these parts again; a woken KV cache is empty."""

    async def start_profile(self, order: ProfileOrder) -> ProfileReport:
        """Begin to record every process of the engine, where it computes. Raises nothing of a tool's."""

    async def stop_profile(self) -> ProfileReport:
        """End the recording, and write its files; nothing if there is none."""

    @property
    def num_ranks(self) -> int:
        """Engine ranks of this replica, each a receiver in a weight transfer."""

    async def health(self) -> Mapping[str, Any]:
        """Numbers worth logging. Raises `GeneratorError` if the engine is dead.

        Among them are `num_requests`, taken in and not answered yet, and `num_sampled`, the tokens sampled so far, also
        for requests in flight: an engine that has requests and samples nothing is treated as hung. Monitoring also
        reads these, if the engine has them: `num_running` and `num_waiting`, requests that it decodes and those that
        wait for it; `kv_cache_usage`, 0 to 1; `num_preempted`, requests so far that lost their keys and values to
        others; `weight_version`; `num_draft_tokens` and `num_accepted_tokens`, of speculative decoding so far. An
        engine that decodes speculatively also has the other entries of `SpeculationCounts.as_health`. An engine that
        quantises its weights has `quantisation_noise` (`rl_core.rollouts.delivery`).
        """

    async def close(self) -> None:
        """End the engine and all its processes."""


@dataclass(frozen=True)
class Placement:
    """The devices that a replica's engine runs on, and its part in the run.

    Args:
        device: Name of the kind of device.
        gpus: Its GPUs on this node, in rank order, as `CUDA_VISIBLE_DEVICES` lists them; empty means all that its
            process sees.
        cpu_threads: OpenMP threads per rank on CPU.
        shares_devices: True if the replica takes turns with others on its devices, and so sleeps.
        awaits_weights: True if weights are sent before anything is generated, so that the model's files need not be
            loaded.
        reports_routing: True if completions carry the experts that tokens were sent to.
        keeps_cache: True if a request that a weight update interrupted resumes from the keys and values that it has, as
            far as they are still there, and not from those that the new weights compute.
        reports_load: True if `Generator.health` includes figures that cost the engine something.
        num_engines: Number of engines of the replica's process that are placed on these devices, each with an equal
            share of the memory that is meant for one.
        keeps_weights: True if weights stay in host memory during sleep whoever sent them, because nobody sends them
            again.
        node: Position of this node among the nodes of the replica. The first one has the generator itself.
        num_nodes: Number of nodes of the replica, with equal numbers of ranks.
        meeting: Address of the first node, and a port that is kept free there, if the replica is on several.
        replica: Number of the replica among the run's.
    """

    device: str
    gpus: tuple[str, ...] = ()
    cpu_threads: int = 1
    shares_devices: bool = False
    awaits_weights: bool = False
    reports_routing: bool = False
    keeps_cache: bool = False
    reports_load: bool = False
    num_engines: int = 1
    keeps_weights: bool = False
    node: int = 0
    num_nodes: int = 1
    meeting: tuple[str, int] | None = None
    replica: int = 0

    @property
    def kind(self) -> Device:
        """The device of its first rank."""
        return device_named(self.device)

    def claim(self, num_ranks: int) -> Device:
        """Limit this process to the GPUs of the placement; returns the device of the first rank.

        Called before an engine initialises its devices.

        Args:
            num_ranks: Number of ranks of the replica, on all its nodes.

        Raises:
            ValueError: If a rank has no GPU, or a GPU no rank.
        """
        self.kind.claim(self.gpus)
        needed = num_ranks // self.num_nodes
        if self.kind.has_gpus and len(self.kind.visible()) != needed:
            seen = ", ".join(self.kind.visible()) or "none"
            on = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
            raise ValueError(f"a replica of {num_ranks} ranks{on} needs {needed} GPUs, but its process sees: {seen}")
        return self.kind
