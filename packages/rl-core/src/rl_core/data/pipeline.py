"""How many microbatches a pipeline needs so that its ranks do not wait for one another."""

from __future__ import annotations

from dataclasses import dataclass

BUBBLE = 0.2
"""Share of a pass for which a pipeline rank may wait, if there are rows for more microbatches."""

FEWEST_TOKENS = 512
"""Number of tokens below which microbatches are not made smaller: matrix products would become the slower part."""


@dataclass(frozen=True)
class Pipeline:
    """The pipeline that microbatches pass.

    Args:
        size: Number of pipeline ranks; 1 without a pipeline.
        num_chunks: Number of virtual stages of each rank, interleaved with those of the others.
    """

    size: int = 1
    num_chunks: int = 1

    @property
    def multiple(self) -> int:
        """The number of microbatches of a pass must be a multiple of this: interleaved stages pass them on in rounds of
        as many as there are ranks."""
        return self.size if self.num_chunks > 1 else 1

    def bubble(self, num_microbatches: int) -> float:
        """Return the share of a pass for which a rank waits while the pipeline fills and drains, if all microbatches
        and stages take the same time.

        See Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).
        """
        waits = self.size - 1
        return waits / (self.num_chunks * num_microbatches + waits) if waits else 0.0

    def wanted(self, num_units: int, num_tokens: int) -> int:
        """Return the number of microbatches that keeps the bubble to `BUBBLE`, or as many as this rank's rows are worth
        splitting into; 1 without a pipeline.

        Args:
            num_units: Number of units that cannot be split: rows, or groups of them.
            num_tokens: Number of tokens of all rows.
        """
        if self.size == 1:
            return 1
        enough = -(-round((self.size - 1) * (1 - BUBBLE) / BUBBLE) // self.num_chunks)
        return max(1, min(enough, num_units, num_tokens // FEWEST_TOKENS))

    def rounded(self, num_microbatches: int) -> int:
        """Return a number of microbatches that can pass, at least as large as the given one."""
        return -(-num_microbatches // self.multiple) * self.multiple
