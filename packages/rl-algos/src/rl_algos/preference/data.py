"""Preference data of a run: read, tokenised, and paired or judged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from rl_algos.data.config import DataConfig, DatasetConfig
from rl_algos.data.examples import Dataset, Datasets
from rl_algos.data.preview import RowReader, Text, UnusedRow
from rl_algos.data.row_images import check_placed
from rl_algos.data.rows.example import Example
from rl_algos.data.rows.lazily import RowMapping
from rl_algos.data.rows.learned_flags import check_columns, without_flags
from rl_algos.data.rows.preference import preference
from rl_algos.preference.comparison import Pairing, StepVerdict, Verdict, WeighedScores, comparisons, verdicts
from rl_algos.preference.config import PreferenceConfig, PreferenceRoot
from rl_algos.preference.rows import EncodedResponse, JudgedRow, PairRow, StepsRow
from rl_algos.sft.conversation import encode_conversation
from rl_algos.special_tokens import warn_of_special_tokens
from rl_algos.supervised.data import SupervisedData, longest_row, row_limit, supervised_data
from rl_algos.token_bytes import ends_of, exact_bytes
from rl_algos.tokenizer import require_chat_template
from rl_core.errors import ConfigError, DataError
from rl_core.images import image_digests, image_refs
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

T = TypeVar("T")

PreferenceData: TypeAlias = SupervisedData[PairRow] | SupervisedData[JudgedRow] | SupervisedData[StepsRow]
"""Rows to train and validate on: pairs, or single responses with a verdict or labels of steps."""


def preference_data(
    config: PreferenceRoot,
    section: PreferenceConfig,
    tokenizer: Tokenizer,
    datasets: Datasets,
    *,
    by: Verdict | None,
    needs_margin: bool,
) -> PreferenceData:
    """Tokenise the data of an algorithm; called on the driver before anything is started.

    Args:
        config: Resolved config of the run.
        section: Config section of the algorithm.
        tokenizer: Tokenizer from `rl_algos.tokenizer.load_tokenizer`.
        datasets: Datasets of the run.
        by: Verdict on single responses; None for pairs.
        needs_margin: True to refuse pairs without a margin.

    Raises:
        DataError: With dataset and row, and the remedy.
        ConfigError: If the tokenizer has no chat template.
    """
    require_chat_template(tokenizer)
    data, policy = config.data, config.policy
    arguments: dict[str, Any] = {"data": data, "tokenizer": tokenizer, "limit": longest_row(data, policy)}
    if isinstance(by, StepVerdict):
        return supervised_data(section, data, policy, datasets, partial(steps_rows, **arguments, by=by))
    if by is not None:
        return supervised_data(section, data, policy, datasets, partial(judged_rows, **arguments, by=by))
    paired = partial(pair_rows, **arguments, pairing=section.pairing, needs_margin=needs_margin)
    return supervised_data(section, data, policy, datasets, paired)


def preference_reader(
    config: PreferenceRoot, section: PreferenceConfig, *, by: Verdict | None, needs_margin: bool
) -> RowReader:
    """Return the reader of the rows of an algorithm; see `preference_data` for the arguments."""

    def encode(tokenizer: Tokenizer, example: Example, _settings: DatasetConfig) -> list[Text]:
        if isinstance(by, StepVerdict):
            [(response, labels)] = _encode_steps(tokenizer, by, example)
            shown = " ".join(f"{label:g}" for label in labels[labels >= 0])
            return [_text(f"response, labels of steps {shown}", response, example)]
        if by is not None:
            judged = _encode_judged(tokenizer, by, example)
            named = "score" if isinstance(by, WeighedScores) else by
            return [_text(f"response, {named} {verdict:g}", response, example) for response, verdict in judged]
        pairs = _encode_pairs(tokenizer, section.pairing, needs_margin, example)
        if not pairs:
            raise UnusedRow("no response is better than another")
        numbers = [f" {number}" if len(pairs) > 1 else "" for number in range(1, len(pairs) + 1)]
        return [
            text
            for number, (better, worse, margin) in zip(numbers, pairs, strict=True)
            for text in (
                _text(f"chosen{number}" + ("" if margin is None else f", margin {margin:g}"), better, example),
                _text(f"rejected{number}", worse, example),
            )
        ]

    return RowReader(encode, *row_limit(config.data, config.policy), processor=preference)


def _text(title: str, response: EncodedResponse, example: Example) -> Text:
    return Text(title, response.tokens, response.loss_mask, tuple(image_refs(example.messages)))


def pair_rows(
    dataset: Dataset,
    data: DataConfig,
    tokenizer: Tokenizer,
    limit: int,
    *,
    pairing: Pairing,
    needs_margin: bool = False,
) -> Sequence[PairRow]:
    """Return pairs of responses, one better than the other and both with at most `limit` tokens.

    Args:
        dataset: Dataset whose examples have several responses.
        data: Config section `data`.
        tokenizer: Tokenizer from `rl_algos.tokenizer.load_tokenizer`.
        limit: Maximum number of tokens of a prompt with its response.
        pairing: See `rl_algos.preference.comparison.comparisons`.
        needs_margin: True to refuse pairs without a margin.

    Raises:
        DataError: With the row that has nothing to compare or is too long, or the dataset if it has no pairs.
    """
    encode = partial(_encode_pairs, tokenizer, pairing, needs_margin)
    found = _encoded(dataset, data, tokenizer, encode, limit)
    ties = sum(not pairs for pairs in found.values_in_order)
    if ties == len(found):
        raise DataError(f"the dataset {dataset.name!r} has no pairs: the responses of every row are equally good")
    if ties:
        what = "rows are excluded, because their responses are equally good"
        _log.warning("%s: %d of %d %s", dataset.name, ties, len(found), what)
    return found.flat(lambda row_id, number, count, pair: PairRow(_numbered(row_id, number, count), *pair))


def judged_rows(
    dataset: Dataset,
    data: DataConfig,
    tokenizer: Tokenizer,
    limit: int,
    *,
    by: Literal["label", "score"] | WeighedScores,
) -> Sequence[JudgedRow]:
    """Return single responses with a verdict, none longer than `limit` tokens.

    Raises:
        DataError: With the row that has no such verdict or is too long.
    """
    found = _encoded(dataset, data, tokenizer, partial(_encode_judged, tokenizer, by), limit)
    return found.flat(lambda row_id, number, count, judged: JudgedRow(_numbered(row_id, number, count), *judged))


def steps_rows(
    dataset: Dataset, data: DataConfig, tokenizer: Tokenizer, limit: int, *, by: StepVerdict
) -> Sequence[StepsRow]:
    """Return single responses with labels of their steps, none longer than `limit` tokens.

    Raises:
        DataError: With the row whose steps have no labels, are not found in its tokens, or that is too long.
        ConfigError: If the tokenizer's tokens have no bytes of their own, by which steps are found.
    """
    if exact_bytes(tokenizer) is None:
        raise ConfigError(
            "rm.loss: got process: the bytes of this tokenizer's tokens are not known, so the ends of steps cannot be "
            "found. Choose a model with a byte-level tokenizer"
        )
    found = _encoded(dataset, data, tokenizer, partial(_encode_steps, tokenizer, by), limit)
    return found.flat(lambda row_id, number, count, steps: StepsRow(_numbered(row_id, number, count), *steps))


def _encode_pairs(
    tokenizer: Tokenizer, pairing: Pairing, needs_margin: bool, example: Example
) -> list[tuple[EncodedResponse, EncodedResponse, float | None]]:
    check_columns(example)
    check_placed(tokenizer, example)
    pairs = []
    for better, worse, margin in comparisons(example, pairing):
        if needs_margin and margin is None:
            raise DataError(
                "the pair has no margin. Add a column `margin` or the scores of both responses, or use a loss "
                "without margins, such as rm.margin=ignore"
            )
        first, second = (
            encode_response(tokenizer, example.messages, response.messages, example.tools)
            for response in (better, worse)
        )
        pairs.append((first, second, margin))
    return pairs


def _encode_steps(tokenizer: Tokenizer, by: StepVerdict, example: Example) -> list[tuple[EncodedResponse, np.ndarray]]:
    check_columns(example)
    check_placed(tokenizer, example)
    if len(example.responses) != 1 or not example.responses[0].step_labels:
        raise DataError(
            "the steps of the row have no labels. Add `completions`, the list of steps, and `labels`, one for each; or "
            "set `processor` to a function that returns Example(messages, responses=(Response(messages of steps, "
            "step_labels=...),))"
        )
    [response] = example.responses
    steps = [str(message["content"]).removesuffix(by.step_end) for message in response.messages]
    whole = {**response.messages[0], "content": by.step_end.join(steps)}
    encoded = encode_response(tokenizer, example.messages, [whole], example.tools)
    bytes_of, start = exact_bytes(tokenizer), int(np.argmax(encoded.loss_mask > 0))
    assert bytes_of is not None
    places = ends_of(by.step_end, encoded.tokens[start:].tolist(), bytes_of)
    if len(places) != len(steps):
        raise DataError(
            f"the row has {len(steps)} steps, but {len(places)} are found in its tokens by rm.step_end "
            f"({by.step_end!r}): a step contains this string, or is empty. Set rm.step_end to a string that no step has"
        )
    labels = np.full(len(encoded.tokens), -1.0, dtype=np.float32)
    labels[start + np.array(places)] = response.step_labels
    return [(encoded, labels)]


def _encode_judged(
    tokenizer: Tokenizer, by: Literal["label", "score"] | WeighedScores, example: Example
) -> list[tuple[EncodedResponse, float]]:
    check_columns(example)
    check_placed(tokenizer, example)
    return [
        (encode_response(tokenizer, example.messages, response.messages, example.tools), verdict)
        for response, verdict in verdicts(example, by)
    ]


def _encoded(
    dataset: Dataset, data: DataConfig, tokenizer: Tokenizer, encode: Callable[[Example], list[T]], limit: int
) -> RowMapping[list[T]]:
    """Return the encoded rows within the limit by their id."""
    warn_of_special_tokens(dataset.name, dataset.conversations(), tokenizer)
    dataset.log_unused_columns()
    encoded = dataset.encode(encode, data.num_workers)

    def longest(items: Sequence[Any]) -> int:
        parts = (part for item in items for part in item if isinstance(part, EncodedResponse))
        return max((len(part.tokens) for part in parts), default=0)

    lengths = map(longest, encoded.values_in_order)
    return dataset.within_limit(encoded, lengths, limit, overlong=data.overlong)


def _numbered(row_id: str, number: int, count: int) -> str:
    return f"{row_id}/{number}" if count > 1 else row_id


def encode_response(
    tokenizer: Tokenizer,
    prompt: Sequence[Message],
    response: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
) -> EncodedResponse:
    """Return the tokens of prompt and response, with a mask of the response.

    Args:
        tokenizer: Tokenizer with a chat template.
        prompt: Messages before the response, which are not learned.
        response: Messages of the response, whose assistant's text is learned.
        tools: JSON schemas of the tools that the assistant may call.

    Raises:
        DataError: If the chat template renders the prompt in another way once the response follows, or the response is
            empty.
        jinja2.TemplateError: if the template refuses the messages.
    """
    given = [{**without_flags(message), "train": False} for message in prompt]
    tokens, mask = encode_conversation(tokenizer, [*given, *response], tools=tools)
    if not mask.any():
        raise DataError("the response is empty: it contains no assistant text")
    return EncodedResponse(tokens, mask, image_digests([*prompt, *response]))
