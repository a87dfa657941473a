"""One completion while it is being decoded: its tokens, how they are drawn, and its stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from rl_core.rollouts.generation import GenerationRequest, SamplingParams
from rl_core.rollouts.grammar import TokenGrammar
from rl_core.rollouts.rollout import Completion, StopReason, WeightSpan
from rl_core.token_filter import TokenFilter
from rl_core.tokenizer import Tokenizer
from rl_core.torch.heads.logprobs import logprobs_of
from rl_core.torch.kernels.exact import computes_exact_rows

_CONTEXT_TOKENS = 5
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Row:
    """A request, the tokens sampled for it, and the future of its completion.

    Args:
        limit: Maximum number of tokens sampled, by the request and by the context.
        stop_text: None if the request has no stop strings.
        grammar: State of the request's grammar; None if it has none.

    Attributes:
        add_routing: Takes the experts, int16 `[tokens, layers, experts per token]`, that its next tokens were sent to.
    """

    def __init__(
        self, request: GenerationRequest, limit: int, stop_text: StopText | None, grammar: TokenGrammar | None = None
    ) -> None:
        self.request = request
        self._grammar = grammar
        self.future: Future[Completion] = Future()
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._routing: list[np.ndarray] = []
        self.add_routing = self._routing.append
        self.limit = limit
        self._stop_text = stop_text
        self._uniforms = uniforms(request.seed, request.num_sampled + limit)[request.num_sampled :]
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    def token(self, index: int) -> int:
        """Return a token of the prompt or of those sampled after it, by its index."""
        prompt = self.request.token_ids
        return int(prompt[index]) if index < len(prompt) else self.tokens[index - len(prompt)]

    @property
    def allowed(self) -> np.ndarray | None:
        """int32 `[words]`, the tokens that may come next, as `TokenGrammar.allowed` has them; None for all."""
        return None if self._grammar is None else self._grammar.allowed()

    @property
    def uniform(self) -> float:
        """Uniform number that draws the next token."""
        return float(self._uniforms[len(self.tokens)])

    def append(self, token: int, logprob: float, version: int) -> bool:
        """Take a sampled token; True if it ends the completion, which is then handed over."""
        self.tokens.append(token)
        if self._grammar is not None:
            self._grammar.accept(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        stopped = self._stop_text is not None and self._stop_text.append(token)
        if stopped or token in self._stop_token_ids:
            self.end("stop")
        elif len(self.tokens) == self.limit:
            self.end("length")
        else:
            return False
        return True

    def end(self, reason: StopReason) -> None:
        """End the completion with the tokens that it has, which may be none."""
        versions, counts = np.unique(self._versions, return_counts=True)
        completion = Completion(
            token_ids=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            stop_reason=reason,
            spans=tuple(WeightSpan(int(v), int(n)) for v, n in zip(versions, counts, strict=True)),
            routed_experts=np.concatenate(self._routing) if self._routing else None,
        )
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(completion)


def uniforms(seed: int, count: int) -> np.ndarray:
    """Return float64 `[count]` in [0, 1), the draws of a request of this seed in any batch."""
    return np.random.Generator(np.random.Philox(key=seed % 2**128)).random(count)


def draw_next(rows: Sequence[Row], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next token of each row and its processed logprob, among the tokens that its grammar allows.

    Args:
        rows: Rows that are decoded.
        logits: `[rows, vocab]`.

    Returns:
        int64 `[rows]` and float32 `[rows]`.
    """
    sets = {index: words for index, row in enumerate(rows) if (words := row.allowed) is not None}
    if sets:
        logits = logits.float().clone()
    for index, words in sets.items():
        is_allowed = np.zeros(logits.shape[1], bool)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(is_allowed)]
        is_allowed[: len(bits)] = bits
        logits[index].masked_fill_(torch.from_numpy(~is_allowed).to(logits.device), -torch.inf)
    return draw(logits, [row.request.sampling for row in rows], [row.uniform for row in rows])


def draw(logits: Tensor, sampling: Sequence[SamplingParams], uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return one token per row and its processed logprob.

    A row of temperature 0 takes the most likely token; its logprob is that at temperature 1, unfiltered.

    Args:
        logits: `[rows, vocab]`; -inf for a token that must not be drawn.
        sampling: Sampling parameters of each row.
        uniform: Per row, the number in [0, 1) that picks from the cumulative distribution.

    Returns:
        int64 `[rows]` and float32 `[rows]`.
    """
    logprobs = processed_logprobs(logits, sampling)
    # In float64 the last bits of the logits, which depend on the batch, hardly ever move a token.
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    total = cumulative[:, -1:]
    threshold = torch.tensor(uniform, dtype=torch.float64, device=logits.device)[:, None] * total
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    if any(params.temperature == 0 for params in sampling):
        greedy = torch.tensor([[params.temperature == 0] for params in sampling], device=logits.device)
        tokens = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), tokens)
    tokens = tokens[:, 0]
    if computes_exact_rows():
        return tokens, _trained_logprobs(logits, tokens, sampling)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _trained_logprobs(logits: Tensor, tokens: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Return float32 `[rows]`, the logprobs of drawn tokens by the operations that the trainer reads them by."""
    alike: dict[tuple[float, TokenFilter | None], list[int]] = {}
    for index, params in enumerate(sampling):
        kept = TokenFilter(params.top_k, params.top_p, params.min_p)
        is_plain = kept.keeps_all or params.temperature == 0
        alike.setdefault((params.temperature or 1.0, None if is_plain else kept), []).append(index)
    found = logits.new_empty(len(logits), dtype=torch.float32)
    for (temperature, token_filter), indices in alike.items():
        found[indices] = logprobs_of(logits[indices].float(), tokens[indices], temperature, token_filter)
    return found


def processed_logprobs(logits: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
    """Return float32 `[rows, vocab]`, logprobs after temperature, min-p, top-k and top-p, in this order; -inf for
    tokens filtered out."""
    scaled = logits.float()
    if any(params.temperature not in (0, 1) for params in sampling):
        scaled = scaled / _column([params.temperature or 1.0 for params in sampling], logits)
    if any((params.top_k, params.top_p, params.min_p) != (0, 1.0, 0.0) for params in sampling if params.temperature):
        filters = [
            TokenFilter(params.top_k, params.top_p, params.min_p) if params.temperature > 0 else TokenFilter()
            for params in sampling
        ]
        scaled = _filter(scaled, filters)
    return scaled.log_softmax(dim=-1)


def _filter(scaled: Tensor, filters: Sequence[TokenFilter]) -> Tensor:
    """Give -inf to tokens that the filters leave out; ties with the k-th and the most likely token stay."""
    vocab = scaled.shape[-1]
    top_k = [min(each.top_k or vocab, vocab) for each in filters]
    top_p = _column([each.top_p for each in filters], scaled)
    if any(each.min_p for each in filters):
        min_p = _column([each.min_p for each in filters], scaled)
        scaled = scaled.masked_fill(scaled < scaled.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)
    ascending, order = scaled.sort(dim=-1, stable=True)
    last = torch.tensor([[vocab - k] for k in top_k], device=scaled.device)
    ascending = ascending.masked_fill(ascending < ascending.gather(1, last), -torch.inf)
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    outside = (below <= 1 - top_p) & (top_p < 1)
    outside[:, -1] = False
    ascending = ascending.masked_fill(outside, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, ascending)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


class StopText:
    """The text of one completion so far, decoded token by token, and whether a stop string has appeared in it.

    A token's text can depend on those before it, and a character can span tokens, so each is decoded together with the
    last finished piece of text, and the difference is what it adds.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], prompt: np.ndarray) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._tokens = [int(token) for token in prompt[-_CONTEXT_TOKENS:]]
        self._start = 0
        self._read = len(self._tokens)
        self._tail = ""
        self._keep = max(map(len, stop_strings)) - 1

    def append(self, token: int) -> bool:
        """Return whether a stop string is complete with this token."""
        self._tokens.append(token)
        known, text = (
            self._tokenizer.decode(tokens, skip_special_tokens=False)
            for tokens in (self._tokens[self._start : self._read], self._tokens[self._start :])
        )
        if len(text) <= len(known) or text.endswith(_INCOMPLETE):
            return False
        self._start, self._read = self._read, len(self._tokens)
        window = self._tail + text[len(known) :]
        self._tail = window[-self._keep :] if self._keep else ""
        return any(stop in window for stop in self._stop_strings)
