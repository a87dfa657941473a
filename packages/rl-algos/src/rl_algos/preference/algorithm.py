"""The base of algorithms that learn from comparisons."""

from __future__ import annotations

from typing import Any, TypeVar

from rl_algos.data.examples import Datasets, load_examples
from rl_algos.data.preview import RowReader
from rl_algos.preference.comparison import Verdict
from rl_algos.preference.config import PreferenceConfig, PreferenceRoot
from rl_algos.supervised.algorithm import SupervisedAlgorithm
from rl_core.tokenizer import Tokenizer

C = TypeVar("C", bound=PreferenceRoot)


class PreferenceAlgorithm(SupervisedAlgorithm[C, Any]):
    """Reads pairs of responses, or single ones with a verdict; a subclass adds `reads` and `run`."""

    def reads(self, config: C) -> tuple[PreferenceConfig, Verdict | None, bool]:
        """Return the section of the algorithm, the verdict that its loss learns from (None for pairs), and whether
        pairs need a margin."""
        raise NotImplementedError(f"{type(self).__name__} must define reads")

    # The functions below import transformers, which takes a second that checks before need not pay.

    def load(self, config: C) -> Datasets:
        from rl_algos.data.rows.preference import preference

        return load_examples(config, default=preference)

    def prepare(self, config: C, tokenizer: Tokenizer, loaded: Datasets) -> Any:
        from rl_algos.preference.data import preference_data

        section, by, needs_margin = self.reads(config)
        return preference_data(config, section, tokenizer, loaded, by=by, needs_margin=needs_margin)

    def row_reader(self, config: C) -> RowReader:
        from rl_algos.preference.data import preference_reader

        section, by, needs_margin = self.reads(config)
        return preference_reader(config, section, by=by, needs_margin=needs_margin)
