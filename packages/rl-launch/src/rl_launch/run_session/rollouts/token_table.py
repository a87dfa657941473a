"""Values of each token of rollouts, as rows of a Parquet file.

A file holds one step, a row per token in the order of the rollouts, so that the statistics of `rollout` tell where each
rollout lies. Columns that an algorithm does not compute are null. pyarrow is imported by the functions, because few
processes that import this module read or write tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np

from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.rollouts.group import GENERATION_LOGPROBS, LOSS_MASK, WEIGHT_VERSIONS
from rl_core.rollouts.rollout import NOT_SAMPLED

LOGPROBS, ENTROPY, ADVANTAGES = "prev_logprobs", "prev_entropy", "advantages"
BATCH_COLUMNS = (TOKENS, LOSS_MASK, GENERATION_LOGPROBS, WEIGHT_VERSIONS, LOGPROBS, ENTROPY, ADVANTAGES)
"""Columns of a batch that are recorded, if it has them."""

CHUNK_TOKENS = 2**18
"""Number of tokens that are in memory at a time, at least one rollout; also the size of a row group."""


class TextsOfTokens(Protocol):
    """The texts of a tokenizer's tokens."""

    def text(self, number: int) -> bytes | None:
        """UTF-8 of the text of a token, which may be a part of a character; None for an id without a token."""

    def is_special(self, number: int) -> bool:
        """Return whether a token is a special one."""


@dataclass(frozen=True)
class TokenRows:
    """Rows of rollouts whose tokens are recorded; the rows of a rollout are adjacent.

    Args:
        rollout: int `[rows]`, number of each row's rollout in the step, from 0: its line in the file of rollouts.
        prompt_id: `[rows]`, id of its prompt.
        index: int `[rows]`, place of the rollout in its group.
        segment: int `[rows]`, number of the row in its rollout.
        columns: The columns of `BATCH_COLUMNS` that exist, which may be in another process.
    """

    rollout: np.ndarray
    prompt_id: Sequence[str]
    index: np.ndarray
    segment: np.ndarray
    columns: Batch

    def chunks(self, most_tokens: int) -> Iterator[TokenRows]:
        """Yield consecutive parts of whole rollouts, each with at most so many tokens if it has several rollouts."""
        starts = np.append(np.flatnonzero(np.diff(self.rollout, prepend=-1)), len(self.rollout))
        ends = np.append(0, np.cumsum(self.columns.lengths))[starts]
        first = 0
        for last in range(1, len(starts)):
            is_last = last == len(starts) - 1
            if is_last or ends[last + 1] - ends[first] > most_tokens:
                start = starts[first]
                end = starts[last]
                rows = slice(start, end)
                columns = self.columns.select(np.arange(start, end))
                yield TokenRows(self.rollout[rows], self.prompt_id[rows], self.index[rows], self.segment[rows], columns)
                first = last


class TokenTables:
    """Makes tables of tokens, and keeps the texts of tokens that it has met.

    Args:
        texts: Texts of the policy's tokens; None to record ids only.
    """

    def __init__(self, texts: TextsOfTokens | None) -> None:
        self._vocabulary = _Vocabulary(texts)

    def write(self, file: IO[bytes], step: int, parts: Sequence[TokenRows]) -> None:
        """Write the file of a step.

        Raises:
            RLError: If columns are in another process and cannot be fetched.
            OSError: If the file cannot be written.
        """
        import pyarrow.parquet as pq

        schema = _schema()
        # floats compress by byte; the other columns have few values
        floats = [field.name for field in schema if str(field.type) == "float"]
        others = [field.name for field in schema if field.name not in {*floats, "position"}]
        options = {"compression": "zstd", "use_byte_stream_split": floats, "use_dictionary": others}
        with pq.ParquetWriter(file, schema, **options) as writer:
            for part in parts:
                for chunk in part.chunks(CHUNK_TOKENS):
                    writer.write_table(self.table(step, chunk), row_group_size=2 * CHUNK_TOKENS)

    def table(self, step: int, rows: TokenRows) -> Any:
        """Return the Arrow table of some rows."""
        import pyarrow as pa

        batch = rows.columns.local()
        tokens = batch.ragged(TOKENS)
        lengths, ids = tokens.lengths, tokens.values
        position = np.arange(len(ids)) - np.repeat(tokens.offsets[:-1], lengths)
        is_trained = batch.ragged(LOSS_MASK).values != 0
        versions = batch.ragged(WEIGHT_VERSIONS).values if WEIGHT_VERSIONS in batch else None
        is_sampled = is_trained if versions is None else versions != NOT_SAMPLED
        has_before = position > 0
        prompts, prompt = np.unique(np.asarray(rows.prompt_id, dtype=object), return_inverse=True)
        unique, token = np.unique(ids, return_inverse=True)
        texts, kinds = self._vocabulary.described(unique)
        kind = kinds[token]

        def floats(name: str, is_valid: np.ndarray) -> Any:
            if name not in batch:
                return pa.nulls(len(ids), pa.float32())
            column = batch[name]
            values = column.values if isinstance(column, Ragged) else np.repeat(column, lengths)
            return pa.array(values.astype(np.float32), mask=~is_valid)

        return pa.table(
            {
                "step": np.full(len(ids), step, np.int32),
                "rollout": np.repeat(rows.rollout, lengths).astype(np.int32),
                "prompt_id": _dictionary(np.repeat(prompt, lengths), pa.array(prompts.tolist(), pa.string())),
                "index": np.repeat(rows.index, lengths).astype(np.int32),
                "segment": np.repeat(rows.segment, lengths).astype(np.int32),
                "position": position.astype(np.int32),
                "token_id": ids.astype(np.int32),
                "text": _dictionary(token, pa.array(texts, pa.binary()), kind == _WITHOUT_TEXT),
                "is_special": kind == _SPECIAL,
                "loss_mask": is_trained,
                "weight_version": pa.nulls(len(ids), pa.int32())
                if versions is None
                else pa.array(versions.astype(np.int32), mask=~is_sampled),
                "generation_logprob": floats(GENERATION_LOGPROBS, is_sampled),
                # the first token of a row has none
                "logprob": floats(LOGPROBS, has_before),
                "advantage": floats(ADVANTAGES, is_trained),
                "entropy": floats(ENTROPY, has_before),
            },
            schema=_schema(),
        )


class _Vocabulary:
    """Texts and kinds of the tokens that were met, by id.

    Args:
        source: Texts of the tokens; None if none has a text.
    """

    def __init__(self, source: TextsOfTokens | None) -> None:
        self._source = source
        self._texts = np.empty(0, dtype=object)
        self._kinds = np.empty(0, dtype=np.uint8)

    def described(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """bytes `[ids]`, the text of each token, empty if it has none; uint8 `[ids]`, its kind.

        Args:
            ids: int `[ids]`, in ascending order.
        """
        missing = int(ids[-1]) + 1 - len(self._kinds) if len(ids) else 0
        if missing > 0:
            self._texts = np.append(self._texts, np.full(missing, b"", dtype=object))
            self._kinds = np.append(self._kinds, np.full(missing, _NOT_MET, dtype=np.uint8))
        for number in ids[self._kinds[ids] == _NOT_MET].tolist():
            text = None if self._source is None else self._source.text(number)
            is_special = self._source is not None and self._source.is_special(number)
            self._texts[number] = text or b""
            self._kinds[number] = _WITHOUT_TEXT if text is None else _SPECIAL if is_special else _PLAIN
        return self._texts[ids], self._kinds[ids]


_NOT_MET, _PLAIN, _SPECIAL, _WITHOUT_TEXT = range(4)
"""Kinds of tokens."""


@dataclass(frozen=True)
class RecordedRollout:
    """A rollout in a file of tokens.

    Args:
        number: Number of the rollout in the step, from 0.
        prompt_id: Id of its prompt.
        index: Place of the rollout in its group.
    """

    number: int
    prompt_id: str
    index: int


def recorded_rollouts(file: IO[bytes]) -> list[RecordedRollout]:
    """Return the rollouts in a file of tokens, in order."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file).read(columns=["rollout", "prompt_id", "index"])
    first = np.flatnonzero(np.diff(table["rollout"].to_numpy(), prepend=-1))
    columns = table.take(first).to_pydict()
    return [RecordedRollout(*each) for each in zip(*columns.values(), strict=True)]


def read_tokens(file: IO[bytes], rollout: int) -> dict[str, list[Any]]:
    """Return the columns of one rollout in a file of tokens; empty lists if it is not there.

    Args:
        file: File of a step, which can seek.
        rollout: Number of the rollout in the step, from 0.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    opened = pq.ParquetFile(file)
    place = opened.schema_arrow.get_field_index("rollout")
    bounds = [opened.metadata.row_group(n).column(place).statistics for n in range(opened.num_row_groups)]
    near = [n for n, each in enumerate(bounds) if each is None or each.min <= rollout <= each.max]
    table = opened.read_row_groups(near)
    found: dict[str, list[Any]] = table.filter(pc.equal(table["rollout"], rollout)).to_pydict()
    return found


def _dictionary(codes: np.ndarray, values: Any, is_null: np.ndarray | None = None) -> Any:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32), mask=is_null), values)


def _schema() -> Any:
    import pyarrow as pa

    number, measured = pa.int32(), pa.float32()
    return pa.schema(
        {
            "step": number,
            "rollout": number,
            "prompt_id": pa.dictionary(number, pa.string()),
            "index": number,
            "segment": number,
            "position": number,
            "token_id": number,
            "text": pa.dictionary(number, pa.binary()),
            "is_special": pa.bool_(),
            "loss_mask": pa.bool_(),
            "weight_version": number,
            "generation_logprob": measured,
            "logprob": measured,
            "advantage": measured,
            "entropy": measured,
        }
    )
