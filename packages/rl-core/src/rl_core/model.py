"""Interfaces of a policy, critic, teacher or reward model: the whole model as a loop sees it, and one rank of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np

from rl_core.data.batch import Batch
from rl_core.devices import Device, device_named
from rl_core.metrics import Metric
from rl_core.model_config import SchedulerConfig
from rl_core.token_filter import ALLOWED, TokenFilter
from rl_core.weights import WeightSource

AXES = ("dp", "pp", "cp", "tp", "ep")
"""The axes a loop or a facade may know of. `ep` folds into `dp`: it never multiplies the world."""


@dataclass(frozen=True)
class Coordinates:
    """One rank's place on the mesh: index and size along each axis; an axis of size 1 may be left out.

    Args:
        index: Axis to this rank's index on it.
        size: Axis to the number of ranks along it.
    """

    index: Mapping[str, int]
    size: Mapping[str, int]

    def __post_init__(self) -> None:
        for axis, index in self.index.items():
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}; axes are {', '.join(AXES)}")
            if not 0 <= index < self.along(axis):
                raise ValueError(f"index {index} on axis {axis!r} of size {self.along(axis)}")
        for axis, size in self.size.items():
            if axis not in AXES:
                raise ValueError(f"unknown mesh axis {axis!r}; axes are {', '.join(AXES)}")
            if size < 1 or (size > 1 and axis not in self.index):
                raise ValueError(
                    f"axis {axis!r} has size {size}; a size is at least 1, and an axis of more than 1 needs an index"
                )

    def on(self, axis: str) -> int:
        """Return the index on an axis, 0 if the mesh does not have it."""
        return self.index.get(axis, 0)

    def along(self, axis: str) -> int:
        """Return the number of ranks along an axis, 1 if the mesh does not have it."""
        return self.size.get(axis, 1)

    @property
    def leads(self) -> bool:
        """Return True if this rank reports for its data-parallel shard: first on `tp` and `cp`, last on `pp`."""
        return self.on("tp") == 0 and self.on("cp") == 0 and self.on("pp") == self.along("pp") - 1


Role = Literal["policy", "critic", "teacher", "reward_model"]
"""The purpose of a model: `critic` has a value head, `reward_model` a score head, the others a language-model head."""

HEADLESS_ROLES: tuple[Role, ...] = ("critic", "reward_model")
"""Roles with a head of one output instead of a language-model head."""

Metrics = Mapping[str, Metric]
"""Metrics of one update, combined over all ranks: sums and counts until they are recorded."""

ModelPart = Literal["parameters", "optimizer"]
"""The parts that a resident keeps on the device, in addition to the activations of the moment."""


DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "other_tail", "own_tail", "other_logprob")
"""Numbers of the read `divergences`, with p the other model's distribution and q this one's, each over the ids that are
compared and a tail that holds all others: KL(p || q), KL(q || p), and with m = beta p + (1 - beta) q the divergence
beta KL(p || m) + (1 - beta) KL(q || m); the masses of both tails; and the other logprob of the token that is there. The
first three have gradients."""

MIN_TAIL = 1e-6
"""Smallest mass of the tail that counts: float32 logprobs sum to 1 no more exactly."""


@dataclass(frozen=True)
class HeadFiles:
    """The language-model head of a model that does not train, which another model reads from its files.

    Args:
        model_name: Folder or hub name.
        precision: That the model computes in.
        overrides: Its `hf_config_overrides`, as JSON.
    """

    model_name: str
    precision: str
    overrides: str = "{}"


@dataclass(frozen=True)
class Read:
    """A per-row result of a model's forward pass; never whole logits.

    `logprobs`, `entropy` and `values` are float32 `[tokens]`: the value at index i belongs to token i given those
    before it, and the first of a row is 0 (`values` at i: of the state before token i). `scores` is float32 `[rows]`,
    the scalar head at the last token; of a critic it is the value of the state after that token. A reward model has
    `values` too: its score of each beginning of a row. `topk` gives two columns, `topk_logprobs` float32 and `topk_ids`
    int32, both `[tokens, k]`. `logprobs_at` is float32 `[tokens, k]`: the logprobs, given the tokens before token i, of
    the ids at index i of a column of the batch, int32 `[tokens, k]`; an id of -1 is none, and its logprob is 0.
    `collision` is float32 `[tokens]`, the sum of the squared probabilities of all tokens. `hidden` is float32 `[tokens,
    hidden]`: at index i the hidden state, after the last norm, that the head makes the distribution of token i from.
    `divergences` is float32 `[tokens, 6]`, the numbers of `DIVERGENCES` from the distribution of token i by another
    model, whose `hidden` a column of the batch has. There may be several other models; another column selects the model
    of each token's hidden state. `draft_losses`, which only a draft head answers, is float32 `[tokens, k]`: at index i,
    j the cross-entropy of the head's distribution of token i, as token j of a draft, from the distribution of the model
    that it drafts for; 0 where the row is too short for such a draft, and where the column `loss_mask` is 0.

    Args:
        name: Name of the result.
        k: Number of tokens of `topk`, and of the drafts of `draft_losses`.
        below: Ids that `topk` chooses among, and that `divergences` compares one by one, are below it; 0 for all.
        column: That has the ids of `logprobs_at`, or the hidden states of the other model.
        token_filter: Token filter of `logprobs`, `entropy` and `collision`, which are then of the distribution over the
            tokens that it keeps and the token that is there, which the generator may have drawn although it is left out
            here, by another rounding. None keeps all.
        heads: Heads of the other models of `divergences`.
        choice: Column that has the number of the other model of each token, int32 `[tokens]`.
        width: Width of `hidden`: narrower hidden states are followed by zeros; 0 for the model's own width.
        beta: Weight of the other model in the mixture of `divergences`.
    """

    name: Literal[
        "logprobs",
        "entropy",
        "collision",
        "topk",
        "logprobs_at",
        "scores",
        "values",
        "hidden",
        "divergences",
        "draft_losses",
    ]
    k: int = 0
    below: int = 0
    column: str = ""
    token_filter: TokenFilter | None = None
    heads: tuple[HeadFiles, ...] = ()
    choice: str = ""
    width: int = 0
    beta: float = 0.5

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns it adds."""
        return ("topk_logprobs", "topk_ids") if self.name == "topk" else (self.name,)


LOGPROBS = Read("logprobs")
"""Log-probability of each token given the tokens before it, float32 `[tokens]`."""
ENTROPY = Read("entropy")
"""Entropy in nats of the distribution that each token was drawn from, float32 `[tokens]`."""
COLLISION = Read("collision")
"""Read of the probability that two draws from the distribution of a token are equal, float32 `[tokens]`."""
SCORES = Read("scores")
"""Score of each row at its last token by the head of a reward model, float32 `[rows]`."""
VALUES = Read("values")
"""Value of the state before each token by the head of a critic, float32 `[tokens]`."""
HIDDEN = Read("hidden")
"""Read of the hidden states after the last norm, float32 `[tokens, hidden]`."""


UNDIVIDED = "undivided"
"""Name of an objective that is a plain sum over the batch, divided by no total; `Loss.totals` does not count it."""


def topk(k: int, *, below: int = 0) -> Read:
    """Read the top `k` tokens and their logprobs at each position, highest first.

    Args:
        k: Number of tokens per position, at least 1.
        below: Choose among the ids below it, such as those that another model knows as well; 0 for all. Logprobs are
            over the whole vocabulary.
    """
    if k < 1:
        raise ValueError(f"topk needs k >= 1, got {k}")
    if below and k > below:
        raise ValueError(f"topk({k}) of the {below} ids below {below}")
    return Read("topk", k, below)


def draft_losses(k: int) -> Read:
    """Read the losses of a draft head at the tokens of drafts of `k`."""
    if k < 1:
        raise ValueError(f"draft_losses needs k >= 1, got {k}")
    return Read("draft_losses", k)


def logprobs_at(column: str) -> Read:
    """Return the logprobs of the ids in a column of the batch, int32 `[tokens, k]`, at each position."""
    if not column:
        raise ValueError("logprobs_at needs the name of the column that has the ids")
    return Read("logprobs_at", column=column)


def hidden_states(width: int) -> Read:
    """Return the read `hidden`, `[tokens, width]`, with zeros after hidden states that are narrower: so models of
    several sizes fit in one column."""
    if width < 1:
        raise ValueError(f"hidden_states needs width >= 1, got {width}")
    return Read("hidden", width=width)


def divergences_from(heads: Sequence[HeadFiles], column: str, choice: str, *, below: int, beta: float = 0.5) -> Read:
    """Return the divergences from other models, of each token from one of them.

    Args:
        heads: Heads of the other models.
        column: Column of the batch, float32 `[tokens, width]`: hidden states, of each token by its other model. Numbers
            beyond the width of that model's head are left out.
        choice: Column of the batch, int32 `[tokens]`: number of the other model in `heads`.
        below: Number of ids that all models know.
        beta: Weight of the other model in the mixture.
    """
    if not heads:
        raise ValueError("divergences_from needs at least one head")
    if below < 1:
        raise ValueError(f"divergences_from needs below >= 1, got {below}")
    if not 0 < beta < 1:
        raise ValueError(f"beta must be above 0 and below 1, got {beta}")
    return Read("divergences", below=below, column=column, heads=tuple(heads), choice=choice, beta=beta)


def read_columns(reads: Sequence[Read]) -> tuple[str, ...]:
    """Columns of the batch that reads take, in addition to `tokens`."""
    filtered = [ALLOWED] if any(read.token_filter is not None and read.token_filter.allowed for read in reads) else []
    named = (name for read in reads for name in (read.column, read.choice) if name)
    return tuple(dict.fromkeys((*named, *filtered)))


class Loss(Protocol):
    """The objective of a step: a torch-free, frozen, picklable description that has the path of its implementation.

    The implementation, resolved inside the worker, is a function
    `compute(loss, reads, columns) -> rl_core.torch.loss.LossSums` that sees whole rows and full-vocabulary results. It
    returns sums; the step divides each by the global total of the same name.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns a batch must have, in addition to `tokens` and those that its reads take."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """Reads the implementation is given, with gradients."""

    @property
    def temperature(self) -> float:
        """Divides the logits in every pass."""

    @property
    def implementation(self) -> str:
        """`"package.module:function"`, imported in the worker."""

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Denominators counted on a batch (numbers of tokens, of sequences); they add up over shards."""


ADAPTER = "adapter"
"""Column int32 `[rows]`: the place of the adapter that a row trains, in a model that has several."""


@dataclass(frozen=True)
class AdapterLosses:
    """A `Loss` of rows of several adapters: each adapter's own loss, divided by its own totals over its own rows.

    Totals and metrics have the adapter's place before their names: `2/loss`.

    Args:
        losses: Loss of each adapter whose rows may be in a batch, by its place.

    Raises:
        ValueError: If there is none, or they differ in temperature.
    """

    losses: Mapping[int, Loss]

    def __post_init__(self) -> None:
        if len({loss.temperature for loss in self.losses.values()}) != 1:
            raise ValueError("the losses of several adapters in one pass need one temperature")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of all losses, and the place of each row's adapter. Rows may have any value in columns of the
        losses of others."""
        return tuple(dict.fromkeys((ADAPTER, *(name for loss in self.losses.values() for name in loss.columns))))

    @property
    def reads(self) -> tuple[Read, ...]:
        """The reads of all losses."""
        return tuple(dict.fromkeys(read for loss in self.losses.values() for read in loss.reads))

    @property
    def temperature(self) -> float:
        """The temperature of all losses."""
        return next(iter(self.losses.values())).temperature

    @property
    def implementation(self) -> str:
        """Path of the function that gives each loss its rows."""
        return "rl_core.torch.training.adapters:sums_by_adapter"

    def totals(self, batch: Batch) -> Mapping[str, float]:
        """Totals of each loss over the rows of its adapter."""
        places = batch.array(ADAPTER)
        return {
            f"{place}/{name}": total
            for place, loss in self.losses.items()
            for name, total in loss.totals(batch.select(np.flatnonzero(places == place))).items()
        }


@dataclass(frozen=True)
class StepSettings:
    """Settings of one optimizer step, in place of the config's. Omitted settings stay the config's.

    Args:
        lr: Learning rate, which the schedule does not change. Parameters with a rate of their own keep its ratio to
            this one.
        max_grad_norm: Larger gradients are scaled down to this norm.
        kwargs: Further settings by the names of the optimizer's arguments, such as `betas`, `eps` and `weight_decay`.

    Raises:
        ValueError: If a value cannot be one.
    """

    lr: float | None = None
    max_grad_norm: float | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lr is not None and self.lr < 0:
            raise ValueError(f"lr must be at least 0, got {self.lr}")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be above 0, got {self.max_grad_norm}")
        if taken := {"lr", "params"} & set(self.kwargs):
            raise ValueError(f"kwargs may not have {', '.join(sorted(taken))}; lr has an argument of its own")


AdaptedPart = Literal["attention", "mlp"]


@dataclass(frozen=True)
class AdapterSettings:
    """Settings of one of several adapters of a model.

    Args:
        rank: Rank of its products, at most `lora_cfg.dim`.
        alpha: Its product is multiplied by `alpha / rank`.
        seed: Seed of its first factors; the second ones start from zero.
        parts: Parts of each layer that it adapts, among those that `lora_cfg` names.

    Raises:
        ValueError: If a value cannot be one.
    """

    rank: int
    alpha: float
    seed: int = 0
    parts: tuple[AdaptedPart, ...] = ("attention", "mlp")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> AdapterSettings:
        """Return the settings with these values, as JSON or a checkpoint keeps them."""
        return cls(**{**fields, "parts": tuple(fields["parts"])})

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"the rank of an adapter must be at least 1, got {self.rank}")
        if self.alpha <= 0:
            raise ValueError(f"the alpha of an adapter must be above 0, got {self.alpha}")
        known = get_args(AdaptedPart)
        if not self.parts or set(self.parts) - set(known):
            raise ValueError(f"the parts of an adapter are some of {', '.join(known)}, got {self.parts}")


class Adapters(Protocol):
    """The adapters of a model that has several on one base, by their places 0, 1, ...; each place has one at any time.

    A new model has in each place an adapter of the full rank whose product is zero.
    """

    def make(self, place: int, settings: AdapterSettings) -> None:
        """Put a new adapter, whose product is zero, into a place, with an empty optimizer state; the gradient so far of
        the one that was there is discarded.

        Raises:
            ValueError: If there is no such place, or the rank is larger than `lora_cfg.dim`.
        """

    def save(self, place: int, path: str) -> tuple[SavedFile, ...]:
        """Write the factors and the optimizer state of an adapter under a new folder, for `load` on any mesh; returns
        the files. Its gradient so far is not written."""

    def load(self, place: int, path: str, *, with_optimizer: bool = True, files: Sequence[SavedFile] = ()) -> None:
        """Put an adapter that `save` wrote into a place; the gradient so far of the one that was there is discarded.

        Args:
            place: Where it goes.
            path: Folder that `save` was called with.
            with_optimizer: False to begin with an empty optimizer state.
            files: What `save` returned for it, which is compared with the files there before anything is loaded.

        Raises:
            CheckpointDamaged: Naming a file that is missing or differs; the adapter is as it was.
        """

    def export(self, place: int, path: str, *, merged: bool = False) -> tuple[SavedFile, ...]:
        """Write an adapter as `peft` and vLLM load it next to the base, or the weights with the adapter merged as
        `Model.export` does; returns the files."""

    def rates(self, lr: float, scheduler: Sequence[SchedulerConfig], count: int) -> list[float]:
        """Return the learning rates that a schedule gives the first steps of an adapter with a rate of its own.

        Args:
            lr: The rate that the schedule changes.
            scheduler: As `ModelConfig.scheduler`.
            count: Number of steps.
        """


class Resident(Protocol):
    """Something that shares its device with others over time."""

    def offload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """Move these parts off the device; `onload` brings them back bit-equal."""

    def onload(self, parts: Sequence[ModelPart] = ("parameters", "optimizer")) -> None:
        """Bring these parts back to the device."""


@dataclass(frozen=True)
class SavedFile:
    """A file that one rank of a model wrote.

    Args:
        path: Relative to the folder that `save`, `export` or `export_adapter` was called with, with `/`.
        size: Size in bytes.
        sha256: SHA-256 of its contents, taken while they were written; None for files of an export, which nothing
            resumes from.
        rank: That wrote it.
    """

    path: str
    size: int
    sha256: str | None
    rank: int


class Saved(Protocol):
    """A part of a run whose files are in its checkpoints."""

    @property
    def trains(self) -> bool:
        """Return whether it changes during the run, as a model with an optimizer does. A checkpoint holds only what
        changes."""

    def save(self, path: str, *, wait: bool = True) -> None:
        """Write parameters, optimizer, schedule and the RNG of every rank under `path`.

        Args:
            path: Folder of the checkpoint.
            wait: Return when the files are complete. Otherwise return when the state has been copied aside, so that
                training continues while the copy is written and digested: the files are complete once `finish_save` has
                returned them. A save that is still under way is waited for first.
        """

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """Return the files of the last save, of all ranks, once they are on the disk; None while they are being
        written.

        Empty if nothing has been saved, or the last save failed. Every rank lists its own files: the caller checks that
        all of them are in the folder that it knows.

        Args:
            wait: Return when they are written.

        Raises:
            Whatever went wrong while writing, once; no save is under way then.
        """

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Restore what `save` wrote, on any mesh.

        Args:
            path: Folder that `save` was called with.
            files: What `finish_save` returned for it. The ranks share the work of comparing them with the files there,
                before anything is loaded.

        Raises:
            CheckpointDamaged: Naming a file that is missing or differs; the model is as it was.
        """

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Write Hugging Face files that `transformers` and vLLM load: config, weights with adapters merged, tokenizer;
        returns them."""

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Write only the adapters, as `peft` and vLLM load them next to their base model, and the tokenizer; returns
        the files, none if the model has no adapters."""


class Model(Saved, Protocol):
    """A policy, critic, teacher or reward model, whatever its backend and number of ranks.

    The usage loop::

        batch = batch.with_columns({"prev_logprobs": policy.infer(batch, [LOGPROBS])["logprobs"]})
        for minibatch in minibatches(batch):
            metrics = policy.train_step(minibatch, loss)
    """

    def infer(self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0) -> Batch:
        """Per-row results for every row, in the order of the rows; `reference` uses the reference: the initial weights
        unless `update_reference` has moved it."""

    def update_reference(self, share: float = 1.0) -> None:
        """Move the reference by `share * (weights - reference)`: 1 makes it the model as it is. Checkpoints hold a
        reference that has moved.

        Raises:
            ValueError: For a share outside (0, 1], or a model that keeps no reference.
        """

    def evaluate(self, batch: Batch, loss: Loss) -> Metrics:
        """Compute the loss without a step."""

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Metrics, Batch]:
        """Add the gradient of a batch to the gradient so far, which `apply` steps with. The loss is divided by the
        totals of this batch alone.

        If it fails, the gradient so far stays as it was. Until `apply` or `discard` the model stays on its device, and
        a checkpoint does not hold the gradient.

        With several adapters, each row's gradient is of the adapter in the column `ADAPTER`, and of the first without
        this column; `AdapterLosses` gives each its own loss.

        Returns:
            Metrics of the pass, and the columns of the loss's reads for every row, in the order of the rows.
        """

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Metrics:
        """Make one optimizer and schedule step with the gradient so far, as `train_step` does, and begin a new one.

        Args:
            settings: Settings of this step in place of the config's.
            adapter: Place of the adapter that steps alone, if the model has several: the gradients and the optimizer
                states of the others stay as they are.

        Raises:
            ValueError: If there is no gradient, or a setting that the optimizer does not have.
            RLError: If more steps in a row were skipped than the config allows.
        """

    def discard(self, *, adapter: int | None = None) -> None:
        """Begin a new gradient; the one so far, if any, is not stepped.

        Args:
            adapter: Place of the only adapter whose gradient is discarded.
        """

    @property
    def adapters(self) -> Adapters:
        """The adapters of a model that has several (`lora_cfg.max_adapters`); calls on others raise a `ValueError`."""

    def train_step(self, batch: Batch, loss: Loss) -> Metrics:
        """Exactly one optimizer and schedule step on the whole batch: `accumulate` and `apply` in one call.

        A gradient that is not finite skips the optimizer step: weights and optimizer state stay as they are, and the
        schedule advances nonetheless, so that it counts calls. `ModelConfig.max_skipped_steps` bounds skips in a row.

        Metrics hold `loss`, `grad_norm` (before clipping), `lr`, `num_tokens`, `skipped_steps` (1 if the optimizer did
        not step, else 0) and whatever the loss reports.

        Raises:
            RLError: If more steps in a row were skipped than the config allows.
        """


@dataclass(frozen=True)
class Rendezvous:
    """Address where the ranks of one model meet, and the device of each.

    Args:
        rank, world_size: among the ranks of this model.
        local_rank: Among its ranks on the same node.
        address, port: where rank 0 listens.
        device: Name of the kind of device; the rank computes on the first one that its process sees.
        timeout_s: Bound of every collective. It is longer than a phase of a weight sync may take, because the ranks
            that bring weights together wait in a collective for one whose receivers do not answer.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    device: str
    timeout_s: float = 660.0

    @property
    def kind(self) -> Device:
        """The device that this rank computes on."""
        return device_named(self.device)


@dataclass(frozen=True)
class ModelSpec:
    """The purpose of a model in this run.

    Args:
        role: Decides the head.
        trains: True if it has an optimizer.
        keeps_reference: True if it keeps its initial weights, off the device, for `infer(reference=True)`; they change
            only by `update_reference`.
        seed: Seed of dropout and of newly made heads.
        exact: True if its logprobs have the bits of the generator (`GenerationConfig.exact`).
    """

    role: Role = "policy"
    trains: bool = True
    keeps_reference: bool = False
    seed: int = 0
    exact: bool = False


class ModelWorker(Resident, WeightSource, Protocol):
    """One rank of a model, in its own process.

    Built as `Worker(config, backend, spec, rendezvous)` with the neutral `rl_core.model_config.ModelConfig`, the
    backend's own config and a `ModelSpec`; the constructor joins the process group, builds and loads the model. Every
    method is called on all ranks of the model in the same order. A rank's shard may have zero rows.
    """

    def coordinates(self) -> Coordinates:
        """Return this rank's place on the mesh."""

    def infer(
        self, batch: Batch, reads: Sequence[Read], *, reference: bool = False, temperature: float = 1.0
    ) -> Batch | None:
        """Return the results for this rank's shard; None on ranks that do not lead their shard
        (`Coordinates.leads`)."""

    def update_reference(self, share: float = 1.0) -> None:
        """Do this rank's part of `Model.update_reference`."""

    def evaluate(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Compute this rank's part of each metric of `Model.evaluate`, none on ranks that do not lead."""

    def accumulate(self, batch: Batch, loss: Loss) -> tuple[Mapping[str, Metric], Batch | None]:
        """Do this rank's part of `Model.accumulate`; the columns are None on ranks that do not lead their shard."""

    def apply(self, settings: StepSettings | None = None, *, adapter: int | None = None) -> Mapping[str, Metric]:
        """Do this rank's part of `Model.apply`; returns its metrics without a reduction."""

    def discard(self, *, adapter: int | None = None) -> None:
        """Do this rank's part of `Model.discard`."""

    def train_step(self, batch: Batch, loss: Loss) -> Mapping[str, Metric]:
        """Make the step of `Model.train_step`; returns its metrics without a reduction."""

    def save(self, path: str, *, wait: bool = True) -> None:
        """Do this rank's part of `Model.save`."""

    def finish_save(self, *, wait: bool = True) -> tuple[SavedFile, ...] | None:
        """Return the files that this rank wrote for the last save; without `wait` it takes part in no collective."""

    def load(self, path: str, *, files: Sequence[SavedFile] = ()) -> None:
        """Do this rank's part of `Model.load`."""

    def export(self, path: str) -> tuple[SavedFile, ...]:
        """Do this rank's part of `Model.export`."""

    def export_adapter(self, path: str) -> tuple[SavedFile, ...]:
        """Do this rank's part of `Model.export_adapter`."""

    def health(self) -> Mapping[str, Any]:
        """Memory in use and other signs that the rank is alive; takes part in no collective.

        A worker that measures it also returns `peak_bytes`: the largest number of bytes that each phase (`training`,
        `logprobs`, `weight_sync`, `save`) took since the last call.
        """

    def close(self) -> None:
        """Leave the process group and free the device, once a save that is under way has ended."""
