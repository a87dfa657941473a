"""Values of each token of rollouts, as rows of a Parquet file.

A file holds one step, a row per token in the order of the rollouts, so that the statistics of `rollout` tell where each
rollout lies. Columns that an algorithm does not compute are null. pyarrow is imported by the functions, because few
processes that import this module read or write tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, Protocol

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
        ...

    def is_special(self, number: int) -> bool:
        """Return whether a token is a special one."""
        ...


@dataclass(frozen=True)
class TokenRows:
    """Rows of rollouts whose tokens are recorded; those of a rollout lie side by side.

    Args:
        rollout: int `[rows]`, number of each row's rollout in the step, from 0: its line in the file of rollouts.
        prompt_id: `[rows]`, id of its prompt.
        index: int `[rows]`, place of the rollout in its group.
        segment: int `[rows]`, number of the row in its rollout.
        columns: Those of `BATCH_COLUMNS` that there are, which may lie elsewhere.
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
                yield self._between(starts[first], starts[last])
                first = last

    def _between(self, start: int, end: int) -> TokenRows:
        rows = slice(start, end)
        columns = self.columns.select(np.arange(start, end))
        return TokenRows(self.rollout[rows], self.prompt_id[rows], self.index[rows], self.segment[rows], columns)


class TokenTables:
    """Makes tables of tokens, and keeps the texts of tokens that it has met.

    Args:
        texts: Texts of the policy's tokens; None to record ids only.
    """

    def __init__(self, texts: TextsOfTokens | None) -> None:
        self._texts = texts
        self._known: dict[int, tuple[bytes | None, bool]] = {}

    def write(self, file: IO[bytes], step: int, parts: Sequence[TokenRows]) -> None:
        """Write the file of a step.

        Raises:
            RLError: If columns lie elsewhere and cannot be brought here.
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
        """The Arrow table of some rows."""
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
        described = [self._described(number) for number in unique.tolist()]
        texts = pa.array([text or b"" for text, _ in described], pa.binary())
        is_unknown = np.array([text is None for text, _ in described], dtype=bool)
        special = np.array([is_special for _, is_special in described], dtype=bool)

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
                "text": _dictionary(token, texts, is_unknown[token]),
                "is_special": special[token],
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

    def _described(self, number: int) -> tuple[bytes | None, bool]:
        """Text of a token, and whether it is special."""
        if self._texts is None:
            return None, False
        if number not in self._known:
            self._known[number] = self._texts.text(number), self._texts.is_special(number)
        return self._known[number]


class RecordedRollout(NamedTuple):
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
