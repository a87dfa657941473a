"""Reward models as judges: models of the run with a score for a conversation."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from jinja2 import TemplateError

from rl_algos.images.image_tokens import check_images
from rl_algos.judges.config import JudgesRoot, RewardModelJudgeConfig, judge_role, judge_sections
from rl_algos.judges.rubrics import Rubric
from rl_algos.special_tokens import special_tokens
from rl_algos.token_bytes import BytesOf, ends_of, exact_bytes
from rl_algos.tokenizer import load_tokenizer, render, require_chat_template
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.microbatch import PREFIX_GROUP
from rl_core.data.ragged import Ragged
from rl_core.errors import ConfigError, DataError
from rl_core.facts.template_ends import template_ends
from rl_core.model import SCORES, VALUES, Model
from rl_core.rollouts.judging import JudgedReward, JudgedRollout
from rl_core.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

JudgedGroups = Sequence[Sequence[JudgedRollout | None]]
"""Rollouts by prompt; None for one that failed, which is not judged."""

Each = Literal["rollout", "turn", "token"]
"""Part of a rollout that has a reward of its own, or tokens of a turn whose scores make its reward."""

MIN_LOGIT = -700.0
"""Smallest logit of a probability: the exponential of 710 is infinite in float64."""

_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "mean": lambda scores: math.fsum(scores) / len(scores),
    "last": lambda scores: scores[-1],
    "product": math.prod,
}


class ScoredPlaces(NamedTuple):
    """Scores of a turn among the rows of its rollout.

    Args:
        row: Index of the row.
        places: Tokens whose scores count, rising.
    """

    row: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class EncodedRollout:
    """A rollout as a reward model reads it, or the reason that it cannot.

    Args:
        rows: int32 `[tokens]` each, none of them the beginning of another one.
        turns: For each turn that is judged, where its scores are.
        failure: Reason in one line; empty if there is none.
        num_cut: Number of turns whose conversation is too long, so that its first tokens are left out.
    """

    rows: tuple[np.ndarray, ...] = ()
    turns: tuple[ScoredPlaces, ...] = ()
    failure: str = ""
    num_cut: int = 0


class JudgeTokenizer:
    """Renders conversations by the chat template of a reward model, as `algorithm: rm` trains on them.

    Special tokens in what anybody wrote are ordinary text, so that no turn can pretend to be another one.

    Args:
        name: Name of the judge.
        tokenizer: Tokenizer with a chat template.
        config: Settings of the judge.

    Raises:
        ConfigError: If steps cannot be found with this tokenizer.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, config: RewardModelJudgeConfig) -> None:
        require_chat_template(tokenizer)
        self._name, self._tokenizer, self._config = name, tokenizer, config
        self._special = special_tokens(tokenizer)
        self._bytes_of: BytesOf | None = None
        if config.step_end is not None:
            self._bytes_of = exact_bytes(tokenizer)
            if self._bytes_of is None:
                raise ConfigError(
                    f"judges.{name}.step_end: the bytes of this tokenizer's tokens are not known, so steps cannot be "
                    "found. Remove the key, so that every token counts, or choose a model with a byte-level tokenizer"
                )

    @classmethod
    def load(cls, name: str, config: RewardModelJudgeConfig) -> JudgeTokenizer:
        """Load the tokenizer of a judge.

        Raises:
            ConfigError: If it cannot be loaded or has no chat template.
        """
        try:
            return cls(name, load_tokenizer(config.tokenizer, config.model_name), config)
        except ConfigError as error:
            raise ConfigError(str(error).replace("policy.", f"judges.{name}.")) from error

    @cached_property
    def _ends(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def _end_of_turn(self) -> int:
        """Id that training writes after a turn which the template leaves open."""
        return int(
            self._tokenizer.convert_tokens_to_ids(template_ends(self._tokenizer).token or self._tokenizer.eos_token)
        )

    def encode(self, rollouts: Sequence[JudgedRollout], each: Each) -> list[EncodedRollout]:
        """Return the tokens of rollouts and the places of their scores.

        The score of a turn is the score of the conversation that ends with it. The score of a rollout is the score of
        its last turn.
        """
        texts = [self._texts(rollout, each) for rollout in rollouts]
        flat = [text for several in texts for text in several.conversations]
        conversations = map(self._ended, flat, self._tokens(flat))
        prompts = iter(self._tokens([text for several in texts for text in several.prompts]))
        return [
            EncodedRollout(failure=several.failure)
            if several.failure
            else self._encoded(
                list(islice(conversations, len(several.conversations))), list(islice(prompts, len(several.prompts)))
            )
            for several in texts
        ]

    def _texts(self, rollout: JudgedRollout, each: Each) -> _RolloutTexts:
        """Render the conversation up to the end of each turn that is judged, and its prompt if steps of it are."""
        messages = [*rollout.prompt, *rollout.messages]
        # The policy wrote its turns, so special tokens are text there too.
        hidden = self._special.hidden([{**message, "role": "user"} for message in messages])
        messages = [{**shown, "role": message["role"]} for shown, message in zip(hidden, messages, strict=True)]
        first = len(rollout.prompt)
        ends = [at for at in range(first, len(messages)) if messages[at]["role"] == "assistant"]
        if not ends:
            return _RolloutTexts(failure=f"judges.{self._name} cannot read a rollout without a turn of the policy")
        ends = ends[-1:] if each == "rollout" else ends
        shown = partial(render, self._tokenizer)
        try:
            check_images(self._tokenizer, messages)
            return _RolloutTexts(
                [shown(messages[: end + 1], add_generation_prompt=False) for end in ends],
                [shown(messages[:end], add_generation_prompt=True) for end in ends if each == "token"],
            )
        except (DataError, TemplateError) as error:
            reason = " ".join(str(error).split())
            return _RolloutTexts(failure=f"judges.{self._name} cannot read the rollout: {reason}")

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        plain = [text for text in texts if not self._special.has_placeholders(text)]
        # The tokenizer encodes several strings at once, on all cores.
        encoded = iter(self._tokenizer(plain, add_special_tokens=False)["input_ids"] if plain else ())
        return [self._special.encode(text) if self._special.has_placeholders(text) else next(encoded) for text in texts]

    def _ended(self, text: str, tokens: list[int]) -> list[int]:
        """Return the tokens of a conversation with the end of its last turn, if the template leaves that open."""
        return tokens if text.rstrip().endswith(self._ends) else [*tokens, self._end_of_turn]

    def _encoded(self, conversations: Sequence[list[int]], prompts: Sequence[list[int]]) -> EncodedRollout:
        """Return the rows of a rollout: its conversations up to each turn, except those that others begin with.

        Args:
            conversations: Tokens up to the end of each turn, in order.
            prompts: Tokens of the prompts of these turns, if their steps are judged.
        """
        limit, num_cut = self._config.max_total_sequence_length, 0
        rows: list[list[int]] = []
        turns: list[ScoredPlaces] = []
        for number in reversed(range(len(conversations))):
            tokens = conversations[number]
            places = self._steps(tokens, prompts[number]) if prompts else (len(tokens) - 1,)
            cut = max(0, len(tokens) - limit)
            if cut or not rows or len(rows[-1]) > limit or rows[-1][: len(tokens)] != tokens:
                rows.append(tokens)
                num_cut += cut > 0
            turns.append(ScoredPlaces(len(rows) - 1, tuple(place - cut for place in places if place >= cut)))
        read = tuple(np.asarray(row[-limit:], np.int32) for row in rows)
        return EncodedRollout(read, tuple(reversed(turns)), num_cut=num_cut)

    def _steps(self, tokens: Sequence[int], prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the places of the ends of the last turn's steps: the tokens with the last byte of `step_end`, and the
        last token. Without `step_end`, all tokens after the prompt."""
        pairs = enumerate(zip(tokens, prompt, strict=False))
        start = next((at for at, (own, other) in pairs if own != other), min(len(prompt), len(tokens) - 1))
        if self._bytes_of is None or self._config.step_end is None:
            return tuple(range(start, len(tokens)))
        return tuple(start + place for place in ends_of(self._config.step_end, tokens[start:], self._bytes_of))


class _RolloutTexts(NamedTuple):
    conversations: Sequence[str] = ()
    prompts: Sequence[str] = ()
    failure: str = ""


_NOTHING = EncodedRollout(failure="the rollout failed before it was judged")


class RewardModelJudge:
    """A reward model of the run.

    The rewards of a group follow from its own rollouts: its rows are computed in microbatches without other rows, each
    different row once, and what they begin with once. So they are the same, bit by bit, for any number of groups that
    are judged together, in any order, and on any number of data-parallel ranks.

    Args:
        name: Name of the judge.
        model: The model.
        tokenizer: Its tokenizer.
        config: Its settings.
    """

    def __init__(self, name: str, model: Model, tokenizer: JudgeTokenizer, config: RewardModelJudgeConfig) -> None:
        self._name, self._model, self._tokenizer, self._config = name, model, tokenizer, config
        self._counts = dict.fromkeys(("requests", "tokens", "cached", "failed", "cut"), 0)
        self._seconds, self._warned = 0.0, False

    def judge(self, rewards: Mapping[str, Rubric], groups: JudgedGroups) -> list[list[dict[str, JudgedReward]]]:
        """Return the rewards of each rollout by their names, in the order of the groups; none for None.

        Args:
            rewards: Rewards by this judge, by reported name.
            groups: Rollouts, a group for each prompt.
        """
        found = {each: self._judged(groups, each) for each in sorted({rubric.each for rubric in rewards.values()})}
        return [
            [
                {} if rollout is None else {key: found[rubric.each][at][place] for key, rubric in rewards.items()}
                for place, rollout in enumerate(group)
            ]
            for at, group in enumerate(groups)
        ]

    def usage(self) -> dict[str, float]:
        """Return the metrics `judge/<name>/...` since the last call: `requests` (rollouts), `tokens`, `cached`
        (conversations that are equal to another one of their group), `failed`, `cut` (conversations that are longer
        than `max_total_sequence_length`), and `latency` (mean seconds of a rollout)."""
        counts = self._counts
        found = {f"judge/{self._name}/{name}": float(count) for name, count in counts.items()}
        found[f"judge/{self._name}/latency"] = self._seconds / max(counts["requests"], 1)
        self._counts, self._seconds = dict.fromkeys(counts, 0), 0.0
        return found

    def _judged(self, groups: JudgedGroups, each: Each) -> list[list[JudgedReward]]:
        start, counts = time.perf_counter(), self._counts
        read = iter(self._tokenizer.encode([each for group in groups for each in group if each is not None], each))
        encoded = [[_NOTHING if rollout is None else next(read) for rollout in group] for group in groups]
        scores = self._scores(encoded, each)
        rewards = [
            [self._reward(row, own, each) for row, own in zip(group, found, strict=True)]
            for group, found in zip(encoded, scores, strict=True)
        ]
        num_cut = sum(row.num_cut for group in encoded for row in group)
        if num_cut and not self._warned:
            limit, self._warned = self._config.max_total_sequence_length, True
            message = "judges.%s reads only the last %d tokens of longer conversations (max_total_sequence_length)"
            _log.warning(message, self._name, limit)
        counts["requests"] += sum(rollout is not None for group in groups for rollout in group)
        counts["cut"] += num_cut
        self._seconds += time.perf_counter() - start
        return rewards

    def _scores(self, encoded: Sequence[Sequence[EncodedRollout]], each: Each) -> list[list[list[np.ndarray]]]:
        """Return the scores of the rows of each rollout, float32: one of the whole row, or one after each token."""
        rows: list[np.ndarray] = []
        groups: list[int] = []
        places: dict[tuple[int, bytes], int] = {}
        for number, group in enumerate(encoded):
            for row in (row for rollout in group for row in rollout.rows):
                self._counts["tokens"] += len(row)
                if (number, row.tobytes()) in places:
                    self._counts["cached"] += 1
                    continue
                places[number, row.tobytes()] = len(rows)
                rows.append(row)
                groups.append(number)
        found: list[np.ndarray] = []
        if rows:
            batch = Batch({TOKENS: Ragged.from_rows(rows, dtype=np.int32), PREFIX_GROUP: np.array(groups)})
            read = self._model.infer(batch, [SCORES] if each == "rollout" else [VALUES, SCORES])
            last = read.array(SCORES.name)[:, None]
            found = list(last)
            if each != "rollout":
                # The value at a token is the score of the row up to the token before it.
                found = [np.append(row[1:], end) for row, end in zip(read.ragged(VALUES.name), last, strict=True)]
        return [
            [[found[places[number, row.tobytes()]] for row in rollout.rows] for rollout in group]
            for number, group in enumerate(encoded)
        ]

    def _reward(self, rollout: EncodedRollout, scores: Sequence[np.ndarray], each: Each) -> JudgedReward:
        if rollout.failure:
            self._counts["failed"] += rollout is not _NOTHING
            return JudgedReward(None, failure=rollout.failure)
        # A turn has several scores if its steps or tokens are judged.
        is_whole = each == "rollout"
        parts = [
            [float(scores[turn.row][-1 if is_whole else place]) for place in turn.places] for turn in rollout.turns
        ]
        if self._config.as_probability:
            parts = [[1 / (1 + math.exp(-max(score, MIN_LOGIT))) for score in part] for part in parts]
        if not all(math.isfinite(score) for part in parts for score in part):
            self._counts["failed"] += 1
            return JudgedReward(None, failure=f"the score by judges.{self._name} is not finite")
        reduce = _REDUCTIONS[self._config.step_reward]
        values = [part[0] if len(part) == 1 else reduce(part) for part in parts]
        turns = () if is_whole else tuple(values)
        verdicts = tuple(
            {
                "judge": self._name,
                "question": f"turn {number}" if turns else "rollout",
                "answer": " ".join(f"{score:g}" for score in part) if len(part) > 1 else "",
                "value": value,
                "cached": False,
            }
            for number, (part, value) in enumerate(zip(parts, values, strict=True), 1)
        )
        return JudgedReward(math.fsum(values), turns, verdicts=verdicts)


def reward_model_judges(config: JudgesRoot, models: Mapping[str, Model]) -> dict[str, RewardModelJudge]:
    """Return the judges of a run that are reward models, by name.

    Args:
        config: Resolved config of the run.
        models: Models of the run by role.

    Raises:
        ConfigError: If the tokenizer of one cannot be loaded or has no chat template.
    """
    return {
        name: RewardModelJudge(name, models[judge_role(name)], JudgeTokenizer.load(name, settings), settings)
        for name, settings in judge_sections(config).items()
        if isinstance(settings, RewardModelJudgeConfig)
    }
