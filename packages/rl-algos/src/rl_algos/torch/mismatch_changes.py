"""Changes of sampling, tokens, weights, config and precision that may explain a mismatch, each tried alone."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_algos.rollouts.mismatch import MismatchCase, TriedChange, mean_difference
from rl_algos.torch.mismatch import Logits, MismatchModel, Scored, attending

_log = logging.getLogger(__name__)

Change = Callable[[MismatchModel], Iterator[TriedChange]]

TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
TOP_K = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 256, 512, 1000)
MIN_P = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Usual values of filters, tried in addition to the fitted one."""

FAMILY_ERRORS = (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of a family's code for a change that it does not have."""

SIZES = ("_size", "_dim", "_id", "_ids", "_rank", "_range", "_dropout", "_heads", "_layers", "_experts", "_version")
"""Ends of names of fields that are sizes of weights or have no effect on logprobs."""


def fitted(values: Sequence[float], score: Callable[[Sequence[float]], Sequence[float]], rounds: int = 4) -> float:
    """Return the value with the lowest score, by a grid that shrinks around it.

    Args:
        values: First grid, positive and increasing.
        score: Function from values to their scores.
        rounds: Number of further grids.
    """
    grid = list(values)
    for number in range(rounds + 1):
        found = list(score(grid))
        place = int(np.argmin(found))
        best = grid[place]
        if number == rounds:
            break
        low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        grid = sorted({best, *np.geomspace(low, high, 7).tolist()})
    # A round number is meant if it is as good.
    rounded = [float(f"{best:.{digits}g}") for digits in (1, 2, 3)]
    scores = list(score([*rounded, best]))
    return next((value for value, each in zip(rounded, scores, strict=False) if each <= 1.05 * scores[-1]), best)


def _several(reference: MismatchModel, functions: Sequence[Logits], rows: Sequence[Scored] | None = None) -> np.ndarray:
    """Return float64 `[functions, sampled]` from one pass over the rows."""
    with torch.inference_mode():
        parts = [
            np.stack([function(logits, ids).double().cpu().numpy() for function in functions])
            for logits, ids in reference.passes(rows=rows)
        ]
    return np.concatenate(parts, 1)


def _off(reference: MismatchModel, found: np.ndarray) -> list[float]:
    return [mean_difference(each, reference.target[: len(each)]) for each in found]


def temperature(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change the temperature."""
    grid = [round(float(each), 4) for each in np.geomspace(0.1, 4, 22)]

    def score(values: Sequence[float]) -> list[float]:
        return _off(reference, _several(reference, [reference.sampling(temperature=value) for value in values]))

    configured = reference.case.temperature
    for value, count in {1.0: 0, fitted(grid, score): 1}.items():
        if value != configured:
            found = reference.logprobs(logits=reference.sampling(temperature=value))
            yield from reference.attempt(
                "temperature", f"temperature {value:g} instead of {configured:g}", found, fitted=count
            )


def filters(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change the filter of tokens: other limits, none, or another order."""
    case = reference.case
    configured = {"top_p": case.top_p, "top_k": case.top_k, "min_p": case.min_p}
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    fits = _fitted_filters(reference)
    for name, usual in {"top_p": TOP_P, "top_k": TOP_K, "min_p": MIN_P}.items():
        tried = [each for each in dict.fromkeys((off[name], *usual, *fits.get(name, ()))) if each != configured[name]]
        found = _several(reference, [reference.sampling(**{name: value}) for value in tried])
        best = int(np.argmin(_off(reference, found)))
        was = configured[name]
        for place in dict.fromkeys((best, 0)):
            value = tried[place]
            detail = f"{name}={value:.4g} instead of {was:g}" if value != off[name] else f"no {name} instead of {was:g}"
            is_free = value == off[name] or value in usual
            yield from reference.attempt(name, detail, found[place], fitted=0 if is_free else 1)
    if configured != off:
        found = reference.logprobs(logits=reference.sampling(**off))
        yield from reference.attempt("filter", "logprobs over all tokens, without the sampler's filter", found)
        if case.temperature != 1:
            found = reference.logprobs(logits=reference.sampling(filters_first=True))
            yield from reference.attempt("filter", "a filter that is applied before the temperature", found)
            found = reference.logprobs(logits=reference.sampling(**off, temperature=1.0))
            yield from reference.attempt("filter", "logprobs before temperature and filter", found)


def _fitted_filters(reference: MismatchModel) -> dict[str, list[float]]:
    """Return the limits that the logprobs of the side that is off imply: with u the logprob over all tokens, the tokens
    that were kept have the mass exp(u - logprob)."""
    heat = reference.case.temperature
    found: dict[str, list[float]] = {"top_p": [], "top_k": [], "min_p": []}
    start = 0
    with torch.inference_mode():
        for logits, ids in reference.passes():
            end = start + len(ids)
            target = torch.from_numpy(reference.target[start:end]).to(logits.device)
            start = end
            logprobs = (logits / heat).double().log_softmax(-1)
            mass = (logprobs.gather(1, ids[:, None])[:, 0] - target).exp()
            falling = logprobs.sort(descending=True).values.exp()
            held = falling.cumsum(1)
            last = (held - mass[:, None]).abs().argmin(1)
            is_cut = (mass < 0.9999) & (mass > 0)
            found["top_p"] += mass[is_cut].tolist()
            found["top_k"] += (last[is_cut] + 1).double().tolist()
            kept = falling.gather(1, last[:, None])[:, 0] / falling[:, 0]
            found["min_p"] += kept[is_cut].tolist()
    limits = {}
    for name, values in found.items():
        if values:
            smallest = [float(np.quantile(values, share)) for share in (0.0, 0.02, 0.1)]
            limits[name] = [float(np.median(values))] if name == "top_k" else [each * (1 - 1e-6) for each in smallest]
    return {
        name: [int(each) for each in values] if name == "top_k" else [min(each, 1.0) for each in values]
        for name, values in limits.items()
    }


def penalties(reference: MismatchModel) -> Iterator[TriedChange]:
    """Penalise the tokens of the row so far."""
    written = _generation_config(reference)
    seen = _seen(reference)
    usual_sums = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0)
    kinds: Mapping[str, tuple[Sequence[float], Callable[[float, Tensor, Tensor], Tensor]]] = {
        "repetition_penalty": (
            (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5),
            lambda value, logits, has: torch.where(
                has > 0, torch.where(logits > 0, logits / value, logits * value), logits
            ),
        ),
        "presence_penalty": (usual_sums, lambda value, logits, has: logits - value * (has > 0)),
        "frequency_penalty": (usual_sums, lambda value, logits, has: logits - value * has),
    }
    for name, (usual, change) in kinds.items():
        own = written.get(name)
        tried = [*([float(own)] if isinstance(own, int | float) and own not in (0, 1) else ()), *usual]
        for whose, counts in seen.items():
            found = _counted(reference, counts, [partial(change, value) for value in tried])
            best = int(np.argmin(_off(reference, found)))
            detail = f"{name}={tried[best]:g} on the tokens of the {whose}"
            yield from reference.attempt("penalty", detail, found[best], fitted=1)


def _seen(reference: MismatchModel) -> dict[str, list[Tensor]]:
    """Return the ids before each sampled token: of the whole row, and of its completion."""
    whole, completion = [], []
    for row in reference.scored:
        first = int(row.places[0]) if len(row.places) else 0
        for place in row.places.tolist():
            whole.append(row.tokens[:place])
            completion.append(row.tokens[first:place])
    return {"row": whole, "completion": completion}


def _counted(
    reference: MismatchModel, seen: Sequence[Tensor], changes: Sequence[Callable[[Tensor, Tensor], Tensor]]
) -> np.ndarray:
    place, sampling, parts = 0, reference.sampling(), []
    with torch.inference_mode():
        for logits, ids in reference.passes():
            counts = torch.zeros_like(logits)
            for number in range(len(ids)):
                before = seen[place + number].to(logits.device)
                counts[number].index_add_(0, before, torch.ones(len(before), device=logits.device))
            place += len(ids)
            parts.append(np.stack([sampling(each(logits, counts), ids).double().cpu().numpy() for each in changes]))
    return np.concatenate(parts, 1)


def _generation_config(reference: MismatchModel) -> Mapping[str, Any]:
    path = Path(reference.case.model) / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def left_out(reference: MismatchModel) -> Iterator[TriedChange]:
    """Leave tokens out of the distribution, or count the padding of the vocabulary."""
    tokenizer, sampling = reference.tokenizer, reference.sampling()
    sets = {f"without the end token {each}": [each] for each in _ends(reference)}
    if tokenizer is not None:
        sets["without special tokens"] = sorted(tokenizer.all_special_ids)
    for detail, ids in sets.items():

        def masked(logits: Tensor, own: Tensor, ids: Sequence[int] = ids) -> Tensor:
            without = logits.clone()
            known = [each for each in ids if each < logits.shape[1]]
            without[:, known] = -torch.inf
            without.scatter_(1, own[:, None], logits.gather(1, own[:, None]))
            return sampling(without, own)

        yield from reference.attempt("forbidden", detail, reference.logprobs(logits=masked))
    size = int(reference.module.get_output_embeddings().weight.shape[0])
    if tokenizer is not None and len(tokenizer) < size:

        def known(logits: Tensor, own: Tensor) -> Tensor:
            return sampling(logits[:, : max(len(tokenizer), int(own.max()) + 1)], own)

        detail = f"logits of the {size - len(tokenizer)} ids without a token are left out"
        yield from reference.attempt("vocabulary", detail, reference.logprobs(logits=known))
    for multiple in (64, 128, 256, 512):
        if extra := -size % multiple:

            def more(logits: Tensor, own: Tensor, extra: int = extra) -> Tensor:
                return sampling(nn.functional.pad(logits, (0, extra)), own)

            detail = f"the vocabulary is padded to {size + extra} with logits of 0"
            yield from reference.attempt("vocabulary", detail, reference.logprobs(logits=more))


def _ends(reference: MismatchModel) -> list[int]:
    """Return ids of tokens that may end a turn."""
    found: list[Any] = []
    for source in (_generation_config(reference), reference.module.config.to_dict()):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    if reference.tokenizer is not None:
        found += [reference.tokenizer.eos_token_id, *reference.tokenizer.all_special_ids]
    size = int(reference.module.get_output_embeddings().weight.shape[0])
    return [each for each in dict.fromkeys(found) if isinstance(each, int) and 0 <= each < size][:32]


def tokens(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change the tokens: the prompt as another template writes it, another end, or another tokenisation."""
    base, row_of = reference.base, reference.row_of
    is_last, is_first = np.append(np.diff(row_of) > 0, True), np.insert(np.diff(row_of) > 0, 0, True)
    neighbours = {
        "after": np.where(is_last, base, np.roll(base, -1)),
        "before": np.where(is_first, base, np.roll(base, 1)),
    }
    for which, found in neighbours.items():
        yield from reference.attempt("shift", f"each logprob belongs to the token {which}", found)
    ends = {end: [_with_end(each, end) for each in reference.scored] for end in _ends(reference)}
    scores = {end: _off(reference, reference.logprobs(rows=rows)[None])[0] for end, rows in ends.items()}
    if ends:
        best = min(scores, key=lambda end: scores[end])
        found = reference.logprobs(rows=ends[best])
        yield from reference.attempt("end", f"rows that end with token {best}", found, fitted=1)
    tried: dict[str, list[Scored] | None] = {
        detail: _edited(reference, edit) for detail, edit in _prompt_edits(reference).items()
    }
    for detail, options in {
        "the chat template of the tokenizer": {"add_generation_prompt": True},
        "a chat template without the mark of the next turn": {"add_generation_prompt": False},
        "a chat template without thoughts": {"add_generation_prompt": True, "enable_thinking": False},
    }.items():
        tried[detail] = _rendered(reference, options)
    for detail, rows in tried.items():
        if rows is not None:
            yield from reference.attempt("prompt", detail, reference.logprobs(rows=rows))
    if (rows := _retokenised(reference)) is not None:
        found = reference.logprobs(rows=rows)
        yield from reference.attempt("retokenised", "rows whose text is tokenised anew", found)


PromptEdit = Callable[[list[int]], list[int]]


def _prompt_edits(reference: MismatchModel) -> dict[str, PromptEdit]:
    """Return edits of prompts, by their words: tokens that are missing, and white space that a template adds."""
    tokenizer = reference.tokenizer
    found: dict[str, PromptEdit] = {
        "a prompt without its first token": lambda ids: ids[1:],
        "a prompt without its last token": lambda ids: ids[:-1],
    }
    if tokenizer is None:
        return found
    if tokenizer.bos_token_id is not None:
        found["a prompt with one more beginning-of-sequence token"] = partial(_inserted, [tokenizer.bos_token_id], 0)
    prompts = [row.tokens[: int(row.places[0])].tolist() for row in reference.few if len(row.places)]
    special = sorted(set(tokenizer.all_special_ids) & {token for prompt in prompts for token in prompt})
    for text in (" ", "\n", "\n\n", "\t"):
        added = tokenizer.encode(text, add_special_tokens=False)
        if not added:
            continue
        found[f"a prompt with {text!r} after it"] = lambda ids, more=added: [*ids, *more]  # type: ignore[misc]
        found[f"a prompt with {text!r} before it"] = partial(_inserted, added, 0)
        for token in special[:16]:
            name = tokenizer.convert_ids_to_tokens(token)
            found[f"a prompt with {text!r} before each {name}"] = partial(_around, added, token, is_before=True)
            found[f"a prompt with {text!r} after each {name}"] = partial(_around, added, token, is_before=False)
    edits: Mapping[str, Callable[[str], str]] = {
        "a prompt whose text is tokenised anew": str,
        "a prompt without white space at its end": str.rstrip,
        "a prompt with a space at its end, tokenised anew": "{} ".format,
        "a prompt with a line break at its end, tokenised anew": "{}\n".format,
    }
    for detail, edit in edits.items():
        found[detail] = partial(_tokenised, tokenizer, edit)
    return found


def _inserted(added: list[int], place: int, ids: list[int]) -> list[int]:
    return [*ids[:place], *added, *ids[place:]]


def _around(added: list[int], token: int, ids: list[int], *, is_before: bool) -> list[int]:
    pair = [*added, token] if is_before else [token, *added]
    return [new for each in ids for new in (pair if each == token else [each])]


def _tokenised(tokenizer: Any, edit: Callable[[str], str], ids: list[int]) -> list[int]:
    new: list[int] = tokenizer.encode(edit(tokenizer.decode(ids)), add_special_tokens=False)
    return new


def _with_end(row: Scored, end: int) -> Scored:
    """Return a row whose turns end with another token."""
    ids = row.tokens.clone()
    is_last = torch.ones(len(row.places), dtype=torch.bool)
    is_last[:-1] = row.places.diff() > 1
    ids[row.places[is_last]] = end
    return Scored(ids, row.places)


def _edited(reference: MismatchModel, edit: Callable[[list[int]], list[int]]) -> list[Scored] | None:
    """Return the rows with an edited prompt; None if the edit changes none."""
    rows, is_changed = [], False
    for row in reference.scored:
        first = int(row.places[0]) if len(row.places) else len(row.tokens)
        prompt = row.tokens[:first].tolist()
        edited = edit(prompt)
        if not edited:
            return None
        is_changed |= edited != prompt
        ids = torch.cat([torch.tensor(edited, dtype=torch.int64), row.tokens[first:]])
        rows.append(Scored(ids, row.places + len(edited) - first))
    return rows if is_changed else None


def _rendered(reference: MismatchModel, options: Mapping[str, Any]) -> list[Scored] | None:
    """Return the rows with the prompt that the tokenizer's own template writes."""
    prompts, tokenizer = reference.rows.prompts, reference.tokenizer
    if len(prompts) != len(reference.scored) or not all(prompts) or not tokenizer.chat_template:
        return None
    remaining = iter(prompts)

    def rendered(_: list[int]) -> list[int]:
        text = tokenizer.apply_chat_template(list(map(dict, next(remaining))), tokenize=False, **options)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return _edited(reference, rendered)


def _retokenised(reference: MismatchModel) -> list[Scored] | None:
    """Return the rows with the tokens of their text, if each sampled token is still there."""
    rows, is_changed = [], False
    for row in reference.scored:
        old = row.tokens.tolist()
        new = reference.tokenizer.encode(reference.tokenizer.decode(old), add_special_tokens=False)
        places = {_length(reference.tokenizer, new[:end]): end - 1 for end in range(1, len(new) + 1)}
        own = [places.get(_length(reference.tokenizer, old[: place + 1])) for place in row.places.tolist()]
        if None in own or 0 in own:
            rows.append(row)
            continue
        is_changed |= old != new
        rows.append(Scored(torch.tensor(new, dtype=torch.int64), torch.tensor(own, dtype=torch.int64)))
    return rows if is_changed else None


def _length(tokenizer: Any, ids: Sequence[int]) -> int:
    return len(tokenizer.decode(ids))


def older_weights(reference: MismatchModel) -> Iterator[TriedChange]:
    """Take weights that the policy had before: everywhere, for the prompt only, or in a part of the model."""
    case = reference.case
    stale = "adapter" if case.has_adapters else "stale"
    for number, weights in enumerate(case.older):
        other = reference.load(weights.folder)
        held = other.state_dict()
        own = reference.module.state_dict()
        changed = [name for name, tensor in own.items() if name in held and not torch.equal(tensor, held[name])]
        if not changed:
            continue
        what = "no adapter, only the weights below it" if case.has_adapters and weights.is_base else weights.label
        yield from reference.attempt(stale, what, reference.logprobs(other), by_row=True)
        for detail, size in {"the whole prompt": 1, "whole blocks of 16 tokens of the prompt": 16}.items():
            found = _with_prefix(reference, other, size)
            if found is not None:
                text = f"keys and values of {detail} are from {weights.label}"
                yield from reference.attempt("prefix_cache", text, found, by_row=True)
        if number and not weights.is_base:
            continue
        parts = _parts(changed)
        for part, names in parts.items():
            if len(names) < len(changed):
                with _replaced(reference.module, {name: held[name] for name in names}):
                    found = reference.logprobs()
                yield from reference.attempt("stale_part", f"{part} of {weights.label}", found, by_row=True)
        yield from _stale_head(reference, other, weights.label)
        if case.has_adapters and weights.is_base:
            yield from _scaled_adapter(reference, held, changed)


def _parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Return names of weights by the layer, and by the kind, that they belong to."""
    found: dict[str, list[str]] = {}
    for name in names:
        words = name.split(".")
        number = next((word for word in words if word.isdigit()), None)
        kind = ".".join(word for word in words[-3:-1] if not word.isdigit()) if number else name
        for part in ([f"layer {number}"] if number else []) + [kind]:
            found.setdefault(part, []).append(name)
    return found


@contextmanager
def _replaced(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give weights of a model other values."""
    held = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    own = {name: held[name].data for name in tensors}
    try:
        for name, tensor in tensors.items():
            held[name].data = tensor
        yield
    finally:
        for name, tensor in own.items():
            held[name].data = tensor


def _stale_head(reference: MismatchModel, other: PreTrainedModel, label: str) -> Iterator[TriedChange]:
    head, embedding = reference.module.get_output_embeddings(), reference.module.get_input_embeddings()
    if head.weight is not embedding.weight:
        return
    with _head_of(reference, other.get_output_embeddings().weight):
        yield from reference.attempt(
            "tied_head", f"a head that is not tied to the embedding, of {label}", reference.logprobs(), by_row=True
        )


@contextmanager
def _head_of(reference: MismatchModel, weight: Tensor) -> Iterator[None]:
    head = reference.module.get_output_embeddings()
    own = head.weight
    head.weight = nn.Parameter(weight, requires_grad=False)
    try:
        yield
    finally:
        head.weight = own


def _scaled_adapter(
    reference: MismatchModel, base: Mapping[str, Tensor], names: Sequence[str]
) -> Iterator[TriedChange]:
    """Scale the difference from the weights below the adapter."""
    own = reference.module.state_dict()

    def found(factor: float, rows: Sequence[Scored] | None = None) -> np.ndarray:
        scaled = {
            name: (base[name].float() + factor * (own[name].float() - base[name].float())).to(own[name].dtype)
            for name in names
        }
        with _replaced(reference.module, scaled):
            return reference.logprobs(rows=rows)

    grid = [0.03125, 0.0625, 0.125, 0.25, 0.5, 0.7, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0]
    factor = fitted(grid, lambda values: [_off(reference, found(value, reference.few)[None])[0] for value in values])
    if abs(factor - 1) > 0.01:
        yield from reference.attempt("adapter_scale", f"adapters scaled by {factor:.4g}", found(factor), fitted=1)


@torch.inference_mode()
def _with_prefix(reference: MismatchModel, other: PreTrainedModel, size: int) -> np.ndarray | None:
    """Return logprobs with keys and values of the prompt from another model; None if no row has a prefix."""
    from transformers import DynamicCache

    sampling, found, any_prefix = reference.sampling(), [], False
    for row in reference.scored:
        first = int(row.places[0]) if len(row.places) else 0
        prefix = (first - 1) // size * size
        ids = row.tokens[None].to(reference.device)
        if prefix <= 0:
            logits = reference.module(input_ids=ids, use_cache=False).logits[0]
            start = 0
        else:
            any_prefix = True
            cache = DynamicCache(config=reference.module.config)
            other(input_ids=ids[:, :prefix], past_key_values=cache, use_cache=True)
            logits = reference.module(input_ids=ids[:, prefix:], past_key_values=cache, use_cache=True).logits[0]
            start = prefix
        places = row.places.to(reference.device)
        found.append(sampling(logits[places - 1 - start].float(), ids[0, places]).double().cpu().numpy())
    return np.concatenate(found) if any_prefix else None


def missing(reference: MismatchModel) -> Iterator[TriedChange]:
    """Leave weights out: biases, norms, a layer; or take them in another order."""
    module = reference.module
    kinds: dict[str, list[str]] = {}
    for name, tensor in module.named_parameters():
        last = ".".join(word for word in name.split(".")[-2:] if not word.isdigit())
        if name.endswith("bias") or (tensor.ndim == 1 and "norm" in name.lower()):
            kinds.setdefault(last, []).append(name)
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    for name in held:
        if name.endswith("e_score_correction_bias"):
            kinds.setdefault("e_score_correction_bias", []).append(name)
    for kind, names in kinds.items():
        changes: dict[str, Callable[[Tensor], Tensor]] = {f"{kind} is missing": torch.zeros_like}
        if not kind.endswith("bias"):
            changes = {
                f"{kind} is missing": torch.ones_like,
                f"1 is added to {kind}": lambda tensor: tensor + 1,
                f"1 is taken from {kind}": lambda tensor: tensor - 1,
            }
        for detail, change in changes.items():
            with _replaced(module, {name: change(held[name].data) for name in names}):
                found = reference.logprobs()
            cause = "router" if "correction" in kind or "gate" in kind or "router" in kind else "missing"
            yield from reference.attempt(cause, detail, found)
    # The layers are found by their name: families share it.
    body: Any = getattr(module, module.base_model_prefix)
    layers = body.layers
    for number in range(len(layers)):
        body.layers = nn.ModuleList([each for place, each in enumerate(layers) if place != number])
        try:
            found = reference.logprobs()
        except FAMILY_ERRORS:
            continue
        finally:
            body.layers = layers
        yield from reference.attempt("missing", f"layer {number} is missing", found)
    yield from _orders(reference, held)


def _orders(reference: MismatchModel, held: Mapping[str, Tensor]) -> Iterator[TriedChange]:
    size = getattr(reference.module.config, "head_dim", None)
    rotated = [name for name in held if name.split(".")[-2:-1] in (["q_proj"], ["k_proj"])]
    if size and rotated:
        orders = {"halves are read as pairs": (2, size // 2), "pairs are read as halves": (size // 2, 2)}
        for detail, shape in orders.items():
            changed = {
                name: held[name].data.unflatten(0, (-1, *shape)).transpose(1, 2).flatten(0, 2) for name in rotated
            }
            with _replaced(reference.module, changed):
                found = reference.logprobs()
            yield from reference.attempt("layout", f"rows of q_proj and k_proj: {detail}", found)
    gates = {name: name.replace("gate_proj", "up_proj") for name in held if "gate_proj" in name}
    swapped = {name: held[other].data for name, other in gates.items() if other in held}
    swapped |= {other: held[name].data for name, other in gates.items() if other in held}
    if swapped:
        with _replaced(reference.module, swapped):
            found = reference.logprobs()
        yield from reference.attempt("layout", "gate_proj and up_proj are swapped", found)


def tied_head(reference: MismatchModel) -> Iterator[TriedChange]:
    """Tie the head to the embedding, or take the head of the files that the config leaves out."""
    head, embedding = reference.module.get_output_embeddings(), reference.module.get_input_embeddings()
    if head.weight.data_ptr() != embedding.weight.data_ptr():
        if head.weight.shape == embedding.weight.shape:
            with _head_of(reference, embedding.weight):
                yield from reference.attempt("tied_head", "a head that is tied to the embedding", reference.logprobs())
        return
    for path in sorted(Path(reference.case.model).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if "lm_head.weight" in file.keys():  # noqa: SIM118 - the file is not a mapping
                weight = file.get_tensor("lm_head.weight").to(reference.device, reference.dtype)
                with _head_of(reference, weight):
                    detail = "the separate head that the files have"
                    yield from reference.attempt("tied_head", detail, reference.logprobs())


def _rope(config: Any) -> tuple[dict[str, Any], bool]:
    """Return the parameters of rotary embeddings, and whether they are by the type of layer."""
    held = dict(getattr(config, "rope_parameters", None) or {})
    return held, bool(held) and all(isinstance(each, Mapping) for each in held.values())


def _with_rope(reference: MismatchModel, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> PreTrainedModel:
    held, is_by_type = _rope(reference.module.config)
    new = {name: dict(change(each)) for name, each in held.items()} if is_by_type else dict(change(held))
    return reference.rebuilt(rope_parameters=new)


def _with_fields(fields: Mapping[str, Any], _: Mapping[str, Any]) -> Mapping[str, Any]:
    return fields


def rotary(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change theta and the scaling of rotary embeddings."""
    held, is_by_type = _rope(reference.module.config)
    if not held:
        return
    first = next(iter(held.values())) if is_by_type else held
    theta, kind = float(first.get("rope_theta", 10000.0)), first.get("rope_type", "default")

    def at(value: float, rows: Sequence[Scored] | None = None) -> np.ndarray:
        module = _with_rope(reference, lambda each: {**each, "rope_theta": value})
        return reference.logprobs(module, rows=rows)

    def score(values: Sequence[float]) -> list[float]:
        return [_off(reference, at(value, reference.few)[None])[0] for value in values]

    grid = sorted({100.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7, theta})
    value = fitted(grid, score, rounds=3)
    if not math.isclose(value, theta, rel_tol=1e-3):
        is_usual = value in grid
        yield from reference.attempt(
            "rope_theta", f"rope_theta {value:g} instead of {theta:g}", at(value), fitted=0 if is_usual else 1
        )
    size = int(getattr(reference.module.config, "max_position_embeddings", 0) or 4096)
    original = int(first.get("original_max_position_embeddings") or size)
    kinds: list[tuple[str, dict[str, Any]]] = [("none", {"rope_type": "default", "rope_theta": theta})]
    for factor in (0.5, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0):
        kinds.append((f"linear, factor {factor:g}", {"rope_type": "linear", "factor": factor}))
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        kinds.append((f"yarn, factor {factor:g}", yarn))
        bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
        kinds.append((f"llama3, factor {factor:g}", {"rope_type": "llama3", "factor": factor, **bounds}))
    for detail, fields in kinds:
        if kind == "default" and detail == "none":
            continue
        try:
            kept = {"rope_theta": theta, **{k: v for k, v in first.items() if k == "partial_rotary_factor"}}
            module = _with_rope(reference, partial(_with_fields, {**kept, **fields}))
            found = reference.logprobs(module)
        except FAMILY_ERRORS:
            continue
        yield from reference.attempt("rope_scaling", f"scaling {detail} instead of {kind}", found)


def config_fields(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change fields of the config: epsilons, routers, activations, and any that differs from its default."""
    config = reference.module.config
    fields = {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, bool | int | float | str) or value is None
    }
    try:
        defaults = type(config)().to_dict()
    except FAMILY_ERRORS:
        defaults = {}
    for name, value in fields.items():
        is_epsilon = name.endswith("eps") or "epsilon" in name
        is_router = any(word in name for word in ("expert", "topk", "router", "routed", "n_group", "scoring_func"))
        cause = "norm_epsilon" if is_epsilon else "router" if is_router else "config"
        if is_epsilon and isinstance(value, float):
            yield from _epsilon(reference, name, value)
            continue
        tried: list[Any] = []
        if name in ("num_experts_per_tok", "topk_group", "num_experts_per_token", "moe_topk") and isinstance(
            value, int
        ):
            tried = [each for each in (value - 1, value + 1, 2 * value, 1) if each > 0 and each != value]
        elif name in ("hidden_act", "hidden_activation", "activation_function"):
            tried = [each for each in ("silu", "gelu", "gelu_pytorch_tanh", "relu") if each != value]
        elif isinstance(value, bool):
            tried = [not value]
        elif name == "scoring_func":
            tried = [{"softmax": "sigmoid"}.get(str(value), "softmax")]
        elif name.endswith(SIZES) or name in ("model_type", "dtype", "torch_dtype", "max_position_embeddings"):
            continue
        elif name in defaults and defaults[name] != value:
            tried = [defaults[name]]
        if isinstance(value, float) and not isinstance(value, bool) and value not in (0.0, 1.0):
            tried.append(1.0)
        if "softcapping" in name:
            tried += [each for each in (None, 15.0, 30.0, 50.0) if each != value]
        for other in dict.fromkeys(tried):
            if name in ("use_cache", "tie_word_embeddings", "return_dict", "output_attentions", "output_hidden_states"):
                continue
            try:
                found = reference.logprobs(reference.rebuilt(**{name: other}))
            except FAMILY_ERRORS:
                continue
            yield from reference.attempt(cause, f"{name} {other} instead of {value}", found)


def _epsilon(reference: MismatchModel, name: str, value: float) -> Iterator[TriedChange]:
    def at(epsilon: float, rows: Sequence[Scored] | None = None) -> np.ndarray:
        return reference.logprobs(reference.rebuilt(**{name: epsilon}), rows=rows)

    grid = [1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1]
    found = fitted(grid, lambda values: [_off(reference, at(each, reference.few)[None])[0] for each in values], 3)
    if not math.isclose(found, value, rel_tol=0.01):
        detail = f"{name} {found:.3g} instead of {value:g}"
        yield from reference.attempt("norm_epsilon", detail, at(found), fitted=0 if found in grid else 1)


def attention(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change the scale of attention and its window, and the dtype of its inputs."""

    def score(values: Sequence[float]) -> list[float]:
        found = []
        for value in values:
            with attending(factor=value):
                found.append(_off(reference, reference.logprobs(rows=reference.few)[None])[0])
        return found

    factor = fitted([0.0625, 0.125, 0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 4.0, 8.0, 16.0], score, rounds=3)
    if abs(factor - 1) > 0.01:
        with attending(factor=factor):
            found = reference.logprobs()
        yield from reference.attempt("attention", f"scores multiplied by {factor:.4g}", found, fitted=1)
    own = getattr(reference.module.config, "sliding_window", None)
    longest = max(len(each.tokens) for each in reference.scored)
    windows = [
        each for each in (0, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if each < longest and each != own
    ]
    for window in windows if own or len(windows) > 1 else ():
        if not window and not own:
            continue
        with attending(window=window):
            found = reference.logprobs()
        detail = f"a window of {window} tokens" if window else f"no window instead of {own} tokens"
        yield from reference.attempt("attention", detail, found, fitted=1 if window else 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for of_cache in (True, False):
            if dtype == reference.dtype:
                continue
            with attending(dtype=dtype, of_cache=of_cache):
                found = reference.logprobs()
            what = "keys and values" if of_cache else "queries, keys and values"
            yield from reference.attempt("attention_dtype", f"{what} in {_short(dtype)}", found)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def precision(reference: MismatchModel) -> Iterator[TriedChange]:
    """Change dtypes: of the head, the router, the weights, the whole model."""
    own = reference.dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype != own or reference.dtype != torch.float32:
            with reference.heading(dtype):
                found = reference.logprobs()
            yield from reference.attempt("head_dtype", f"a head in {_short(dtype)}", found)
    with reference.heading(None, round_logits=True):
        found = reference.logprobs()
    yield from reference.attempt("head_dtype", "logits rounded to bfloat16", found)
    held = dict(reference.module.named_parameters(remove_duplicate=False))
    routers = [name for name in held if name.split(".")[-2] in ("gate", "router") or "router" in name]
    sets = {"router_dtype": routers, "dtype": list(held)}
    for cause, names in sets.items():
        for dtype in (torch.bfloat16, torch.float16):
            if names and dtype != own:
                with _replaced(reference.module, {name: held[name].data.to(dtype).to(own) for name in names}):
                    found = reference.logprobs()
                what = "weights of the router" if cause == "router_dtype" else "weights"
                yield from reference.attempt(cause, f"{what} rounded to {_short(dtype)}", found)
    matrices = [name for name, each in held.items() if each.ndim >= 2 and "embed" not in name and "lm_head" not in name]
    for detail, dim in {"one scale per channel": -1, "one scale per tensor": None}.items():
        with _replaced(reference.module, {name: _float8(held[name].data, dim) for name in matrices}):
            found = reference.logprobs()
        yield from reference.attempt("quantization", f"weights in float8, {detail}", found)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype != own:
            found = reference.logprobs(reference.load(reference.case.model, dtype))
            yield from reference.attempt("dtype", f"the model in {_short(dtype)}", found)


def _float8(weight: Tensor, dim: int | None) -> Tensor:
    most = torch.finfo(torch.float8_e4m3fn).max
    size = weight.float().abs()
    scale = (size.amax(dim, keepdim=True) if dim is not None else size.amax()).clamp(min=1e-12) / most
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


CHANGES: tuple[Change, ...] = (
    temperature,
    filters,
    penalties,
    left_out,
    tokens,
    older_weights,
    missing,
    tied_head,
    rotary,
    config_fields,
    attention,
    precision,
)
"""All changes, those that cost least first."""


def examine(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the gap of a `MismatchCase` with the logprobs of `transformers`, and then what each change leaves of it.

    Args:
        text: The case as JSON.
    """
    reference = MismatchModel(MismatchCase.from_json(text))
    raw = reference.logprobs(logits=reference.sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0))
    yield {"gap": asdict(reference.gap), "base": reference.base.tolist(), "raw": raw.tolist()}
    for change in CHANGES:
        try:
            for attempt in change(reference):
                yield {"attempt": asdict(attempt)}
        except FAMILY_ERRORS as error:
            # A family's code may not have what a change alters.
            _log.warning("%s could not be tried: %s: %s", change.__name__, type(error).__name__, error)
