"""Training rows of supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.examples import Dataset, Datasets
from rl_algos.data.flow import FlowStream, flow_stream
from rl_algos.data.preview import RowReader, Text
from rl_algos.data.prompts import weights_of
from rl_algos.data.row_images import check_placed
from rl_algos.data.rows.example import Example
from rl_algos.data.rows.learned_flags import check_columns
from rl_algos.images.columns import with_image_column
from rl_algos.sft.config import LearnedTurns, SFTRoot
from rl_algos.sft.conversation import encode_conversation
from rl_algos.special_tokens import warn_of_special_tokens
from rl_algos.supervised.data import SupervisedData, longest_row, row_limit, supervised_data
from rl_algos.tokenizer import require_chat_template
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import DataError
from rl_core.images import image_digests, image_refs
from rl_core.model_config import ModelConfig
from rl_core.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Encoded: TypeAlias = tuple[np.ndarray, np.ndarray, tuple[str, ...]]
"""Tokens int32 `[tokens]`, the mask of the loss uint8 `[tokens]`, and the digests of the images."""


@dataclass(frozen=True)
class TrainingRow:
    """A conversation to learn from.

    Args:
        id: Unique within the run and stable across runs.
        tokens: int32 `[tokens]`.
        loss_mask: uint8 `[tokens]`, 1 on what is learned.
        dataset: Name of its dataset.
        images: Digests of its images, in the order of their tokens.
    """

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    dataset: str = ""
    images: tuple[str, ...] = ()


def prepare_examples(config: SFTRoot, tokenizer: Tokenizer, datasets: Datasets) -> SupervisedData[TrainingRow]:
    """Tokenise the data and check what came out; called on the driver before anything is started.

    Args:
        config: Root with `sft`, `data` and `policy`.
        tokenizer: Tokenizer from `rl_algos.tokenizer.load_tokenizer`.
        datasets: Datasets from `rl_algos.data.examples.load_examples`.

    Raises:
        DataError: Naming dataset and row, and the remedy.
        ConfigError: If the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)
    data, sft, policy = config.data, config.sft, config.policy
    limit = longest_row(data, policy)

    def rows_of(dataset: Dataset) -> Sequence[TrainingRow]:
        return training_rows(dataset, data, tokenizer, limit, learn=sft.learn)

    def flow_of(streamed: Sequence[Dataset]) -> FlowStream[TrainingRow]:
        return flow_stream(
            streamed,
            data,
            EncodeExample(tokenizer, sft.learn),
            lambda dataset, row_id, _, encoded: _training_row(dataset, row_id, encoded),
            length=lambda encoded: len(encoded[0]),
            limit=limit,
            seed=sft.seed,
            weights=weights_of(streamed),
            max_num_epochs=sft.num_epochs,
        )

    size_of = (lambda row: int(row.loss_mask.sum())) if sft.mix_by == "tokens" else None
    return supervised_data(sft, data, policy, datasets, rows_of, size_of=size_of, flow_of=flow_of)


def conversation_reader(data: DataConfig, policy: ModelConfig, learn: LearnedTurns) -> RowReader:
    """Return the reader of conversations to learn from."""

    def encode(tokenizer: Tokenizer, example: Example, _settings: DatasetConfig) -> list[Text]:
        tokens, mask, _ = EncodeExample(tokenizer, learn)(example)
        return [Text("", tokens, mask, tuple(image_refs(example.messages)))]

    return RowReader(encode, *row_limit(data, policy))


def to_batch(rows: Sequence[TrainingRow]) -> Batch:
    """Return rows as the columns that `NLLLoss` needs, and their images if there are any."""
    batch = Batch(
        {
            TOKENS: Ragged.from_rows([row.tokens for row in rows], dtype=np.int32),
            "loss_mask": Ragged.from_rows([row.loss_mask for row in rows], dtype=np.uint8),
        }
    )
    return with_image_column(batch, [row.images for row in rows])


@dataclass(frozen=True)
class EncodeExample:
    """Encodes the conversation of an example with its answer, as `encode_conversation` does, and gives the digests of
    its images.

    Args:
        tokenizer: Tokenizer as `rl_algos.tokenizer.load_tokenizer` returns it.
        learn: As of `encode_conversation`.
    """

    tokenizer: Tokenizer
    learn: LearnedTurns

    def __call__(self, example: Example) -> Encoded:
        check_columns(example)
        messages = (*example.messages, *example.response)
        check_placed(self.tokenizer, replace(example, messages=messages))
        tokens, mask = encode_conversation(self.tokenizer, messages, learn=self.learn, tools=example.tools)
        return tokens, mask, image_digests(messages)


@dataclass(frozen=True)
class EncodeShown:
    """Encodes the response of a row as the completion of a rollout: a demonstration.

    Args:
        tokenizer: Tokenizer as `rl_algos.tokenizer.load_tokenizer` returns it.
        max_tokens: Maximum number of tokens of a completion.
    """

    tokenizer: Tokenizer
    max_tokens: int

    def __call__(self, example: Example, prompt: np.ndarray, tools: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return int32 `[tokens]`, the response with the token that ends its turn.

        Args:
            example: Example with a response.
            prompt: int32 `[tokens]`, the tokens that rollouts begin with.
            tools: Tools that the prompt shows.

        Raises:
            DataError: If it cannot take the place of a completion.
        """
        if len(example.response) > 1:
            raise DataError("its response has several turns, but a demonstration takes the place of a single one")
        messages = (*example.messages, *example.response)
        whole, learned = encode_conversation(self.tokenizer, messages, learn="last", tools=tools)
        if not np.array_equal(whole[: len(prompt)], prompt):
            problem = "the chat template writes its response after other tokens than those that rollouts begin with"
            raise DataError(f"{problem}; begin the response as the template does, such as with its mark of thoughts")
        shown = whole[len(prompt) : np.flatnonzero(learned)[-1] + 1]
        if len(shown) > self.max_tokens:
            limit = f"{self.max_tokens}, the tokens of a completion (policy.generation.max_new_tokens)"
            raise DataError(f"its response has {len(shown)} tokens, more than {limit}")
        return shown


def _training_row(dataset: Dataset, row_id: str, encoded: Encoded) -> TrainingRow:
    tokens, mask, images = encoded
    return TrainingRow(row_id, tokens, mask, dataset.name, images)


def training_rows(
    dataset: Dataset, config: DataConfig, tokenizer: Tokenizer, limit: int, *, learn: LearnedTurns
) -> Sequence[TrainingRow]:
    """Return the rows of a dataset of at most `limit` tokens; raises as `prepare`."""
    warn_of_special_tokens(dataset.name, dataset.conversations(), tokenizer)
    dataset.log_unused_columns()
    encoded = dataset.encode(EncodeExample(tokenizer, learn), config.num_workers)
    kept = dataset.within_limit(
        encoded, (len(tokens) for tokens, _, _ in encoded.values_in_order), limit, overlong=config.overlong
    )
    rows = kept.rows(lambda row_id, encoded: _training_row(dataset, row_id, encoded))
    unknown = tokenizer.unk_token_id
    if unknown is not None and (found := [row.id for row in rows if (row.tokens[row.loss_mask > 0] == unknown).any()]):
        _log.warning(
            "%d of %d rows of the dataset %r contain characters that the tokenizer does not know, the first at "
            "%s: the model would learn to write %s instead. Remove them, or choose another model or tokenizer.",
            len(found),
            len(rows),
            dataset.name,
            dataset.place(found[0]),
            tokenizer.unk_token,
        )
    if not any(row.loss_mask.any() for row in rows):
        raise DataError(
            f"no token of the dataset {dataset.name!r} is in the loss: the assistant messages of all rows are empty"
        )
    return rows
