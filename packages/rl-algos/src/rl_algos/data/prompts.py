"""Prompts for rollouts from configured datasets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rl_algos.data.config import DataConfig
from rl_algos.data.example import Example, info_of
from rl_algos.data.examples import Dataset
from rl_algos.data.flow import FlowStream
from rl_algos.data.stream import Stream
from rl_algos.data.streamed import flow_stream
from rl_algos.tokenizer import encode_prompt, require_chat_template
from rl_core.errors import DataError
from rl_core.rollout import Prompt


def prompt_stream(
    datasets: list[Dataset],
    config: DataConfig,
    tokenizer: Any,
    *,
    max_tokens: int,
    seed: int,
    max_num_epochs: int | None = None,
) -> Stream[Prompt] | FlowStream[Prompt]:
    """The training prompts, mixed and shuffled as configured.

    Args:
        datasets: as `rl_algos.data.examples.load_datasets` returns them.
        tokenizer: as `rl_algos.tokenizer.load_tokenizer` returns it.
        max_tokens: most tokens of a prompt, beside `config.max_input_seq_length`.
        seed: of the order.
        max_num_epochs: number of epochs; None for an endless stream.

    Raises:
        DataError: naming dataset and row, and the remedy.
        ConfigError: if the tokenizer has no chat template.
    """
    if any(dataset.source is not None for dataset in datasets):
        require_chat_template(tokenizer)
        return flow_stream(
            datasets,
            config,
            _EncodePrompt(tokenizer),
            _prompt,
            length=len,
            limit=_limit(config, max_tokens),
            seed=seed,
            weights=weights_of(datasets),
            max_num_epochs=max_num_epochs,
            needs_answer=True,
        )
    prompts = [_prompts(dataset, config, tokenizer, max_tokens) for dataset in datasets]
    return Stream(prompts, weights_of(datasets), seed=seed, shuffle=config.shuffle, max_num_epochs=max_num_epochs)


def validation_prompts(datasets: list[Dataset], config: DataConfig, tokenizer: Any, *, max_tokens: int) -> list[Prompt]:
    """All validation prompts, in the order of the datasets and their rows; raises as `prompt_stream`."""
    return list(chain.from_iterable(_prompts(dataset, config, tokenizer, max_tokens) for dataset in datasets))


def weights_of(datasets: Sequence[Dataset]) -> list[float] | None:
    """The datasets' weights; None if they state none."""
    weights = [dataset.settings.weight for dataset in datasets if dataset.settings.weight is not None]
    return weights or None


@dataclass(frozen=True)
class _EncodePrompt:
    tokenizer: Any

    def __call__(self, example: Example) -> np.ndarray:
        if example.has_response:
            raise DataError(
                "the conversation ends with the assistant, so there is nothing to sample; "
                "end it with a message of the user"
            )
        return encode_prompt(self.tokenizer, example.messages)


def _prompts(dataset: Dataset, config: DataConfig, tokenizer: Any, max_tokens: int) -> Sequence[Prompt]:
    require_chat_template(tokenizer)
    tokens = dataset.encode(_EncodePrompt(tokenizer), config.num_workers)
    lengths = map(len, tokens.values_in_order)
    kept = dataset.within_limit(tokens, lengths, _limit(config, max_tokens), overlong=config.overlong)
    return kept.rows(lambda row_id, ids: _prompt(dataset, row_id, dataset.examples[row_id], ids))


def _limit(config: DataConfig, max_tokens: int) -> int:
    return min(config.max_input_seq_length or max_tokens, max_tokens)


def _prompt(dataset: Dataset, row_id: str, example: Example, token_ids: np.ndarray) -> Prompt:
    info = info_of(example)
    environment, place = dataset.environment_of(example, row_id), dataset.place(row_id)
    return Prompt(row_id, example.messages, token_ids, environment, info, dataset.name, place)
