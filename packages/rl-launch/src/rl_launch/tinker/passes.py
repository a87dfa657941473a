"""Forward and backward passes: the protobuf messages of the client, the rows and losses that models compute, and the
answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast, get_args

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # it has no types of its own
from pydantic import ValidationError

from rl_algos.losses.targets import (
    ADVANTAGES,
    CLIP_HIGH,
    CLIP_LOW,
    DRO_BETA,
    RATIO_MASK,
    SAMPLING_LOGPROBS,
    SUMMED_SURROGATES,
    TARGETS,
    WEIGHTS,
    TargetNLLLoss,
    TargetObjective,
    TargetPolicyLoss,
    TargetSurrogateLoss,
)
from rl_core.data.batch import TOKENS, Batch
from rl_core.data.ragged import Ragged
from rl_core.metrics import results
from rl_core.model import Loss, Metrics
from rl_core.rollouts.group import LOSS_MASK
from rl_launch.tinker.client_types import pb
from rl_launch.tinker.refusal import RequestRefused

_DTYPES: Mapping[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}

_CLIPS: Mapping[str, float] = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}
"""Keys of the thresholds of a ratio, and the values that the client's documentation gives."""

_REFUSED_LOSSES: Mapping[str, str] = {
    "stable_reinforce": "it needs what the samplers of its inventors record of each sampled token",
    "custom": "losses of the client's own run in two calls: pass the function itself to forward_backward_custom",
}

MAX_TARGETS = 1024
"""Maximum number of targets of a position."""


class Limits(NamedTuple):
    """Bounds of rows.

    Args:
        vocab_size: Number of ids.
        max_length: Maximum number of tokens of a row.
    """

    vocab_size: int
    max_length: int


class Pass(NamedTuple):
    """Rows and a loss.

    Args:
        batch: Rows. Each has a token more than its datum, whose targets begin at its second token.
        loss: Loss over the targets.
        num_targets: Number of targets of a position of each row; 0 for one in a column without that dimension.
    """

    batch: Batch
    loss: Loss
    num_targets: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the data."""
        return int(self.batch.lengths.sum()) - len(self.batch)


def parsed(body: bytes) -> pb.ForwardBackwardRequest:
    """Return the message in a body.

    Raises:
        RequestRefused: If it is malformed.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        problem = "the body is not a ForwardBackwardRequest in protobuf, as versions 0.38 of the tinker client send it"
        raise RequestRefused(problem) from None
    if not message.model_id or message.seq_id < 1:
        raise RequestRefused("a ForwardBackwardRequest needs a model_id, and a seq_id of at least 1")
    return message


def read_pass(message: pb.ForwardBackwardRequest, limits: Limits) -> Pass:
    """Return the rows and the loss of a message.

    Raises:
        RequestRefused: Naming the datum and the field that cannot be used.
    """
    if not message.data:
        raise RequestRefused("data is empty")
    config = {
        **message.loss_fn_config,
        **{
            key: value.text if value.HasField("text") else value.number
            for key, value in message.loss_fn_config_v2.items()
        },
    }
    build = _builder(message.loss_fn, config)
    tokens, targets, columns = [], [], []
    for place, datum in enumerate(message.data):
        name = f"data[{place}]"
        ids = _tokens(datum, name, limits)
        inputs = {key: _tensor(value, f"{name}.loss_fn_inputs[{key!r}]") for key, value in datum.loss_fn_inputs.items()}
        at = _targets(inputs, name, len(ids), limits)
        targets.append(at)
        columns.append(build.columns(_Inputs(name, inputs, at, config)))
        # The last token is read by nobody: it only makes room for the distribution after the one before it.
        tokens.append(np.concatenate([ids, ids[-1:]]))
    width = max(1, *(at.shape[1] if at.ndim == 2 else 1 for at in targets))
    batch = {TOKENS: Ragged.from_rows(tokens, np.int32), TARGETS: _stacked(targets, width, np.int32, -1)}
    for key in columns[0]:
        rows = [each[key] for each in columns]
        dtype = np.uint8 if key == LOSS_MASK else np.float32
        batch[key] = (
            _stacked(rows, width, dtype, 0)
            if key == WEIGHTS
            else Ragged.from_rows([np.concatenate([[0], row]) for row in rows], dtype)
        )
    return Pass(Batch(batch), build.loss, tuple(at.shape[1] if at.ndim == 2 else 0 for at in targets))


def written_pass(given: Pass, metrics: Metrics, columns: Batch) -> bytes:
    """Return the answer to a pass as a `ForwardBackwardOutput` in protobuf.

    Args:
        given: Pass.
        metrics: Metrics of its loss.
        columns: The column `logprobs_at` of its rows.
    """
    logprobs = columns.ragged("logprobs_at")
    weights = given.batch.ragged(WEIGHTS) if isinstance(given.loss, TargetNLLLoss) else None
    answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record, last = pb.ArrayRecord(), -1
    fields: dict[str, list[np.ndarray]] = {}

    def finish() -> None:
        for name, arrays in fields.items():
            field = record.fields[name]
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend([last] if last else [])
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()

    for row, num_targets in enumerate(given.num_targets):
        if num_targets != last:
            finish()
            record, last, fields = answer.loss_fn_outputs.add(type_tag="ArrayRecord"), num_targets, {}
        record.num_datums += 1
        own = np.ascontiguousarray(logprobs[row][1:, : num_targets or 1], dtype=np.float32)
        fields.setdefault("logprobs", []).append(own)
        if weights is not None:
            weight = weights[row][1:, : num_targets or 1]
            fields.setdefault("elementwise_loss", []).append(
                np.where(weight != 0, -weight * own, 0.0).astype(np.float32)
            )
    finish()
    # The client combines the metrics of several requests by the suffix of their names, and drops those without one.
    for name, value in results(metrics).items():
        if ":" in name:
            answer.metrics[name] = value
    return cast(bytes, answer.SerializeToString())


class _Inputs(NamedTuple):
    """Inputs of a loss for one datum.

    Args:
        name: Name of the datum, for messages.
        tensors: Tensors by name.
        targets: Int64 `[tokens]` or `[tokens, k]`.
        config: Settings of the loss.
    """

    name: str
    tensors: Mapping[str, np.ndarray]
    targets: np.ndarray
    config: Mapping[str, float | str]

    def of_shape(self, key: str, default: float | None = None) -> np.ndarray:
        """Return a finite float tensor of the shape of the targets.

        Raises:
            RequestRefused: If it is missing without a default, or cannot be one.
        """
        where = f"{self.name}.loss_fn_inputs[{key!r}]"
        if key not in self.tensors:
            if default is None:
                raise RequestRefused(f"{where} is missing; {', '.join(sorted(self.tensors))} were given")
            return np.full(self.targets.shape, default, dtype=np.float32)
        found = self.tensors[key]
        if found.shape != self.targets.shape:
            problem = f"{where} has the shape {list(found.shape)}, and target_tokens has {list(self.targets.shape)}"
            raise RequestRefused(problem)
        if not np.isfinite(found).all():
            raise RequestRefused(f"{where} has values that are not finite")
        return found.astype(np.float32)

    def one_each(self) -> None:
        """Check that each position has one target.

        Raises:
            RequestRefused: If it may have several.
        """
        if self.targets.ndim > 1:
            problem = "has several targets for a position, which only cross_entropy can learn"
            raise RequestRefused(f"{self.name}.loss_fn_inputs['target_tokens'] {problem}")


class _Builder(NamedTuple):
    """A loss, and the function that returns its columns for one datum."""

    loss: Loss
    columns: Callable[[_Inputs], dict[str, np.ndarray]]


def _builder(name: str, config: Mapping[str, float | str]) -> _Builder:
    """Return the loss of a name.

    Raises:
        RequestRefused: If it is not served, or has other settings.
    """
    if name == "cross_entropy":
        _check_settings(name, config, ())
        return _Builder(TargetNLLLoss(), lambda given: {WEIGHTS: given.of_shape("weights", 1.0)})
    if name in get_args(TargetObjective):
        return _policy_builder(cast(TargetObjective, name), config)
    if name in SUMMED_SURROGATES:
        try:
            surrogate = SUMMED_SURROGATES[name].model_validate({"name": name, **config})
        except ValidationError as error:
            problems = "; ".join(f"{each['loc'][0] if each['loc'] else name}: {each['msg']}" for each in error.errors())
            raise RequestRefused(f"loss_fn_config of {name}: {problems}") from None
        return _Builder(TargetSurrogateLoss(surrogate), _surrogate_columns)
    served = ", ".join(["cross_entropy", *get_args(TargetObjective), *SUMMED_SURROGATES])
    reason = _REFUSED_LOSSES.get(name, "there is no such loss")
    raise RequestRefused(f"loss_fn {name[:60]!r} is not served: {reason}. Served: {served}")


def _policy_builder(name: TargetObjective, config: Mapping[str, float | str]) -> _Builder:
    has_clips = name in ("ppo", "cispo", "gspo")
    numbers = _check_settings(name, config, tuple(_CLIPS) if has_clips else ("beta",) if name == "dro" else ())
    if numbers.get("beta", 0.0) < 0:
        raise RequestRefused(f"loss_fn_config['beta'] must be at least 0, got {numbers['beta']:g}")

    def columns(given: _Inputs) -> dict[str, np.ndarray]:
        given.one_each()
        found = {SAMPLING_LOGPROBS: given.of_shape("logprobs"), ADVANTAGES: _weighted_advantages(given)}
        if has_clips:
            found |= {key: given.of_shape(key, numbers.get(key, default)) for key, default in _CLIPS.items()}
        return found | ({RATIO_MASK: given.of_shape(RATIO_MASK)} if name == "gspo" else {})

    return _Builder(TargetPolicyLoss(name, numbers.get("beta", DRO_BETA)), columns)


def _surrogate_columns(given: _Inputs) -> dict[str, np.ndarray]:
    given.one_each()
    mask = given.of_shape(RATIO_MASK, 1.0) * given.of_shape("weights", 1.0)
    return {
        SAMPLING_LOGPROBS: given.of_shape("logprobs"),
        ADVANTAGES: given.of_shape("advantages"),
        LOSS_MASK: mask != 0,
    }


def _weighted_advantages(given: _Inputs) -> np.ndarray:
    """Return the advantages; weights, if there are any, multiply them, and so their terms of the loss."""
    return given.of_shape("advantages") * given.of_shape("weights", 1.0)


def _check_settings(name: str, config: Mapping[str, float | str], allowed: Sequence[str]) -> dict[str, float]:
    """Return the settings of a loss as numbers.

    Raises:
        RequestRefused: Naming one that the loss does not have, or that is not a number.
    """
    for key, value in config.items():
        if key not in allowed:
            has = f"it has {', '.join(allowed)}" if allowed else "it has no settings"
            raise RequestRefused(f"loss_fn_config[{key[:60]!r}] is not a setting of {name}; {has}")
        if isinstance(value, str) or not math.isfinite(value):
            raise RequestRefused(f"loss_fn_config[{key!r}] must be a finite number, got {value!r:.60}")
    return {key: float(value) for key, value in config.items()}


def _tokens(datum: pb.Datum, name: str, limits: Limits) -> np.ndarray:
    """Return int64 `[tokens]`, the input of a datum."""
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            kind = "images" if chunk.HasField("image") else "audio" if chunk.HasField("dmel") else "empty chunks"
            raise RequestRefused(f"{name}.model_input: {kind} cannot be trained on here; only tokens can")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), f"{name}.model_input"))
    ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    if not 1 <= len(ids) < limits.max_length:
        problem = f"has {len(ids)} tokens; 1 to {limits.max_length - 1} are allowed (policy.max_total_sequence_length)"
        raise RequestRefused(f"{name}.model_input {problem}")
    _check_ids(ids, f"{name}.model_input", limits)
    return ids


def _targets(inputs: Mapping[str, np.ndarray], name: str, length: int, limits: Limits) -> np.ndarray:
    """Return int64 `[tokens]` or `[tokens, k]`, the targets of a datum."""
    where = f"{name}.loss_fn_inputs['target_tokens']"
    if "target_tokens" not in inputs:
        raise RequestRefused(f"{where} is missing")
    targets = inputs["target_tokens"]
    if targets.dtype.kind != "i" or targets.ndim not in (1, 2) or len(targets) != length:
        given = f"{targets.dtype} {list(targets.shape)}"
        raise RequestRefused(f"{where} must be integers [{length}] or [{length}, K], one for each token, got {given}")
    if targets.ndim == 2 and not 1 <= targets.shape[1] <= MAX_TARGETS:
        raise RequestRefused(f"{where} has {targets.shape[1]} targets for a position; 1 to {MAX_TARGETS} are allowed")
    _check_ids(targets, where, limits)
    return targets


def _check_ids(ids: np.ndarray, where: str, limits: Limits) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < limits.vocab_size):
        wrong = ids[(ids < 0) | (ids >= limits.vocab_size)].flat[0]
        raise RequestRefused(f"{where} has the id {wrong}; the ids of the model are 0 to {limits.vocab_size - 1}")


def _tensor(message: pb.Tensor, where: str) -> np.ndarray:
    """Return a tensor; what a sparse one leaves out is 0.

    Raises:
        RequestRefused: If it is malformed.
    """
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise RequestRefused(f"{where} must be float32 or int64")
    shape = tuple(message.shape)
    if not message.HasField("sparse_csr"):
        values = _array(message.dense, dtype, where)
        if shape and (math.prod(shape) != len(values) or min(shape) < 0):
            raise RequestRefused(f"{where} has {len(values)} values for the shape {list(shape)}")
        return values.reshape(shape) if shape else values
    csr, integers = message.sparse_csr, np.dtype(np.int64)
    values = _array(csr.values, dtype, where)
    rows, places = (_array(part, integers, where) for part in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2 or not 0 <= shape[1] <= MAX_TARGETS or len(rows) != shape[0] + 1 or len(places) != len(values):
        raise RequestRefused(f"{where} is not a sparse matrix (CSR) with at most {MAX_TARGETS} columns")
    counts = np.diff(rows)
    is_valid = rows[0] == 0 and rows[-1] == len(values) and (counts >= 0).all()
    if not is_valid or (len(places) and not (places.min() >= 0 and places.max() < shape[1])):
        raise RequestRefused(f"{where} has indices outside its shape {list(shape)}")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), places] = values
    return dense


def _array(data: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise RequestRefused(f"{where} has {len(data)} bytes, which is not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)


def _stacked(rows: Sequence[np.ndarray], width: int, dtype: Any, fill: float) -> Ragged:
    """Return a column `[tokens, width]` from rows with fewer columns and without their first token."""
    offsets = np.cumsum([0, *(len(row) + 1 for row in rows)], dtype=np.int64)
    values = np.full((offsets[-1], width), fill, dtype=dtype)
    for row, start in zip(rows, offsets, strict=False):
        whole = row if row.ndim == 2 else row[:, None]
        values[start + 1 : start + 1 + len(row), : whole.shape[1]] = whole
    return Ragged(values, offsets)
