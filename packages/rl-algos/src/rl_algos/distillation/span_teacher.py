"""A teacher whose tokens differ from the student's: both are compared on the spans of text that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rl_algos.losses.distillation import SPAN_LOGPROBS, SPANS
from rl_algos.token_bytes import BytesOf, decoder_steps, exact_bytes
from rl_algos.tokenizer import encode_prompt, generation_ends
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError
from rl_core.facts.template_ends import template_ends
from rl_core.model import LOGPROBS, Model
from rl_core.rollouts.group import LOSS_MASK, RolloutGroup
from rl_core.rollouts.rollout import Message
from rl_core.tokenizer import Tokenizer


class TeacherRow(NamedTuple):
    """A student's completion, as a teacher reads it.

    Args:
        tokens: int32 `[teacher tokens]`, with the prompt by the teacher's chat template.
        spans: Spans of the student's sampled tokens and the teacher's whole row.
    """

    tokens: np.ndarray
    spans: Sequence[SharedSpan]


class Translator:
    """From the student's tokens to a teacher's.

    Args:
        student, teacher: Fast tokenizers; the teacher's with a chat template.
        key: Key of the teacher's section, for messages.

    Raises:
        ConfigError: If the bytes of a tokenizer's tokens are not known.
    """

    def __init__(self, student: Tokenizer, teacher: Tokenizer, *, key: str) -> None:
        self._teacher = teacher
        self._student_bytes = bytes_of(student, "policy")
        self._teacher_bytes = bytes_of(teacher, key)
        self._student_ends = {student.eos_token_id, _end_of_turn(student), *generation_ends(student)}
        self._teacher_end = _end_of_turn(teacher)

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """int32 `[tokens]`, the conversation as the teacher reads it."""
        return encode_prompt(self._teacher, messages)

    def response(self, prompt: np.ndarray, sampled: Sequence[int]) -> TeacherRow:
        """Return the tokens of the student's turn, after the teacher's prompt. What has no text of its own (a
        character cut in two, special tokens but that at the end) is in no span, nor what comes after it."""
        ended = bool(sampled) and sampled[-1] in self._student_ends
        said = [self._student_bytes(token) for token in (sampled[:-1] if ended else sampled)]
        text, whole = whole_text(said)
        tokens = self._teacher(text, add_special_tokens=False)["input_ids"] if text else []
        heard = [self._teacher_bytes(token) for token in tokens]
        start = len(prompt)
        if b"".join(heard) != b"".join(said[:whole]):
            return TeacherRow(prompt, ())
        spans = [
            SharedSpan(student, (first + start, last + start))
            for student, (first, last) in common_spans(said[:whole], heard)
        ]
        if ended and whole == len(said):
            spans.append(SharedSpan((whole, whole + 1), (start + len(tokens), start + len(tokens) + 1)))
            tokens = [*tokens, self._teacher_end]
        return TeacherRow(np.concatenate([prompt, np.asarray(tokens, dtype=np.int32)]).astype(np.int32), spans)


def _end_of_turn(tokenizer: Tokenizer) -> int:
    """Return the id that the chat template writes after a turn, or the id of the end of sequence."""
    return int(tokenizer.convert_tokens_to_ids(template_ends(tokenizer).token or tokenizer.eos_token))


class SpanTeacher:
    """A teacher with other tokens than the student.

    Args:
        model: The teacher.
        translator: Translator of the student's tokens.
        max_tokens: Maximum number of tokens of a row of the teacher; longer responses do not train.
        temperature: Divides its logits.
    """

    def __init__(self, model: Model, translator: Translator, *, max_tokens: int, temperature: float) -> None:
        self._model = model
        self._translator = translator
        self._max_tokens = max_tokens
        self._temperature = temperature

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def scored(self, batch: Batch, groups: Sequence[RolloutGroup]) -> Batch:
        """Return the rollouts with the spans of their responses, and the teacher's logprobs of them. Spans are found
        here, on the driver, which reads the tokens for it."""
        tokens, mask = batch.ragged(TOKENS), batch.ragged(LOSS_MASK)
        prompts = [
            prompt
            for group in groups
            for prompt in [self._translator.prompt(group.prompt.messages)] * len(group.rollouts)
        ]
        # Tokens that ended thoughts by force are among the sampled ones: the teacher reads them, in spans that do not
        # count.
        starts = [int(row.argmax()) if row.any() else len(row) for row in mask]
        responses = [
            self._translator.response(prompt, row[start:].tolist())
            for prompt, row, start in zip(prompts, tokens, starts, strict=True)
        ]
        read = [row for row, each in enumerate(responses) if each.spans and len(each.tokens) <= self._max_tokens]
        spans = np.zeros(len(tokens.values), dtype=np.uint8)
        logprobs = np.zeros(len(tokens.values), dtype=np.float32)
        if read:
            rows = Batch({TOKENS: Ragged.from_rows([responses[row].tokens for row in read], dtype=np.int32)})
            found = self._model.infer(rows, [LOGPROBS], temperature=self._temperature).ragged("logprobs")
            for row, teacher in zip(read, found, strict=True):
                before = tokens.offsets[row] + starts[row]
                for (first, last), (start, end) in responses[row].spans:
                    if mask.values[before + first : before + last].all():
                        spans[before + first : before + last] = 1
                        spans[before + last - 1] = 2
                        logprobs[before + last - 1] = teacher[start:end].sum()
        return batch.with_columns({SPANS: mask.like(spans), SPAN_LOGPROBS: mask.like(logprobs)})


class SharedSpan(NamedTuple):
    """Tokens of two tokenizers for the same bytes.

    Args:
        student: Its tokens, as a half-open range.
        teacher: Likewise.
    """

    student: tuple[int, int]
    teacher: tuple[int, int]


def common_spans(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[SharedSpan]:
    """Return the shortest spans that cover a string, given the bytes of each token of both tokenizers; both make up the
    text."""
    spans: list[SharedSpan] = []
    ends = [0, 0]  # bytes up to the current tokens' ends
    at = [0, 0]  # tokens taken
    start = (0, 0)
    while at[0] < len(student) or at[1] < len(teacher):
        side = 0 if at[1] == len(teacher) or (at[0] < len(student) and ends[0] <= ends[1]) else 1
        ends[side] += len((student, teacher)[side][at[side]])
        at[side] += 1
        if ends[0] == ends[1] and at[0] > start[0] and at[1] > start[1]:
            spans.append(SharedSpan((start[0], at[0]), (start[1], at[1])))
            start = (at[0], at[1])
    return spans


def bytes_of(tokenizer: Tokenizer, key: str) -> BytesOf:
    """Return the bytes of each token of a fast tokenizer.

    Args:
        tokenizer: Fast tokenizer, byte-level or with byte fallback.
        key: Key of the model whose tokenizer it is, for messages.

    Raises:
        ConfigError: If the bytes of its tokens are not known.
    """
    of = exact_bytes(tokenizer)
    if of is None:
        raise ConfigError(
            f"{key}: the bytes of this tokenizer's tokens are not known (its decoder is "
            f"{', '.join(sorted(decoder_steps(tokenizer)))}); distillation.cross_tokenizer supports byte-level "
            "tokenizers, and tokenizers with byte fallback"
        )
    return of


def whole_text(pieces: Sequence[bytes]) -> tuple[str, int]:
    """Return the string that tokens make up, and how many of them do: those at the end that begin a character and do
    not finish it are left out."""
    for count in range(len(pieces), 0, -1):
        try:
            return b"".join(pieces[:count]).decode(), count
        except UnicodeDecodeError:
            continue
    return "", 0
