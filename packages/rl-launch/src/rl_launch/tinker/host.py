"""The models that a server of training steps computes with: one base, and many adapters by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rl_core.data.batch import Batch
from rl_core.model import AdapterSettings, Metrics, StepSettings
from rl_core.rollouts.generation import GenerationRequest
from rl_core.rollouts.rollout import Completion
from rl_launch.runtime.adapter_places import AdapterWork


class AdapterHost(Protocol):
    """Adapters by name on one base. Calls that change or read adapters come from one thread, one after another;
    `sample` may be awaited meanwhile.

    Attributes:
        base_model: Name of the base, `policy.model_name`.
        tokenizer: Folder or name of its tokenizer.
        max_length: Maximum number of tokens of a row, or of prompt and completion.
        vocab_size: Number of ids.
        max_rank: Largest rank of an adapter.
        num_slots: Number of adapters that are on the device at a time; others wait on the disk.
    """

    base_model: str
    tokenizer: str
    max_length: int
    vocab_size: int
    max_rank: int
    num_slots: int

    def create(self, adapter: str, settings: AdapterSettings) -> None:
        """Make a new adapter, whose product is zero, with an empty optimizer state."""

    def accumulate(self, works: Sequence[AdapterWork]) -> list[tuple[Metrics, Batch]]:
        """Add the gradients of several adapters, each of which occurs once, in one pass over all their rows.

        Returns:
            For each, metrics of its loss, and the columns of the loss's reads for its rows, in their order.
        """

    def evaluate(self, work: AdapterWork) -> tuple[Metrics, Batch]:
        """Return what `accumulate` returns, without a gradient."""

    def apply(self, adapter: str, settings: StepSettings) -> Metrics:
        """Make one optimizer step of an adapter with its gradient so far, and begin a new one.

        Raises:
            ValueError: If there is no gradient.
        """

    def save(self, adapter: str, folder: Path) -> object:
        """Write an adapter and its optimizer state to a new folder, for `load`. Its gradient so far is not written."""

    def load(self, adapter: str, folder: Path, *, with_optimizer: bool) -> None:
        """Make or replace an adapter by what `save` wrote; its gradient so far is discarded."""

    def export(self, adapter: str, folder: Path) -> object:
        """Write an adapter to a new folder as `peft` and vLLM load it, for `sample`."""

    def release(self, adapter: str) -> None:
        """Forget an adapter, its gradient and its optimizer state."""

    async def sample(self, request: GenerationRequest, adapter: Path | None = None) -> Completion:
        """Sample one completion from the base, or with the adapter in a folder of `export`.

        Raises:
            RequestRefused: If the engine refuses the request.
            GeneratorError: If no engine could answer.
        """

    async def score(self, token_ids: Sequence[int], adapter: Path | None = None) -> list[float]:
        """Return the logprob of each token after those before it, 0 of the first, at temperature 1."""
