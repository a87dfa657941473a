"""Grammars over the tokens of a tokenizer: the tokens that may follow those sampled so far.

The grammar is one of xgrammar's structural tags, as JSON. vLLM constrains requests by the same library, so its engine
need not report the sets that it sampled from: they follow from the grammar and the sampled tokens. Other generators
apply the sets to their logits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rl_core.token_filter import packed_set
from rl_core.tokenizer import Tokenizer

MAX_COMPILED_BYTES = 512 * 2**20
"""Maximum memory of the compiled grammars that a process keeps."""


MAX_NESTING = 64
"""Maximum depth of objects and lists in a grammar. xgrammar and vLLM follow them by recursion."""


class TokenGrammars:
    """Grammars over the tokens of one tokenizer; each is compiled once.

    Args:
        tokenizer: Tokenizer of the model that is constrained.

    Raises:
        ImportError: If xgrammar is not installed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        try:
            import xgrammar
        except ImportError as error:
            remedy = "install it with `pip install 'rl-core[grammar]'`, or set structured_output to refuse or ignore"
            raise ImportError(f"a constrained completion needs xgrammar: {remedy}") from error
        # Ids of a padded head beyond the tokenizer's are in no set.
        info: Any = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer))
        self._matcher: Any = xgrammar.GrammarMatcher
        self._eos_token_id = tokenizer.eos_token_id
        self._num_words = -(-info.vocab_size // 32)
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=MAX_COMPILED_BYTES)
        self._compiled = lru_cache(128)(compiler.compile_structural_tag)

    def begin(self, grammar: str, stop_token_ids: Sequence[int]) -> TokenGrammar:
        """Return the state of a completion before its first token.

        Args:
            grammar: A structural tag.
            stop_token_ids: Tokens that may follow a complete text, in addition to the end of sequence. Any token may
                follow one of these.

        Raises:
            ValueError: If the grammar is not valid.
        """
        depth, level = 0, [json.loads(grammar)]
        while level := [each for each in level if isinstance(each, dict | list)]:
            depth += 1
            level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        if depth > MAX_NESTING:
            raise ValueError(f"this form of an answer has objects and lists {depth} deep; at most {MAX_NESTING} may be")
        try:
            compiled = self._compiled(grammar)
        except Exception as error:
            reason = str(error).strip().rpartition("\n")[2]
            raise ValueError(f"this form of an answer cannot be made into a grammar: {reason}") from error
        # vLLM always lets the end of sequence follow a complete text.
        ends = sorted({self._eos_token_id, *stop_token_ids})
        return TokenGrammar(self._matcher(compiled, override_stop_tokens=ends), self._num_words)

    def sets(self, grammar: str, stop_token_ids: Sequence[int], token_ids: np.ndarray) -> tuple[bytes, ...]:
        """Return the allowed tokens at each token of a completion, as `rl_core.token_filter.allowed_row` takes them.

        Args:
            grammar: A structural tag.
            stop_token_ids: See `begin`.
            token_ids: int32 `[tokens]`, sampled.

        Raises:
            ValueError: If the engine sampled a token that the grammar does not allow.
        """
        state, packed, found = self.begin(grammar, stop_token_ids), dict[bytes, bytes](), []
        for token in token_ids.tolist():
            words = state.allowed()
            key = b"" if words is None else words.tobytes()
            if words is not None and key not in packed:
                packed[key] = packed_set(words)
            found.append(packed.get(key, b""))
            state.accept(token)
        return tuple(found)


class TokenGrammar:
    """The state of a grammar after some tokens.

    Args:
        matcher: xgrammar's.
        num_words: Number of words of a set.
    """

    def __init__(self, matcher: Any, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def allowed(self) -> np.ndarray | None:
        """Return int32 `[words]`, a bit for each token id, the lowest first; None if all tokens are allowed."""
        words = np.full((1, self._num_words), -1, np.int32)
        is_limited = not self._matcher.is_terminated() and self._matcher.fill_next_token_bitmask(words)
        return words[0] if is_limited else None

    def accept(self, token: int) -> None:
        """Move on by a token.

        Raises:
            ValueError: If the grammar does not allow it.
        """
        if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
            raise ValueError(f"the engine sampled the token {token}, which the grammar does not allow there")
