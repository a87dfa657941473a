"""Changes of sampling, tokens, weights, config and precision that may explain a mismatch, each tried alone."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rl_algos.rollouts.mismatch import MIN_GAP, MismatchCase
from rl_algos.torch.mismatch import FAMILY_ERRORS, MismatchModel, Sampled, Scored

_log = logging.getLogger(__name__)

ROUNDS = 4
"""Number of grids that shrink around a fitted value."""

SETTINGS: Mapping[str, tuple[float, Sequence[float]]] = {
    "temperature": (1.0, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 4.0)),
    "top_p": (1.0, (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)),
    "top_k": (0, (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 128, 256, 512, 1000)),
    "min_p": (0.0, (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)),
}
"""Value of each setting of the sampler that changes nothing, and usual ones."""

PENALTIES = (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5)
"""Usual repetition penalties; 1 changes nothing."""

KEPT_FIELDS = (
    *("model_type", "dtype", "torch_dtype", "max_position_embeddings", "use_cache", "tie_word_embeddings"),
    *("return_dict", "output_attentions", "output_hidden_states"),
)
KEPT_ENDS = ("_size", "_dim", "_id", "_ids", "_rank", "_range", "_dropout", "_heads", "_layers", "_experts", "_version")
"""Fields of a config, and ends of their names, that are sizes of weights or have no effect on logprobs."""

COUNTS = ("num_experts_per_tok", "num_experts_per_token", "topk_group", "moe_topk")
"""Fields with a number of experts or groups that are chosen."""

OPTIONS: Mapping[str, Sequence[Any]] = {
    **dict.fromkeys(
        ("hidden_act", "hidden_activation", "activation_function"), ("silu", "gelu", "gelu_pytorch_tanh", "relu")
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None, 15.0, 30.0, 50.0)),
    "scoring_func": ("softmax", "sigmoid"),
}
"""Values of fields of a config."""


class Change(NamedTuple):
    """A change that may explain the mismatch.

    Attributes:
        cause: Key of `CAUSES`.
        detail: The change, in words.
        how: Arguments of `MismatchModel.logprobs`, or a function to logprobs, float64 `[sampled]`.
        fitted: Number of values that were fitted to the rows.
    """

    cause: str
    detail: str
    how: Mapping[str, Any] | Callable[[], np.ndarray]
    fitted: int = 0


def fitted(
    reference: MismatchModel,
    cause: str,
    words: str,
    own: float,
    usual: Sequence[float],
    how: Callable[[float], Mapping[str, Any]],
) -> Iterator[Change]:
    """Yield the change to the value that leaves least on a few rows, if it is not the configured one.

    Args:
        reference: The model.
        cause: Key of `CAUSES`.
        words: Words before the value.
        own: The configured value.
        usual: Values to begin with, positive and increasing; only others count as fitted.
        how: Function from a value to arguments of `MismatchModel.logprobs`.
    """

    def best(values: Sequence[float]) -> tuple[float, int]:
        lefts = [reference.left_of_few(**how(value)) for value in values]
        return min(lefts), int(np.argmin(lefts))

    grid = sorted({*usual, own} - {0})
    for _ in range(ROUNDS):
        least, place = best(grid)
        value, low, high = grid[place], grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
        if value in usual and least < 1e-6:
            break
        grid = sorted({value, *np.geomspace(low, high, 7).tolist()})
    # A usual or a round number is meant if it is as good.
    for simple in (min(usual, key=lambda each: abs(each - value)), *(float(f"{value:.{n}g}") for n in (1, 2, 3))):
        if best([simple])[0] <= 1.05 * least + 1e-6:
            value = simple
            break
    if not math.isclose(value, own, rel_tol=1e-3):
        yield Change(cause, f"{words} {value:.4g} instead of {own:g}", how(value), int(value not in usual))


def sampler(reference: MismatchModel) -> Iterator[Change]:
    """Change the temperature and the filter of tokens: other values, none, or another order."""
    configured, off = reference.sampling, {name: each for name, (each, _) in SETTINGS.items()}
    for name, (none, usual) in SETTINGS.items():
        own, kind = configured[name], type(none)
        if own != none:
            yield Change(name, f"no {name} instead of {own:g}", {"sampling": {name: none}})

        def how(value: float, name: str = name, kind: Any = kind) -> Mapping[str, Any]:
            return {"sampling": {name: kind(round(value, 9 if kind is float else 0))}}

        yield from fitted(reference, name, name, own, usual, how)
    if configured != off | {"temperature": configured["temperature"]}:
        filters = {name: each for name, each in off.items() if name != "temperature"}
        yield Change("filter", "logprobs over all tokens, without the sampler's filter", {"sampling": filters})
        if configured["temperature"] != 1:
            yield Change("filter", "a filter before the temperature", {"sampling": {"filters_first": True}})
            yield Change("filter", "logprobs before temperature and filter", {"sampling": off})


def logits(reference: MismatchModel) -> Iterator[Change]:
    """Penalise the tokens of the row so far, or leave tokens out."""

    def penalised(sampled: Sampled, value: float) -> Tensor:
        changed = sampled.logits.clone()
        for row, before in zip(changed, sampled.before, strict=True):
            ids = before.unique().to(row.device)
            row[ids] = torch.where(row[ids] > 0, row[ids] / value, row[ids] * value)
        return changed

    # Engines read this file, and the policy does not.
    own = _generation_config(reference).get("repetition_penalty")
    values = sorted({*PENALTIES, *([float(own)] if isinstance(own, int | float) and own > 0 else [])} - {1.0})
    words = "repetition_penalty"
    yield from fitted(
        reference, "penalty", words, 1.0, values, lambda value: {"logits": partial(penalised, value=value)}
    )
    sets = {f"without the end token {each}": [each] for each in _ends(reference)}
    if reference.tokenizer is not None:
        sets["without special tokens"] = sorted(reference.tokenizer.all_special_ids)
    for detail, ids in sets.items():
        if ids := [each for each in ids if each < reference.vocab_size]:

            def without(sampled: Sampled, ids: Sequence[int] = ids) -> Tensor:
                own = sampled.ids[:, None]
                left = sampled.logits.index_fill(1, torch.tensor(ids, device=own.device), -torch.inf)
                return left.scatter(1, own, sampled.logits.gather(1, own))

            yield Change("forbidden", detail, {"logits": without})


def _generation_config(reference: MismatchModel) -> Mapping[str, Any]:
    path = Path(reference.case.model) / "generation_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _ends(reference: MismatchModel) -> list[int]:
    """Return ids of tokens that may end a turn."""
    found: list[Any] = []
    for source in (_generation_config(reference), reference.module.config.to_dict()):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value]
    if reference.tokenizer is not None:
        found += reference.tokenizer.all_special_ids
    return [each for each in dict.fromkeys(found) if isinstance(each, int) and 0 <= each < reference.vocab_size][:32]


def tokens(reference: MismatchModel) -> Iterator[Change]:
    """Change the tokens: the prompt as another template writes it, another end, or another tokenisation."""
    for end in _ends(reference):
        rows = []
        for row in reference.scored:
            is_last = torch.ones(len(row.places), dtype=torch.bool)
            is_last[:-1] = row.places.diff() > 1
            rows.append(Scored(row.tokens.index_fill(0, row.places[is_last], end), row.places))
        yield Change("end", f"rows that end with token {end}", {"rows": rows}, fitted=1)
    for detail, edit in _prompt_edits(reference).items():
        starts = [int(row.places[0]) if len(row.places) else len(row.tokens) for row in reference.scored]
        old = [row.tokens[:start].tolist() for row, start in zip(reference.scored, starts, strict=True)]
        new = [edit(number, ids) for number, ids in enumerate(old)]
        if new != old and all(new):
            rows = [
                Scored(torch.cat([torch.tensor(ids), row.tokens[start:]]), row.places + len(ids) - start)
                for ids, row, start in zip(new, reference.scored, starts, strict=True)
            ]
            yield Change("prompt", detail, {"rows": rows})
    if reference.tokenizer is not None:
        rows = [_retokenised(reference.tokenizer, row) for row in reference.scored]
        yield Change("retokenised", "rows whose text is tokenised anew", {"rows": rows})


def _prompt_edits(reference: MismatchModel) -> dict[str, Callable[[int, list[int]], list[int]]]:
    """Return edits of prompts, from the row's number and the prompt, by their words: tokens that are missing, white
    space that a template adds, and the tokenizer's own template."""
    tokenizer, messages = reference.tokenizer, reference.rows.prompts
    found: dict[str, Callable[[int, list[int]], list[int]]] = {
        "a prompt without its first token": lambda _, ids: ids[1:],
        "a prompt without its last token": lambda _, ids: ids[:-1],
    }
    if tokenizer is None:
        return found

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    added = {repr(text): ids for text in (" ", "\n", "\n\n", "\t") if (ids := encoded(text))}
    if tokenizer.bos_token_id is not None:
        added["the beginning-of-sequence token"] = [tokenizer.bos_token_id]
    seen = {token for row in reference.few for token in row.tokens.tolist()}
    for text, more in added.items():
        found[f"a prompt with {text} after it"] = lambda _, ids, more=more: [*ids, *more]  # type: ignore[misc]
        found[f"a prompt with {text} before it"] = lambda _, ids, more=more: [*more, *ids]  # type: ignore[misc]
        for token in sorted(seen & set(tokenizer.all_special_ids))[:16]:
            for side, pair in {"before": [*more, token], "after": [token, *more]}.items():
                found[f"a prompt with {text} {side} each {tokenizer.convert_ids_to_tokens(token)}"] = (
                    lambda _, ids, token=token, pair=pair: [  # type: ignore[misc]
                        new for each in ids for new in (pair if each == token else [each])
                    ]
                )
    edits: Mapping[str, Callable[[str], str]] = {
        "a prompt whose text is tokenised anew": str,
        "a prompt without white space at its end": str.rstrip,
        "a prompt with a space at its end, tokenised anew": "{} ".format,
        "a prompt with a line break at its end, tokenised anew": "{}\n".format,
    }
    for detail, edit in edits.items():
        found[detail] = lambda _, ids, edit=edit: encoded(edit(tokenizer.decode(ids)))  # type: ignore[misc]
    if len(messages) == len(reference.scored) and all(messages) and tokenizer.chat_template:
        for detail, options in {
            "the chat template of the tokenizer": {"add_generation_prompt": True},
            "a chat template without the mark of the next turn": {"add_generation_prompt": False},
            "a chat template without thoughts": {"add_generation_prompt": True, "enable_thinking": False},
        }.items():
            found[detail] = lambda number, _, options=options: encoded(  # type: ignore[misc]
                tokenizer.apply_chat_template(list(map(dict, messages[number])), tokenize=False, **options)
            )
    return found


def _retokenised(tokenizer: Any, row: Scored) -> Scored:
    """Return the row with the tokens of its text; the row itself if a sampled token is no longer there."""

    def length(ids: Sequence[int]) -> int:
        return len(tokenizer.decode(ids))

    old = row.tokens.tolist()
    new = tokenizer.encode(tokenizer.decode(old), add_special_tokens=False)
    places = {length(new[:end]): end - 1 for end in range(1, len(new) + 1)}
    own = [places.get(length(old[: place + 1]), 0) for place in row.places.tolist()]
    return Scored(torch.tensor(new), torch.tensor(own, dtype=torch.int64)) if all(own) else row


def older_weights(reference: MismatchModel) -> Iterator[Change]:
    """Take weights that the policy had before: everywhere, for the prompt only, or in a part of the model."""
    case, own = reference.case, reference.module.state_dict()
    for number, weights in enumerate(case.older):
        other = reference.load(weights.folder)
        held = other.state_dict()
        changed = [name for name, tensor in own.items() if name in held and not torch.equal(tensor, held[name])]
        if not changed:
            continue
        what = "no adapter, only the weights below it" if case.has_adapters and weights.is_base else weights.label
        yield Change("adapter" if case.has_adapters else "stale", what, {"module": other})
        for detail, size in {"the whole prompt": 1, "whole blocks of 16 tokens of the prompt": 16}.items():
            text = f"keys and values of {detail} are from {weights.label}"
            yield Change("prefix_cache", text, partial(_with_prefix, reference, other, size))
        if number and not weights.is_base:
            continue
        parts: dict[str, list[str]] = {}
        for name in changed:
            words = name.split(".")
            layers = [f"layer {word}" for word in words if word.isdigit()][:1]
            kind = ".".join(word for word in words[-3:-1] if not word.isdigit()) if layers else name
            for part in (*layers, kind):
                parts.setdefault(part, []).append(name)
        for part, names in parts.items():
            if len(names) < len(changed):
                how = {"weights": {name: held[name] for name in names}}
                yield Change("stale_part", f"{part} of {weights.label}", how)
        if reference.is_tied:
            detail = f"a head that is not tied to the embedding, of {weights.label}"
            yield Change("tied_head", detail, {"head": {"weight": other.get_output_embeddings().weight}})
        if case.has_adapters and weights.is_base:
            grid = [0.03125, 0.0625, 0.125, 0.25, 0.5, 0.7, 1.4, 2.0, 4.0, 8.0, 16.0, 32.0]

            def scaled(factor: float, held: Any = held, names: Sequence[str] = changed) -> Mapping[str, Any]:
                return {"weights": {name: torch.lerp(held[name], own[name], factor) for name in names}}

            yield from fitted(reference, "adapter_scale", "adapters scaled by", 1.0, grid, scaled)


@torch.inference_mode()
def _with_prefix(reference: MismatchModel, other: PreTrainedModel, size: int) -> np.ndarray:
    """Return logprobs with keys and values of whole blocks of the prompt from another model."""
    found = []
    for row in reference.scored:
        prefix = max(int(row.places[0]) - 1, 0) // size * size if len(row.places) else 0
        ids = row.tokens[None].to(reference.device)
        cache = DynamicCache(config=reference.module.config)
        if prefix:
            other(input_ids=ids[:, :prefix], past_key_values=cache, use_cache=True)
        output = reference.module(input_ids=ids[:, prefix:], past_key_values=cache, use_cache=True)
        logits = output.logits[0, row.places.to(reference.device) - 1 - prefix]
        found.append(reference.sampled_logprobs(logits.float(), ids[0, row.places.to(reference.device)]))
    return np.concatenate(found)


def weights(reference: MismatchModel) -> Iterator[Change]:
    """Leave biases and norms out, or tie the head."""
    module = reference.module
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    kinds: dict[str, list[str]] = {}
    for name, tensor in held.items():
        if name.endswith("bias") or (tensor.ndim == 1 and "norm" in name.lower()):
            kinds.setdefault(".".join(word for word in name.split(".")[-2:] if not word.isdigit()), []).append(name)
    for kind, names in kinds.items():
        cause = "router" if any(word in kind for word in ("correction", "gate", "router")) else "missing"
        changes: dict[str, Callable[[Tensor], Tensor]] = {f"{kind} is missing": torch.zeros_like}
        if not kind.endswith("bias"):
            changes = {
                f"{kind} is missing": torch.ones_like,
                f"1 is added to {kind}": lambda tensor: tensor + 1,
                f"1 is taken from {kind}": lambda tensor: tensor - 1,
            }
        for detail, change in changes.items():
            yield Change(cause, detail, {"weights": {name: change(held[name].data) for name in names}})
    if not reference.is_tied:
        how = {"head": {"weight": module.get_input_embeddings().weight}}
        yield Change("tied_head", "a head that is tied to the embedding", how)
        return
    for path in sorted(Path(reference.case.model).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            if "lm_head.weight" in file.keys():  # noqa: SIM118 - the file is not a mapping
                weight = file.get_tensor("lm_head.weight").to(reference.device, reference.dtype)
                yield Change("tied_head", "the separate head that the files have", {"head": {"weight": weight}})


def rotary(reference: MismatchModel) -> Iterator[Change]:
    """Change theta and the scaling of rotary embeddings."""
    config = reference.module.config
    held: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    if not held:
        return
    # Some families have parameters for each type of layer.
    is_by_type = all(isinstance(each, Mapping) for each in held.values())
    first = next(iter(held.values())) if is_by_type else held
    theta, kind = float(first.get("rope_theta", 10000.0)), first.get("rope_type", "default")

    def at(value: float) -> Mapping[str, Any]:
        new: dict[str, Any] = {name: {**each, "rope_theta": value} for name, each in held.items()} if is_by_type else {}
        return {"fields": {"rope_parameters": new or {**held, "rope_theta": value}}}

    usual = (100.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
    yield from fitted(reference, "rope_theta", "rope_theta", theta, usual, at)
    original: dict[str, Any] = {
        "original_max_position_embeddings": first.get("original_max_position_embeddings")
        or getattr(config, "max_position_embeddings", 0)
        or 4096
    }
    kinds: dict[str, Mapping[str, Any]] = {} if kind == "default" else {"none": {"rope_type": "default"}}
    for factor in (0.5, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0):
        for name, more in {
            "linear": {},
            "yarn": original,
            "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        }.items():
            kinds[f"{name}, factor {factor:g}"] = {"rope_type": name, "factor": factor, **more}
    kept = {name: first[name] for name in ("partial_rotary_factor",) if name in first} | {"rope_theta": theta}
    for detail, fields in kinds.items():
        new = {key: {**kept, **fields} for key in held} if is_by_type else {**kept, **fields}
        yield Change("rope_scaling", f"scaling {detail} instead of {kind}", {"fields": {"rope_parameters": new}})


def config_fields(reference: MismatchModel) -> Iterator[Change]:
    """Change fields of the config: epsilons, routers, activations, and any that differs from its default."""
    config = reference.module.config
    defaults = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if not isinstance(value, bool | int | float | str | None) or name in KEPT_FIELDS:
            continue
        if isinstance(value, float) and (name.endswith("eps") or "epsilon" in name):
            grid = [1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1]

            def how(epsilon: float, name: str = name) -> Mapping[str, Any]:
                return {"fields": {name: epsilon}}

            yield from fitted(reference, "norm_epsilon", name, value, grid, how)
            continue
        tried: list[Any] = [*OPTIONS.get(name, ())]
        if isinstance(value, bool):
            tried = [not value]
        elif name in COUNTS and value:
            tried = [each for each in (int(value) - 1, int(value) + 1, 2 * int(value), 1) if each > 0]
        elif not name.endswith(KEPT_ENDS):
            tried += [defaults[name]] if name in defaults else []
            tried += [1.0] if isinstance(value, float) and value else []
        is_router = any(word in name for word in ("expert", "topk", "router", "routed", "n_group", "scoring_func"))
        for other in dict.fromkeys(tried):
            if other != value:
                detail = f"{name} {other} instead of {value}"
                yield Change("router" if is_router else "config", detail, {"fields": {name: other}})


def attention(reference: MismatchModel) -> Iterator[Change]:
    """Leave the window of attention out, or change the dtype of its inputs."""
    if own := getattr(reference.module.config, "sliding_window", None):
        yield Change("attention", f"no window instead of {own} tokens", {"attention": {"has_window": False}})
    for dtype in {torch.bfloat16, torch.float16, torch.float8_e4m3fn} - {reference.dtype}:
        for what, of_cache in {"keys and values": True, "queries, keys and values": False}.items():
            how = {"attention": {"dtype": dtype, "of_cache": of_cache}}
            yield Change("attention_dtype", f"{what} in {_short(dtype)}", how)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def precision(reference: MismatchModel) -> Iterator[Change]:
    """Change dtypes: of the head, the router, the weights, the whole model."""
    own = reference.dtype
    others = [each for each in (torch.float32, torch.bfloat16, torch.float16) if each != own]
    yield Change("head_dtype", "logits rounded to bfloat16", {"head": {"is_rounded": True}})
    if own != torch.float32:
        yield Change("head_dtype", f"a head in {_short(own)}", {"head": {"dtype": own}})
    held = {name: each.data for name, each in reference.module.named_parameters(remove_duplicate=False)}
    routers = [name for name in held if name.split(".")[-2] in ("gate", "router") or "router" in name]
    for dtype in others:
        yield Change("head_dtype", f"a head in {_short(dtype)}", {"head": {"dtype": dtype}})
        yield Change("dtype", f"the model in {_short(dtype)}", {"dtype": dtype})
        if dtype != torch.float32:
            sets = {("router_dtype", "weights of the router"): routers, ("dtype", "weights"): [*held]}
            for (cause, what), names in sets.items():
                if names:
                    how = {"weights": {name: held[name].to(dtype).to(own) for name in names}}
                    yield Change(cause, f"{what} rounded to {_short(dtype)}", how)
    most = torch.finfo(torch.float8_e4m3fn).max
    matrices = {n: each for n, each in held.items() if each.ndim >= 2 and "embed" not in n and "lm_head" not in n}
    for detail, dim in {"one scale per channel": -1, "one scale per tensor": None}.items():
        rounded = {}
        for name, weight in matrices.items():
            size = weight.float().abs()
            scale = (size.amax() if dim is None else size.amax(dim, keepdim=True)).clamp(min=1e-12) / most
            rounded[name] = ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(own)
        yield Change("quantization", f"weights in float8, {detail}", {"weights": rounded})


CHANGES = (sampler, logits, tokens, older_weights, weights, rotary, config_fields, attention, precision)
"""All changes, those that cost least first."""


def examine(text: str) -> Iterator[Mapping[str, Any]]:
    """Yield the gap of a `MismatchCase` with the logprobs of `transformers`, and then what each change leaves of it,
    unless it is only the rounding of kernels.

    Args:
        text: The case as JSON.
    """
    reference = MismatchModel(MismatchCase.from_json(text))
    raw = reference.logprobs(sampling={name: none for name, (none, _) in SETTINGS.items()})
    yield {"gap": asdict(reference.gap), "base": reference.base.tolist(), "raw": raw.tolist()}
    for changes in CHANGES if reference.gap.mean > MIN_GAP[reference.case.precision] else ():
        try:
            for cause, detail, how, count in changes(reference):
                try:
                    found = how() if callable(how) else reference.logprobs(**how)
                except FAMILY_ERRORS:
                    # A family's code may not have what a change alters.
                    continue
                for attempt in reference.attempts(cause, detail, found, count):
                    yield {"attempt": asdict(attempt)}
        except FAMILY_ERRORS as error:
            _log.warning("%s could not all be tried: %s: %s", changes.__name__, type(error).__name__, error)
