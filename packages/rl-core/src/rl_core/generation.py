"""Generation as a loop, a rollout worker and an engine see it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NewType, Protocol

import numpy as np

from rl_core.devices import Device, device_named
from rl_core.environment import Conversation, StepResult, ToolCall
from rl_core.rollout import Completion, Message, Prompt, Rollout, RolloutGroup
from rl_core.token_filter import TokenFilter
from rl_core.weights import WeightSink


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Args:
        max_new_tokens: most tokens sampled.
        temperature: divides the logits; 0 is greedy.
        top_p: nucleus mass kept, 1.0 keeps all.
        top_k: most likely tokens kept, 0 keeps all.
        min_p: smallest probability kept, as a share of that of the most likely token; 0.0 keeps all.
        stop_token_ids: tokens that end a completion (and belong to it).
        stop_strings: texts that end a completion (and belong to it).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        TokenFilter(self.top_k, self.top_p, self.min_p)


PauseMode = Literal["finish", "interrupt"]
"""Treatment of the requests in flight when a replica pauses: they finish first, or end with the tokens that they have
and the stop reason `abort` (`rl_core.interruption` continues them)."""


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one completion, or for the rest of one that was interrupted.

    Args:
        token_ids: int32 `[tokens]`, the tokens to continue; never text.
        sampling: how to draw; the token limit is that of the tokens that are still to come.
        seed: makes the draw repeatable whatever else is in the batch. The draws of the rest of a completion depend on
            `num_sampled` too, so that no random number is used twice.
        num_sampled: how many of `token_ids`, the last ones, were sampled for this completion before it was interrupted.
            A stop string may begin in them.
        first_version: weight version that sampled the first of these; None if there are none. An engine that keeps keys
            and values over weight updates has them from then (`Placement.keeps_cache`). `digest` leaves it out.
    """

    token_ids: np.ndarray
    sampling: SamplingParams
    seed: int
    num_sampled: int = 0
    first_version: int | None = None

    @property
    def digest(self) -> str:
        """The same for equal requests, in every process; hexadecimal."""
        tokens = np.ascontiguousarray(self.token_ids, dtype=np.int32).tobytes()
        others = repr((self.sampling, self.seed, self.num_sampled)).encode()
        return hashlib.blake2b(tokens + others, digest_size=16).hexdigest()


class Generator(WeightSink, Protocol):
    """A replica of the engine that produces completions.

    Built as `Generator(config, backend, model, placement)` from the neutral `GenerationConfig` and `ModelConfig` of
    `rl_core.model_config`, the backend's own config and a `Placement`; `start` loads the engine. A replica may span
    ranks; this object fronts them all. After a failed sync or the engine's death every call raises `GeneratorError`.
    """

    async def start(self) -> None:
        """Load the engine."""
        ...

    async def generate(self, request: GenerationRequest) -> Completion:
        """One completion; concurrent calls are batched by the engine. Raises `GeneratorError` if the engine died."""
        ...

    async def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[tokens]`, logprobs of given tokens at temperature 1; index i belongs to token i, the first is 0."""
        ...

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Stop once no request is in flight; later ones wait.

        With `interrupt` those in flight end at once: each returns the tokens that it has, often none, with their
        logprobs.
        """
        ...

    async def resume(self) -> None:
        """Serve again."""
        ...

    async def sleep(self) -> bool:
        """Free the device: weights and KV cache.

        Returns whether the weights are kept; if not, they are sent again before anything is served.
        """
        ...

    async def wake(self, parts: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take device memory for these parts again; a woken KV cache is empty."""
        ...

    @property
    def num_ranks(self) -> int:
        """Engine ranks of this replica, each a receiver in a weight transfer."""
        ...

    async def health(self) -> Mapping[str, Any]:
        """Numbers worth logging. Raises `GeneratorError` if the engine is dead.

        Among them are `num_requests`, taken in and not answered yet, and `num_sampled`, the tokens sampled so far,
        those of requests in flight included: an engine that has requests and samples nothing is treated as hung.
        """
        ...

    async def close(self) -> None:
        """End the engine and all its processes."""
        ...


@dataclass(frozen=True)
class Placement:
    """The devices that a replica's engine runs on, and its part in the run.

    Args:
        device: name of the kind of device.
        gpus: its GPUs on the node, in rank order, as `CUDA_VISIBLE_DEVICES` lists them; empty means all that its
            process sees.
        cpu_threads: OpenMP threads per rank on CPU.
        shares_devices: whether the replica takes turns with others on its devices, and so sleeps.
        awaits_weights: whether weights are sent before anything is generated, so that those of the model's files need
            not be loaded.
        reports_routing: whether completions carry the experts that tokens were sent to.
        keeps_cache: whether a request that a weight update interrupted goes on from the keys and values that it has, as
            far as they are still there, and not from those that the new weights compute.
    """

    device: str
    gpus: tuple[str, ...] = ()
    cpu_threads: int = 1
    shares_devices: bool = False
    awaits_weights: bool = False
    reports_routing: bool = False
    keeps_cache: bool = False

    @property
    def kind(self) -> Device:
        """The device of its first rank."""
        return device_named(self.device)

    def claim(self, num_ranks: int) -> Device:
        """Limit this process to the GPUs of the placement; returns the device of the first rank.

        Called before an engine initialises its devices.

        Raises:
            ValueError: if a rank has no GPU, or a GPU no rank.
        """
        self.kind.claim(self.gpus)
        if self.kind.has_gpus and len(self.kind.visible()) != num_ranks:
            seen = ", ".join(self.kind.visible()) or "none"
            raise ValueError(f"a replica of {num_ranks} ranks needs {num_ranks} GPUs, but its process sees: {seen}")
        return self.kind


@dataclass(frozen=True)
class Reply:
    """A turn of the policy, read.

    Args:
        text: of the turn, without special tokens.
        message: as a chat template takes it, tool calls apart from the text.
        tool_calls: those of the turn.
    """

    text: str
    message: Message
    tool_calls: tuple[ToolCall, ...] = ()


class GenerationClient(Protocol):
    """The services of a rollout program: the replica beside it, the environment of its prompt, and the tokenizer."""

    @property
    def sampling(self) -> SamplingParams:
        """How this rollout's completions are drawn."""
        ...

    async def generate(self, token_ids: np.ndarray, sampling: SamplingParams | None = None) -> Completion:
        """Continue the tokens; seeds follow from the run's seed, the prompt and the rollout."""
        ...

    async def step(self, conversation: Conversation) -> StepResult:
        """The environment's answer to the newest turn; raises `EnvironmentFailed` if it gives none."""
        ...

    def read(self, token_ids: np.ndarray) -> Reply:
        """The turn of these sampled tokens; tool calls are read if the prompt has tools."""
        ...

    def continuation(self, turn: Message, observation: Sequence[Message], sampled: np.ndarray) -> np.ndarray:
        """int32 tokens to append after `sampled`, the newest turn, so that the policy can answer `observation`.

        `turn` is the message of the newest turn. Raises `ValueError` if the chat template cannot render that.
        """
        ...

    def rendered(self, messages: Sequence[Message], so_far: np.ndarray) -> np.ndarray:
        """int32 tokens of the conversation, up to the start of the policy's next turn, as the chat template renders it.

        They begin with `so_far`, the tokens that the engine consumed and sampled last, if the rendered text begins with
        the text of these: nothing is tokenised again then. Otherwise the template has rewritten what it had rendered
        before, and all of them are of the new text.
        """
        ...


class WeightUpdate(Protocol):
    """Weights that the policy has published under a version, and the way in which they travel to the generators.

    It goes stale with the policy's next step: what is sent under a version is what was published under it.
    """

    @property
    def version(self) -> int:
        """Version of the weights; versions grow."""
        ...

    def send(self, receivers: Sequence[Any], *, in_flight: bool = False) -> None:
        """Bring all receivers to this version, verified; called by the pool that adopts the update.

        Args:
            receivers: replicas, as the pool and the publisher of the update know them.
            in_flight: whether they interrupt their requests, which then go on with these weights.

        Raises:
            WeightSyncError: if the update is stale, or naming what did not arrive; the receivers then serve nothing.
        """
        ...


SampledTurns = Mapping[str, Completion]
"""Completions of a rollout by the digests of their requests (`GenerationRequest.digest`)."""


@dataclass(frozen=True)
class RolloutTask:
    """A group to roll out.

    Args:
        prompt: the prompt to start from.
        sampling: how completions are drawn.
        seeds: one per rollout of the group.
        is_urgent: whether it begins before groups that wait and are not, such as those of later steps.
        turns: completions of an earlier run of each rollout, which are not sampled again; empty if there was none. The
            environment takes its steps again; once it answers otherwise, or the program asks otherwise, the requests
            differ and further turns are sampled.
    """

    prompt: Prompt
    sampling: SamplingParams
    seeds: tuple[int, ...]
    is_urgent: bool = False
    turns: tuple[SampledTurns, ...] = ()


Ticket = NewType("Ticket", int)
"""Identifies a group from `RolloutPool.submit` until it is finished; later ones are larger."""


class RolloutPool(Protocol):
    """All rollout workers of a run, called as one, by one thread.

    Each group goes to the replica that has the least to do. A replica that dies is restarted and given the current
    weights; the groups that it had under way run again, and no others.

    The usage loop::

        tickets = pool.submit(tasks)
        for _ in tickets:
            ticket, group = pool.next_done()
    """

    def submit(self, tasks: Sequence[RolloutTask]) -> list[Ticket]:
        """Have groups rolled out, begun in this order as the replicas have room, urgent ones first; a ticket for each.

        Groups that are submitted together and begin on an idle replica reach its engine together and in order. More
        may be submitted while others are under way.
        """
        ...

    def next_done(self) -> tuple[Ticket, RolloutGroup]:
        """Wait for the next group that is finished, in the order in which they end.

        Called at most as often as there are groups that were submitted and not taken.
        """
        ...

    def adopt(self, update: WeightUpdate, *, in_flight: bool = False) -> None:
        """Bring every replica to this version, verified. Groups under way go on, between two of their turns or within
        one.

        Args:
            in_flight: whether completions under way are interrupted and go on with the new weights, instead of being
                finished with the old ones first.
        """
        ...

    def turns(self) -> Mapping[Ticket, tuple[SampledTurns, ...]]:
        """Completions so far of the groups that are under way, as `RolloutTask.turns` takes them; groups without any,
        and those of a replica that does not answer, are left out.
        """
        ...

    @property
    def num_replicas(self) -> int:
        """Replicas that groups go to; it may change at every call."""
        ...

    def idle_share(self) -> float | None:
        """Share of the replicas' time since the last call in which they had no rollout under way; None if nothing was
        measured.
        """
        ...


class RolloutProgram(Protocol):
    """The course of one rollout. The default is the multi-turn loop over an environment; an agent is another
    program.
    """

    async def run(self, prompt: Prompt, client: GenerationClient) -> Rollout:
        """Play one rollout; an exception makes it a failed one."""
        ...


class Weights(Protocol):
    """The publishing side of weight sync. Its state, saved with a checkpoint, is the last version given."""

    @property
    def version(self) -> int:
        """The last version given, that of the policy's present weights until it steps; 0 before the first."""
        ...

    def publish(self) -> WeightUpdate:
        """Give the policy's present weights the next version."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Plain data that `restore` goes on from."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """Rollouts of an evaluation, grouped by prompt, in the order of the prompts."""

    groups: Sequence[RolloutGroup]

    @property
    def rewards(self) -> np.ndarray:
        """float64 `[prompts]`, mean reward per prompt; a failed rollout earns 0."""
        return np.array([np.nan_to_num(group.rewards()).mean() for group in self.groups])


class RolloutSource(Protocol):
    """Generation as a loop sees it, synchronous or ahead of training."""

    def collect(self, num_groups: int, *, num_later: int | None = None) -> list[RolloutGroup]:
        """The next groups, each prompt once; with weights at most the source's staleness old.

        Args:
            num_groups: to return; fewer come at the end of the data.
            num_later: groups that later steps will need, beyond which nothing is sampled ahead; None if that is not
                known.
        """
        ...

    def set_aside(self, groups: Sequence[RolloutGroup], reason: str) -> None:
        """Note that groups which were collected since the last `adopt` train nothing, and why."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Numbers of the groups that were collected since the last `adopt`, by the names that a run records."""
        ...

    def evaluate(self, prompts: Sequence[Prompt], sampling: SamplingParams, *, num_generations: int = 1) -> Evaluation:
        """Roll out given prompts with the current weights; trains nothing and moves no data position."""
        ...

    def adopt(self, update: WeightUpdate) -> None:
        """Bring the replicas to this version, verified; raises `WeightSyncError` naming what did not arrive.

        The groups that were collected before count as trained, but for those that were set aside.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Data position and buffered rollouts, to be saved with a checkpoint: as of the last `adopt`.

        Groups that were collected since then come again after `restore`, so that a step that collected and did not
        train (its data ended) loses no prompt.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        ...

    def close(self) -> None:
        """End everything that was started."""
        ...
