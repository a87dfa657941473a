"""Conformance suite of model workers.

A backend subclasses it in its tests and states how to build a worker::

    class TestMyWorker(ModelWorkerSuite):
        factory = "my_factories:build"   # build(config, spec, rendezvous) -> ModelWorker

Everything is compared with transformers in float64, row by row in one process (`rl_core.selfcheck.torch.oracle`).
"""

from __future__ import annotations

import hashlib
import importlib
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from rl_core.data.batch import Batch
from rl_core.data.microbatch import PREFIX_GROUP
from rl_core.data.ragged import Ragged
from rl_core.errors import RLError, WorkerError
from rl_core.model import (
    COLLISION,
    ENTROPY,
    LOGPROBS,
    SCORES,
    VALUES,
    Loss,
    ModelSpec,
    Role,
    StepSettings,
    logprobs_at,
    topk,
)
from rl_core.model_config import (
    DynamicBatchingConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    SequencePackingConfig,
    TokenizerConfig,
)
from rl_core.selfcheck.losses import PairLoss, ReturnsLoss, TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import Rank, RankPool, free_port
from rl_core.token_filter import ALLOWED, TokenFilter, allowed_row, packed_set
from rl_core.weights import Transport

TOLERANCE = 1e-5
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.05, "momentum": 0.9})
ADAMW = OptimizerConfig(name="torch.optim.AdamW", kwargs={"lr": 1e-3, "weight_decay": 0.01})
MUON = OptimizerConfig(
    name="torch.optim.Muon",
    kwargs={"lr": 0.01, "weight_decay": 0.1, "ns_dtype": "float32", "adamw": {"lr": 1e-3, "eps": 1e-3}},
)
WARM_UP = [
    SchedulerConfig(name="torch.optim.lr_scheduler.LinearLR", kwargs={"start_factor": 0.5, "total_iters": 2}),
    SchedulerConfig(name="torch.optim.lr_scheduler.ConstantLR", kwargs={"factor": 0.1, "total_iters": 100}),
    SchedulerConfig(milestones=[2]),
]
SCHEDULED: dict[str, Any] = {"optimizer": ADAMW, "scheduler": WARM_UP}
PADDED = {"sequence_packing": SequencePackingConfig(enabled=False)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "packed-16": {"sequence_packing": SequencePackingConfig(train_mb_tokens=16, logprob_mb_tokens=24)},
    "packed-whole": {"sequence_packing": SequencePackingConfig(train_mb_tokens=4096, logprob_mb_tokens=4096)},
    "padded-1": {**PADDED, "train_micro_batch_size": 1, "logprob_batch_size": 2},
    "padded-3": {**PADDED, "train_micro_batch_size": 3, "logprob_batch_size": 4},
    "padded-alike": {
        **PADDED,
        "dynamic_batching": DynamicBatchingConfig(enabled=True, train_mb_tokens=30, logprob_mb_tokens=40),
    },
}
LENGTHS = (9, 3, 17, 1, 12, 2, 7)


def make_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, vocab: int = 101) -> Batch:
    """Return random rows with the columns that the losses of `rl_core.selfcheck.losses` need, except pairs."""
    rng = np.random.default_rng(seed)
    tokens = Ragged.from_rows([rng.integers(0, vocab, length) for length in lengths], dtype=np.int32)
    mask = (rng.random(len(tokens.values)) < 0.7).astype(np.int8)
    return Batch(
        {
            "tokens": tokens,
            "loss_mask": tokens.like(mask),
            "weights": tokens.like(rng.normal(size=len(mask)).astype(np.float32)),
            "returns": tokens.like(rng.normal(size=len(mask)).astype(np.float32)),
            "candidates": tokens.like(make_candidates(rng, len(mask), vocab)),
        }
    )


def make_candidates(rng: np.random.Generator, num_tokens: int, vocab: int) -> np.ndarray:
    """Return random ids int32 `[tokens, 4]`: one twice in each row, and fewer than four in some."""
    candidates = rng.integers(0, vocab, (num_tokens, 4), dtype=np.int32)
    candidates[:, 3] = candidates[:, 0]
    return np.where(rng.random(candidates.shape) < 0.3, np.int32(-1), candidates)


def with_allowed_tokens(batch: Batch) -> Batch:
    """Return the batch with random sets of allowed tokens at some tokens of every second row."""
    rng, rows, vocab = np.random.default_rng(11), [], 101
    for number, tokens in enumerate(batch.ragged("tokens")):
        sets = [b""] * len(tokens)
        for place in range(1, len(tokens)) if number % 2 == 0 else ():
            if rng.random() < 0.7:
                is_allowed = rng.random(32 * -(-vocab // 32)) < rng.choice([0.05, 0.5, 0.95])
                is_allowed[tokens[place]], is_allowed[vocab:] = True, False
                sets[place] = packed_set(np.packbits(is_allowed, bitorder="little").view("<i4"))
        rows.append(allowed_row(sets))
    return batch.with_columns({ALLOWED: Ragged.from_rows(rows, np.uint8)})


def poison(batch: Batch) -> Batch:
    """Return the batch with an infinite weight in its first row, so only on one rank, that counts."""
    weights, mask = batch.ragged("weights"), batch.ragged("loss_mask")
    values = weights.values.copy()
    values[:2] = np.inf
    return batch.with_columns({"weights": weights.like(values), "loss_mask": mask.like(np.ones_like(mask.values))})


def make_pairs() -> Batch:
    """Return three random pairs of rows of different lengths, far apart in the batch."""
    lengths = tuple(int(length) for length in np.random.default_rng(3).integers(2, 15, 6))
    index = np.arange(6)
    columns = {"pair": index % 3, "is_chosen": index < 3}
    return make_batch(lengths, seed=4).only(["tokens"]).with_columns(columns)


def make_prefix_groups() -> Batch:
    """Return rows of three groups whose rows begin alike, one of them with a row that is the beginning, and one group
    of a single row."""
    rng = np.random.default_rng(6)
    rows, ids = [], []
    for group, prefix, rests in ((7, 11, (3, 0, 6)), (2, 9, (1, 4)), (5, 0, (8, 3)), (4, 5, (2,))):
        beginning = rng.integers(0, 101, prefix)
        for rest in rests:
            rows.append(np.concatenate([beginning, rng.integers(0, 101, rest)]))
            ids.append(group)
    order = rng.permutation(len(rows))
    tokens = Ragged.from_rows([rows[index] for index in order], dtype=np.int32)
    return Batch({"tokens": tokens, PREFIX_GROUP: np.array(ids)[order]})


@contextmanager
def held_up(pool: RankPool, num_ranks: int, function: str, gate: Path) -> Iterator[None]:
    """Make calls of a function wait in all ranks' processes until the file `gate` exists, and raise an `OSError` with
    its text, if it has any, in the last rank."""
    pool.run(_hold_up, [(function, str(gate))] * num_ranks)
    try:
        yield
    finally:
        gate.touch()
        pool.run(_let_go, [(function,)] * num_ranks)


def _hold_up(rank: Rank, function: str, gate: str) -> None:
    module, _, name = function.rpartition(".")
    original = getattr(importlib.import_module(module), name)
    is_last = rank.rendezvous.rank == rank.rendezvous.world_size - 1

    def waiting(*args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + 60
        while not Path(gate).exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        if is_last and (text := Path(gate).read_text()):
            raise OSError(text)
        return original(*args, **kwargs)

    rank.held[function] = original
    setattr(importlib.import_module(module), name, waiting)


def _let_go(rank: Rank, function: str) -> None:
    module, _, name = function.rpartition(".")
    setattr(importlib.import_module(module), name, rank.held.pop(function))


def _digests(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of every file by relative path."""
    contents = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name.as_posix(): (len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}


class ModelWorkerSuite:
    """Conformance of a `ModelWorker`. Subclass it, name the subclass `Test...` and set `factory`."""

    factory: ClassVar[str]
    """`"module:function"`, called as `function(config, spec, rendezvous)` in every rank's process."""
    worlds: ClassVar[tuple[int, ...]] = (1, 2)
    """Numbers of ranks to run on."""
    tolerance: ClassVar[float] = TOLERANCE
    written_through: ClassVar[str] = "os.fsync"
    """A function that a save in the background calls as `module.function`, in the rank's process or a fork of it, and
    that the call of `save` does not; the suite holds it up."""

    @pytest.fixture(scope="session")
    @classmethod
    def pool(cls) -> Iterator[RankPool]:
        """Yield processes for all tests of the session."""
        with RankPool(max(cls.worlds)) as pool:
            yield pool

    @pytest.fixture(scope="session")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a tiny model with a tied head."""
        return cls._tiny_model(tmp_path_factory.mktemp("tied"))

    @pytest.fixture(scope="session")
    @classmethod
    def untied_folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a tiny model of another family with its own head."""
        return cls._tiny_model(tmp_path_factory.mktemp("untied"), "llama")

    @pytest.fixture(autouse=True)
    def _set_up(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_read_of_a_policy_is_that_of_transformers(self, layout: str) -> None:
        reads = [LOGPROBS, ENTROPY, topk(3), logprobs_at("candidates")]
        batch = make_batch()
        expected = self._oracle().infer(batch, reads, temperature=0.7)
        for world in self.worlds:
            with self._model(world, ModelSpec(trains=False), **LAYOUTS[layout]) as model:
                found = model.infer(batch, reads, temperature=0.7)
            is_ordered = (np.diff(expected["topk_logprobs"], axis=1) < 0).all(1)  # a tie has no order
            assert is_ordered.mean() > 0.5
            for name, column in expected.items():
                chosen = is_ordered if name == "topk_ids" else slice(None)
                self._assert_close(found.ragged(name).values[chosen], column[chosen], name)
                assert np.array_equal(found.ragged(name).offsets, batch.ragged("tokens").offsets)
            assert found.ragged("logprobs").values.dtype == np.float32
            assert found.ragged("topk_ids").values.dtype == np.int32

    def test_the_most_likely_of_the_ids_that_two_models_share(self) -> None:
        batch = make_batch()
        expected = self._oracle().infer(batch, [topk(3, below=60)])
        assert expected["topk_ids"].max() < 60
        with self._model(None, ModelSpec(trains=False)) as model:
            found = model.infer(batch, [topk(3, below=60)])
        self._assert_close(found.ragged("topk_logprobs").values, expected["topk_logprobs"], "topk_logprobs")
        assert found.ragged("topk_ids").values.max() < 60

    @pytest.mark.parametrize(
        "token_filter",
        [TokenFilter(top_k=20), TokenFilter(top_k=60, top_p=0.9, min_p=0.01), TokenFilter(top_p=0.9, allowed=True)],
        ids=str,
    )
    def test_reads_are_of_the_tokens_that_a_filter_keeps(self, token_filter: TokenFilter) -> None:
        reads = [replace(read, token_filter=token_filter) for read in (LOGPROBS, ENTROPY, COLLISION)]
        batch = with_allowed_tokens(make_batch())
        expected = self._oracle().infer(batch, reads, temperature=0.7)
        for world in self.worlds:
            with self._model(world, ModelSpec(trains=False)) as model:
                found = model.infer(batch, reads, temperature=0.7)
            for name, column in expected.items():
                self._assert_close(found.ragged(name).values, column, name)

    def test_an_untied_head_reads_alike(self, untied_folder: Path) -> None:
        batch = make_batch()
        expected = self._oracle(untied_folder).infer(batch, [LOGPROBS])
        with self._model(None, ModelSpec(trains=False), folder=untied_folder) as model:
            self._assert_close(
                model.infer(batch, [LOGPROBS]).ragged("logprobs").values, expected["logprobs"], "logprobs"
            )

    def test_scores_are_those_of_a_sequence_classifier(self, tmp_path: Path) -> None:
        batch = make_batch()
        for world in self.worlds:
            path = tmp_path / str(world)
            with self._model(world, ModelSpec(role="reward_model", seed=5)) as model:
                model.export(str(path))
                found = model.infer(batch, [SCORES]).array("scores")
            self._assert_close(found, self._oracle(path, "reward_model").infer(batch, [SCORES])["scores"], "scores")
        with self._model(1, ModelSpec(role="reward_model", seed=6), folder=path) as model:
            self._assert_close(model.infer(batch, [SCORES]).array("scores"), found, "scores of the exported head")
        with pytest.raises(WorkerError, match=r"is not a reward model, because its files have no score\.weight"):
            self._model(1, ModelSpec(role="reward_model", trains=False))

    def test_values_are_those_of_the_state_before_each_token(self, tmp_path: Path) -> None:
        batch = make_batch()
        with self._model(1, ModelSpec(role="critic")) as model:
            assert not model.infer(batch, [VALUES]).ragged("values").values.any(), "a new value head is zero"
        with self._model(1, ModelSpec(role="reward_model", seed=5)) as model:
            model.export(str(tmp_path / "reward_model"))
        for world in self.worlds:
            path = tmp_path / str(world)
            with self._model(world, ModelSpec(role="critic"), folder=tmp_path / "reward_model", optimizer=SGD) as model:
                found = model.infer(batch, [VALUES, SCORES])
                oracle = self._oracle(tmp_path / "reward_model", "critic")
                expected = oracle.infer(batch, [VALUES, SCORES])
                self._assert_close(found.ragged("values").values, expected["values"], "values")
                self._assert_close(found.array("scores"), expected["scores"], "values of the last states")
                self._assert_trains_like(model, oracle, [batch] * 2, ReturnsLoss())
                model.export(str(path))
                trained = self._oracle(path, "critic").infer(batch, [VALUES])["values"]
                self._assert_close(model.infer(batch, [VALUES]).ragged("values").values, trained, "exported values")

    @pytest.mark.parametrize("layout", ["packed-whole", "padded-3"])
    def test_scores_of_a_prefix_group_depend_on_its_own_rows_only(self, layout: str, tmp_path: Path) -> None:
        with self._model(1, ModelSpec(role="reward_model", seed=5)) as model:
            model.export(str(tmp_path))
        batch, reads = make_prefix_groups(), [VALUES, SCORES]
        expected = self._oracle(tmp_path, "reward_model").infer(batch, reads)
        for world in self.worlds:
            spec = ModelSpec(role="reward_model", trains=False)
            with self._model(world, spec, folder=tmp_path, **LAYOUTS[layout]) as model:
                found = model.infer(batch, reads)
                self._assert_close(found.ragged("values").values, expected["values"], "values")
                self._assert_close(found.array("scores"), expected["scores"], "scores")
                for chosen in (
                    np.flatnonzero(batch.array(PREFIX_GROUP) == 7),
                    np.argsort(batch.array(PREFIX_GROUP), kind="stable"),
                ):
                    alone = model.infer(batch.select(chosen), reads)
                    together = found.select(chosen)
                    assert np.array_equal(alone.array("scores"), together.array("scores"))
                    assert np.array_equal(alone.ragged("values").values, together.ragged("values").values)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_losses_gradients_and_weights_are_those_of_one_process(self, tmp_path: Path, layout: str) -> None:
        batches = [make_batch(seed=seed) for seed in range(2)]
        for world in self.worlds:
            oracle = self._oracle()
            with self._model(world, optimizer=SGD, **LAYOUTS[layout]) as model:
                self._assert_trains_like(model, oracle, batches, TokenLoss(temperature=0.8))
                path = tmp_path / str(world)
                model.export(str(path))
            trained = dict(self._oracle(path).model.named_parameters())
            for name, parameter in oracle.model.named_parameters():
                self._assert_close(trained[name].detach().numpy(), parameter.detach().numpy(), name)

    def test_pairs_stay_whole(self, tmp_path: Path) -> None:
        pairs = make_pairs()
        for world in self.worlds:
            path = tmp_path / str(world)
            spec = ModelSpec(role="reward_model")
            with self._model(world, spec, optimizer=SGD, **LAYOUTS["packed-16"]) as model:
                model.export(str(path))
                self._assert_trains_like(model, self._oracle(path, "reward_model"), [pairs] * 2, PairLoss())

    def test_gradients_of_several_batches_are_one_step(self) -> None:
        loss = TokenLoss(temperature=0.8)
        for world in self.worlds:
            oracle = self._oracle()
            with self._model(world, optimizer=SGD, **LAYOUTS["packed-16"]) as model:
                self._assert_accumulates_like(model, oracle, loss, None)
                model.accumulate(poison(make_batch()), loss)
                model.discard()
                oracle.optimizer.param_groups[0].update(lr=0.01, momentum=0.5)
                settings = StepSettings(0.01, max_grad_norm=0.1, kwargs={"momentum": 0.5})
                self._assert_accumulates_like(model, oracle, loss, settings)
                oracle.optimizer.param_groups[0].update(SGD.kwargs)
                self._assert_trains_like(model, oracle, [make_batch(seed=3)], loss)

    def test_a_gradient_is_applied_or_discarded(self) -> None:
        with self._model(optimizer=SGD) as model:
            with pytest.raises(WorkerError, match="no gradient to step with; call accumulate first"):
                model.apply()
            model.accumulate(make_batch(), TokenLoss())
            with pytest.raises(WorkerError, match="has a gradient and cannot leave its device; call apply or discard"):
                model.offload()
            with pytest.raises(WorkerError, match=r"SGD has no setting 'betas' for a step; it has .*momentum"):
                model.apply(StepSettings(kwargs={"betas": (0.9, 0.95)}))

    def test_ranks_without_rows_join_in(self) -> None:
        batch = make_batch((6,))
        with self._model(optimizer=SGD, keeps_reference=True) as model:
            oracle = self._oracle()
            expected = oracle.infer(batch, [LOGPROBS])["logprobs"]
            for reference in (False, True):
                found = model.infer(batch, [LOGPROBS], reference=reference).ragged("logprobs")
                self._assert_close(found.values, expected, "logprobs")
            self._assert_trains_like(model, oracle, [batch, make_batch()], TokenLoss())

    def test_a_batch_that_counts_for_nothing_changes_nothing(self) -> None:
        batch = make_batch()
        masked = batch.with_columns({"loss_mask": batch.ragged("tokens").like(np.zeros(sum(LENGTHS), dtype=np.int8))})
        with self._model(optimizer=SGD) as model:
            before = model.infer(batch, [LOGPROBS]).ragged("logprobs")
            metrics = model.train_step(masked, TokenLoss())
            assert metrics["loss"] == 0
            assert metrics["grad_norm"] == 0
            assert model.infer(batch, [LOGPROBS]).ragged("logprobs").equals(before)

    def test_a_gradient_that_is_not_finite_skips_the_optimizer_and_not_the_schedule(self) -> None:
        settings: dict[str, Any] = {"optimizer": SGD, "scheduler": WARM_UP, "max_skipped_steps": 1}
        with self._model(**settings) as model:
            before = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs")
            skipped = model.train_step(poison(make_batch()), TokenLoss())
            assert skipped["skipped_steps"] == 1
            assert not np.isfinite(skipped["grad_norm"])
            assert model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").equals(before)
            after = model.train_step(make_batch(), TokenLoss())
            assert after["skipped_steps"] == 0
            assert after["lr"] > skipped["lr"]
            model.train_step(poison(make_batch()), TokenLoss())
            with pytest.raises(WorkerError, match=r"2 training steps in a row.*max_skipped_steps=1"):
                model.train_step(poison(make_batch()), TokenLoss())
        with self._model(**settings) as model:
            assert model.train_step(make_batch(), TokenLoss())["grad_norm"] == after["grad_norm"]

    def test_metrics_are_those_of_the_whole_batch(self) -> None:
        batch = make_batch()
        logprobs = self._oracle().infer(batch, [LOGPROBS])["logprobs"]
        mask = batch.ragged("loss_mask").values
        nll = -(mask * logprobs).sum() / mask.sum()
        expected = {"nll": nll, "nll_by_count": nll, "lowest_logprob": logprobs.min(), "longest_row": max(LENGTHS)}
        expected |= {"rows": len(LENGTHS), "num_tokens": sum(LENGTHS), "lr": 0.05}
        for world in self.worlds:
            with self._model(world, optimizer=SGD, **LAYOUTS["packed-16"]) as model:
                evaluated = model.evaluate(batch, TokenLoss())
                again = model.evaluate(batch, TokenLoss())
                trained = model.train_step(batch, TokenLoss())
            assert evaluated == again
            for name, value in expected.items():
                assert trained[name] == pytest.approx(value, abs=self.tolerance), name
            assert {name: trained[name] for name in evaluated} == pytest.approx(evaluated, abs=self.tolerance)

    def test_the_norm_is_reported_before_clipping(self) -> None:
        batches = [make_batch(), make_batch(seed=1)]
        with self._model(optimizer=SGD, max_grad_norm=0.1) as model:
            self._assert_trains_like(model, self._oracle(), batches, TokenLoss(), max_grad_norm=0.1)
        with self._model(optimizer=SGD, max_grad_norm=None) as model:
            self._assert_trains_like(model, self._oracle(), batches, TokenLoss(), max_grad_norm=None)

    def test_schedules_follow_one_another(self) -> None:
        with self._model(1, optimizer=ADAMW, scheduler=WARM_UP) as model:
            rates = [model.train_step(make_batch((4, 5)), TokenLoss())["lr"] for _ in range(4)]
        assert rates == pytest.approx([5e-4, 7.5e-4, 1e-4, 1e-4])

    def test_norms_and_biases_are_not_decayed_if_the_config_says_so(self, tmp_path: Path) -> None:
        # A padding token has zeros as its embedding, so that gradients of biases after it are huge.
        folder = self._tiny_model(tmp_path / "model", "qwen2", pad_token_id=None)
        optimizer = OptimizerConfig(
            name="torch.optim.AdamW",
            kwargs={"lr": 0.01, "weight_decay": 5.0, "eps": 1e-3},
            decay_norms_and_biases=False,
        )
        cases: list[tuple[Role, Batch, TokenLoss | PairLoss]] = [
            ("policy", make_batch(), TokenLoss()),
            ("reward_model", make_pairs(), PairLoss()),
        ]
        for role, batch, loss in cases:
            path = tmp_path / role
            with self._model(None, ModelSpec(role=role), folder=folder, optimizer=optimizer) as model:
                model.export(str(path / "start"))
                oracle = self._oracle(path / "start", role)
                named = dict(oracle.model.named_parameters())
                oracle.decay_matrices_alone(optimizer)
                self._assert_trains_like(model, oracle, [batch] * 2, loss)
                model.export(str(path / "end"))
            for name, parameter in self._oracle(path / "end", role).model.named_parameters():
                self._assert_close(parameter.detach().numpy(), named[name].detach().numpy(), name)

    def test_frozen_parameters_stay_and_others_step_at_their_own_rates(self, tmp_path: Path) -> None:
        freeze = ["model.embed_tokens", "*.layers.0", "*.mlp.down_proj"]
        scaled = SGD.model_copy(update={"lr_scales": {"*.self_attn": 0.5, "*norm*": 3.0}})
        settings: dict[str, Any] = {"freeze": freeze, "optimizer": scaled}
        start, oracle, batches = self._oracle(), self._oracle(), [make_batch(seed=seed) for seed in range(3)]

        def rate(name: str) -> float:
            if any(fnmatch(name, f"{pattern}.*") for pattern in freeze):
                return 0.0
            return 0.5 if ".self_attn." in name else 3.0 if "norm" in name else 1.0

        oracle.train_by_name(SGD, rate)
        with self._model(**settings) as model:
            self._assert_trains_like(model, oracle, batches[:2], TokenLoss())
            model.save(str(tmp_path / "checkpoint"))
            expected = model.train_step(batches[2], TokenLoss())
            model.export(str(tmp_path / "end"))
        with self._model(**settings) as model:
            model.load(str(tmp_path / "checkpoint"))
            resumed = model.train_step(batches[2], TokenLoss())
            model.export(str(tmp_path / "resumed"))
        assert (resumed["loss"], resumed["grad_norm"]) == (expected["loss"], expected["grad_norm"])
        end = dict(self._oracle(tmp_path / "end").model.named_parameters())
        for name, parameter in self._oracle(tmp_path / "resumed").model.named_parameters():
            assert parameter.equal(end[name]), name
        oracle.train_step(batches[2], TokenLoss(), SGD, 1.0)
        named, before = dict(oracle.model.named_parameters()), dict(start.model.named_parameters())
        for name, parameter in end.items():
            if named[name].requires_grad:
                self._assert_close(parameter.detach().numpy(), named[name].detach().numpy(), name)
            assert parameter.equal(before[name]) == (not named[name].requires_grad), name

    def test_patterns_that_match_nothing_are_refused(self) -> None:
        for key, settings in (
            ("freeze", {"freeze": ["layers.0"]}),
            ("train_only", {"train_only": ["model.layers.7"]}),
            ("optimizer.lr_scales", {"freeze": ["*.layers.0"], "optimizer": OptimizerConfig(lr_scales={"*.0.mlp": 2})}),
        ):
            with pytest.raises(WorkerError, match=f"{key}: .* matches no parameter"):
                self._model(1, **settings)
        with pytest.raises(WorkerError, match="no parameter is left to train"):
            self._model(1, freeze=["model"])

    def test_muon_steps_whole_matrices_and_adamw_the_rest(self, tmp_path: Path) -> None:
        batches, oracle = [make_batch(seed=seed) for seed in range(3)], self._oracle()
        oracle.step_by_muon(MUON)
        with self._model(optimizer=MUON) as model:
            self._assert_trains_like(model, oracle, batches[:2], TokenLoss())
            model.save(str(tmp_path / "checkpoint"))
            expected = model.train_step(batches[2], TokenLoss())
            model.export(str(tmp_path / "end"))
        with self._model(optimizer=MUON) as model:
            model.load(str(tmp_path / "checkpoint"))
            resumed = model.train_step(batches[2], TokenLoss())
            model.export(str(tmp_path / "resumed"))
        assert (resumed["loss"], resumed["grad_norm"]) == (expected["loss"], expected["grad_norm"])
        oracle.train_step(batches[2], TokenLoss(), SGD, 1.0)
        end = dict(self._oracle(tmp_path / "end").model.named_parameters())
        for name, parameter in self._oracle(tmp_path / "resumed").model.named_parameters():
            assert parameter.equal(end[name]), name
            self._assert_close(end[name].detach().numpy(), oracle.model.get_parameter(name).detach().numpy(), name)

    def test_the_reference_stays_what_it_was(self) -> None:
        batch = make_batch()
        with self._model(optimizer=SGD, keeps_reference=True) as model:
            before = model.infer(batch, [LOGPROBS]).ragged("logprobs")
            assert model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").equals(before)
            model.train_step(batch, TokenLoss())
            trained = model.infer(batch, [LOGPROBS]).ragged("logprobs")
            assert not np.allclose(trained.values, before.values, atol=1e-3)
            assert model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").equals(before)
            assert model.infer(batch, [LOGPROBS]).ragged("logprobs").equals(trained)
            model.train_step(batch, TokenLoss())
            assert model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").equals(before)

    def test_a_reference_moves_towards_the_model_when_it_is_told_to(self, tmp_path: Path) -> None:
        batch = make_batch()
        with self._model(optimizer=SGD, keeps_reference=True) as model:
            model.train_step(batch, TokenLoss())
            trained = model.infer(batch, [LOGPROBS]).ragged("logprobs")
            model.export(str(tmp_path))
            mixed, end = self._oracle(), dict(self._oracle(tmp_path).model.named_parameters())
            for name, parameter in mixed.model.named_parameters():
                parameter.data.lerp_(end[name].data, 0.25)
            model.offload(("optimizer",))
            model.update_reference(0.25)
            moved = model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs")
            self._assert_close(moved.values, mixed.infer(batch, [LOGPROBS])["logprobs"], "logprobs of the reference")
            assert not moved.equals(trained)
            model.onload(("optimizer",))
            model.update_reference()
            assert model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").equals(trained)
            assert model.infer(batch, [LOGPROBS]).ragged("logprobs").equals(trained)
            model.train_step(batch, TokenLoss())
            assert model.infer(batch, [LOGPROBS], reference=True).ragged("logprobs").equals(trained)
            with pytest.raises(WorkerError, match=r"\(0, 1\]"):
                model.update_reference(0.0)
        with self._model(1) as model, pytest.raises(WorkerError, match="keeps no reference"):
            model.update_reference()

    def test_a_checkpoint_holds_a_reference_that_has_moved(self, tmp_path: Path) -> None:
        settings: dict[str, Any] = {"optimizer": ADAMW, "keeps_reference": True}
        batches = [make_batch(seed=seed) for seed in range(3)]
        for world in self.worlds:
            start, moved = tmp_path / f"start_{world}", tmp_path / f"moved_{world}"
            with self._model(world, **settings) as model:
                model.save(str(start))
                assert not (start / "reference").exists()
                model.train_step(batches[0], TokenLoss())
                model.update_reference(0.5)
                model.train_step(batches[1], TokenLoss())
                model.save(str(moved), wait=False)
                files = model.finish_save()
                assert files is not None
                assert {file.path: (file.size, file.sha256) for file in files} == _digests(moved)
                reference = model.infer(batches[2], [LOGPROBS], reference=True).ragged("logprobs")
                uninterrupted = model.train_steps(batches[2:], TokenLoss())
                with pytest.raises(WorkerError, match="before the reference was first updated"):
                    model.load(str(start))
                model.load(str(moved), files=files)
                assert model.infer(batches[2], [LOGPROBS], reference=True).ragged("logprobs").equals(reference)
            for resumed in self.worlds:
                with self._model(resumed, **settings) as model:
                    model.load(str(moved), files=files)
                    found = model.infer(batches[2], [LOGPROBS], reference=True).ragged("logprobs")
                    self._assert_close(found.values, reference.values, "logprobs of the reference")
                    if resumed == world:
                        assert found.equals(reference)
                        assert model.train_steps(batches[2:], TokenLoss()) == uninterrupted

    def test_a_resumed_run_is_bit_equal(self, tmp_path: Path) -> None:
        batches = [make_batch(seed=seed) for seed in range(4)]
        settings = {**SCHEDULED, "hf_config_overrides": {"attention_dropout": 0.2}}
        for world in self.worlds:
            path = str(tmp_path / str(world))
            with self._model(world, **settings) as model:
                for batch in batches[:2]:
                    model.train_step(batch, TokenLoss())
                model.save(path)
                uninterrupted = model.train_steps(batches[2:], TokenLoss())
            with self._model(world, **settings) as model:
                model.train_step(batches[3], TokenLoss())
                model.load(path)
                assert model.train_steps(batches[2:], TokenLoss()) == uninterrupted

    def test_a_save_in_the_background_holds_what_was_there_when_it_was_asked_for(self, tmp_path: Path) -> None:
        world = max(self.worlds)
        batches = [make_batch(seed=seed) for seed in range(4)]
        settings = {**SCHEDULED, "hf_config_overrides": {"attention_dropout": 0.2}}
        at_once, behind, gate = tmp_path / "at_once", tmp_path / "behind", tmp_path / "gate"
        with self._model(world, **settings) as model:
            assert model.finish_save(wait=False) == ()
            for batch in batches[:2]:
                model.train_step(batch, TokenLoss())
            model.save(str(at_once))
            with held_up(self._pool, world, self.written_through, gate):
                model.save(str(behind), wait=False)
                uninterrupted = model.train_steps(batches[2:], TokenLoss())
                assert model.finish_save(wait=False) is None
                gate.touch()
                written = model.finish_save()
            assert written
            assert model.finish_save(wait=False) == written
            # torch notes in hidden files where and when it wrote.
            ours, theirs = (
                {name: entry for name, entry in _digests(path).items() if not Path(name).name.startswith(".")}
                for path in (behind, at_once)
            )
            assert ours == theirs
            model.load(str(behind))
            assert model.train_steps(batches[2:], TokenLoss()) == uninterrupted

    def test_a_save_that_fails_in_the_background_is_told_once_and_the_next_one_works(self, tmp_path: Path) -> None:
        world = max(self.worlds)
        gate = tmp_path / "gate"
        with self._model(world, optimizer=ADAMW) as model:
            model.train_step(make_batch(), TokenLoss())
            with held_up(self._pool, world, self.written_through, gate):
                model.save(str(tmp_path / "lost"), wait=False)
                gate.write_text("No space left on device")
                with pytest.raises(RLError, match="No space left on device"):
                    model.finish_save()
            assert model.finish_save(wait=False) == ()
            model.save(str(tmp_path / "next"), wait=False)
            expected = model.train_steps([make_batch(seed=1)], TokenLoss())
            assert model.finish_save()
            model.load(str(tmp_path / "next"))
            assert model.train_steps([make_batch(seed=1)], TokenLoss()) == expected

    def test_ranks_name_the_files_they_write_and_none_writes_what_another_steps(self, tmp_path: Path) -> None:
        world = max(self.worlds)
        with self._model(world, optimizer=ADAMW) as model:
            model.train_step(make_batch(), TokenLoss())
            for wait in (True, False):
                path = tmp_path / f"waits_{wait}"
                model.save(str(path), wait=wait)
                files = model.finish_save()
                assert files is not None
                assert {file.path: (file.size, file.sha256) for file in files} == _digests(path)
                assert len({file.path for file in files}) == len(files)
                sizes = [sum(file.size for file in files if file.rank == rank) for rank in range(world)]
                assert max(sizes) < 1.5 * sum(sizes) / world, sizes
            exported = model.export(str(tmp_path / "exported"))
            there = {name: size for name, (size, _) in _digests(tmp_path / "exported").items()}
            assert {file.path: file.size for file in exported} == there
            assert model.export_adapter(str(tmp_path / "adapter")) == ()
            assert not (tmp_path / "adapter").exists()

    def test_a_damaged_file_is_named_and_nothing_is_loaded(self, tmp_path: Path) -> None:
        with self._model(optimizer=ADAMW) as model:
            model.save(str(tmp_path / "saved"))
            files = model.finish_save()
            assert files
            model.train_step(make_batch(), TokenLoss())
            before = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs")
            for file in files:
                path = tmp_path / "saved" / file.path
                content = path.read_bytes()
                path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
                with pytest.raises(RLError, match=f"{re.escape(file.path)} has other contents than were saved"):
                    model.load(str(tmp_path / "saved"), files=files)
                path.write_bytes(content)
            assert model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").equals(before)
            model.load(str(tmp_path / "saved"), files=files)

    def test_a_run_resumes_on_another_number_of_ranks(self, tmp_path: Path) -> None:
        batches = [make_batch(seed=seed) for seed in range(3)]
        for saved, resumed in ((min(self.worlds), max(self.worlds)), (max(self.worlds), min(self.worlds))):
            path = str(tmp_path / f"{saved}")
            with self._model(saved, optimizer=SGD, scheduler=WARM_UP) as model:
                model.train_step(batches[0], TokenLoss())
                model.save(path)
                uninterrupted = model.train_steps(batches[1:], TokenLoss())
            with self._model(resumed, optimizer=SGD, scheduler=WARM_UP) as model:
                model.load(path)
                for batch, expected in zip(batches[1:], uninterrupted, strict=True):
                    self._assert_metrics(model.train_step(batch, TokenLoss()), expected)

    def test_a_branch_steps_by_its_own_settings_on_another_number_of_ranks(self, tmp_path: Path) -> None:
        batches = [make_batch(seed=seed) for seed in range(3)]
        lower = OptimizerConfig(name=SGD.name, kwargs={**SGD.kwargs, "lr": 0.02})
        path = str(tmp_path / "origin")
        with self._model(min(self.worlds), optimizer=SGD, scheduler=WARM_UP) as model:
            model.train_step(batches[0], TokenLoss())
            model.save(path)
        found = []
        for world in sorted({min(self.worlds), max(self.worlds)}):
            with self._model(world, optimizer=lower, scheduler=WARM_UP[:1]) as model:
                model.load(path)
                found.append(model.train_steps(batches[1:], TokenLoss()))
        # the schedule is where the saved run's was: half-way to the whole rate
        assert [step["lr"] for step in found[0]] == pytest.approx([0.015, 0.02])
        for steps in found[1:]:
            for step, expected in zip(steps, found[0], strict=True):
                self._assert_metrics(step, expected)

    def test_a_run_saved_before_its_first_step_resumes(self, tmp_path: Path) -> None:
        with self._model(1, optimizer=ADAMW) as model:
            model.save(str(tmp_path / "start"))
            expected = model.train_steps([make_batch()] * 2, TokenLoss())
            model.load(str(tmp_path / "start"))
            assert model.train_steps([make_batch()] * 2, TokenLoss()) == expected

    def test_a_model_that_does_not_train_saves_and_loads_all_its_weights(self, tmp_path: Path) -> None:
        trained, exported, converted = (str(tmp_path / name) for name in ("trained", "exported", "converted"))
        frozen, few, many = ModelSpec(trains=False), min(self.worlds), max(self.worlds)
        with self._model(few, optimizer=SGD) as model:
            model.train_step(make_batch(), TokenLoss())
            model.save(trained)
            model.export(exported)
            expected = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        with self._model(many, frozen, folder=Path(exported)) as model:
            model.save(converted)
        for path in (trained, converted):
            with self._model(few, frozen) as model:
                before = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
                assert np.abs(before - expected).max() > 10 * self.tolerance, "the step changed too little to be seen"
                model.load(path)
                found = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
            self._assert_close(found, expected, "logprobs")

    def test_the_same_seed_gives_the_same_bits(self) -> None:
        runs = []
        for _ in range(2):
            with self._model(optimizer=ADAMW) as model:
                runs.append(model.train_steps([make_batch()] * 2, TokenLoss()))
        assert runs[0] == runs[1]

    def test_an_export_and_a_transfer_hold_the_same_weights(self, untied_folder: Path, tmp_path: Path) -> None:
        from rl_core.selfcheck.torch.received import receive, receiving_threads
        from rl_core.selfcheck.torch.tiny_model import read_weights

        for source, is_tied in ((self._folder, True), (untied_folder, False)):
            path = tmp_path / source.name
            template = TokenizerConfig(chat_template="{{ messages[0].content }}")
            with self._model(folder=source, optimizer=SGD, tokenizer=template) as model:
                model.train_step(make_batch(), TokenLoss())
                model.export(str(path))
                manifest = model.manifest(7)
                transport = Transport("collective", f"127.0.0.1:{free_port()}", 1, bucket_bytes=4096, timeout_s=60)
                with receiving_threads(1, partial(receive, manifest, transport)) as taken:
                    digest = model.send(manifest, transport)
            received, received_digest = taken[0]
            assert received_digest == digest
            assert (path / "chat_template.jinja").read_text() == template.chat_template
            assert manifest.version == 7
            assert dict(manifest.tied) == ({"lm_head.weight": "model.embed_tokens.weight"} if is_tied else {})
            exported = read_weights(path)
            assert received.keys() | manifest.tied.keys() == exported.keys()
            assert received.keys() >= set(manifest.tied.values())
            for name, tensor in received.items():
                assert tensor.dtype == exported[name].dtype
                assert tensor.equal(exported[name]), name

    def test_what_is_offloaded_comes_back_bit_equal(self) -> None:
        batch = make_batch()
        runs = []
        for offloads in (False, True):
            with self._model(optimizer=ADAMW) as model:
                metrics = model.train_steps([batch], TokenLoss())
                if offloads:
                    model.offload()
                    with pytest.raises(WorkerError, match="offloaded"):
                        model.infer(batch, [LOGPROBS])
                    model.onload(["parameters"])
                    model.infer(batch, [LOGPROBS])
                    with pytest.raises(WorkerError, match="optimizer"):
                        model.train_step(batch, TokenLoss())
                    model.onload(["optimizer"])
                runs.append([*metrics, *model.train_steps([batch], TokenLoss())])
        assert runs[0] == runs[1]

    def test_what_a_model_cannot_do_is_refused(self, tmp_path: Path) -> None:
        batch = make_batch((4, 5))
        with self._model(1, ModelSpec(trains=False)) as model:
            with pytest.raises(WorkerError, match="cannot read scores"):
                model.infer(batch, [SCORES])
            for column, message in (("missing", "missing"), ("tokens", r"\[tokens, k\]"), ("far", "ids from 0 to 101")):
                ids = batch.ragged("tokens").like(np.array([[0, 101]] * 9, dtype=np.int32))
                with pytest.raises(WorkerError, match=message):
                    model.infer(batch.with_columns({"far": ids}), [logprobs_at(column)])
            with pytest.raises(WorkerError, match="keeps no reference"):
                model.infer(batch, [LOGPROBS], reference=True)
            with pytest.raises(WorkerError, match="does not train"):
                model.train_step(batch, TokenLoss())
            with pytest.raises(WorkerError, match="weights"):
                model.evaluate(batch.only(["tokens", "loss_mask"]), TokenLoss())
            with pytest.raises(WorkerError, match="no checkpoint"):
                model.load(str(tmp_path / "nothing"))
            report = model.call("health")[0]
            assert report["memory_bytes"] > 0
            assert report["peak_bytes"]["logprobs"] > 0

    def test_overflows_in_float16_are_skipped_and_halve_the_scale_of_the_loss(self, tmp_path: Path) -> None:
        # A padding token has zeros as its embedding, whose gradient is beyond float16.
        folder = self._tiny_model(tmp_path / "model", pad_token_id=None)
        settings: dict[str, Any] = {"precision": "float16", "optimizer": SGD, "max_skipped_steps": 0, "folder": folder}
        batch, oracle = make_batch(), self._oracle(folder)
        expected = oracle.train_step(batch, TokenLoss(), SGD, 1.0)
        with self._model(**settings) as model:
            assert {spec.dtype for spec in model.manifest(1).tensors} == {"float16"}
            # The loss is a sum, whose gradient overflows until the scale is small.
            steps: list[Mapping[str, float]] = []
            while not steps or steps[-1]["overflows"]:
                assert len(steps) < 16, steps[-1]
                steps.append(model.train_step(batch, TokenLoss()))
            model.export(str(tmp_path / "before"))
            overflow = model.train_step(poison(batch), TokenLoss())
            model.export(str(tmp_path / "after"))
            model.save(str(tmp_path / "checkpoint"))
            uninterrupted = model.train_step(batch, TokenLoss())
            model.export(str(tmp_path / "end"))
        with self._model(**settings) as model:
            model.load(str(tmp_path / "checkpoint"))
            resumed = model.train_step(batch, TokenLoss())
            model.export(str(tmp_path / "resumed"))
        for number, step in enumerate(steps):
            assert step["loss_scale"] == 2.0 ** (16 - number)
            assert step["overflows"] == step["skipped_steps"] == float(number < len(steps) - 1)
        scale = steps[-1]["loss_scale"]
        assert (overflow["overflows"], overflow["loss_scale"], resumed["loss_scale"]) == (1, scale, scale / 2)
        assert steps[-1]["loss"] == pytest.approx(expected["loss"], rel=2e-3)
        assert steps[-1]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)
        assert (resumed["loss"], resumed["grad_norm"]) == (uninterrupted["loss"], uninterrupted["grad_norm"])
        weights = {
            name: dict(self._oracle(tmp_path / name).model.named_parameters())
            for name in ("before", "after", "end", "resumed")
        }
        for name, parameter in oracle.model.named_parameters():
            assert weights["before"][name].equal(weights["after"][name]), name
            assert weights["end"][name].equal(weights["resumed"][name]), name
            assert (weights["before"][name] - parameter).abs().max() < 2e-3, name

    def test_half_precision_is_near(self, tmp_path: Path) -> None:
        batch = make_batch()
        oracle = self._oracle()
        expected = oracle.infer(batch, [LOGPROBS])["logprobs"]
        with self._model(precision="bfloat16", optimizer=SGD) as model:
            found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
            metrics = model.train_step(batch, TokenLoss())
            assert {spec.dtype for spec in model.manifest(1).tensors} == {"bfloat16"}
        assert np.abs(found - expected).max() < 0.3
        assert np.abs(found - expected).mean() < 0.05
        assert metrics["loss"] == pytest.approx(oracle.loss(batch, TokenLoss()).item(), rel=0.05)

    def _model(
        self,
        num_ranks: int | None = None,
        spec: ModelSpec | None = None,
        *,
        folder: Path | None = None,
        **settings: Any,
    ) -> PooledModel:
        """Build a model of the tied folder, on the maximum number of ranks unless stated otherwise."""
        spec = spec or ModelSpec(keeps_reference=settings.pop("keeps_reference", False))
        settings = {"precision": "float32", "logprob_chunk_size": 5, **settings}
        config = ModelConfig(model_name=str(folder or self._folder), **settings)
        return PooledModel(self._pool, self.factory, config, spec, num_ranks or max(self.worlds))

    @staticmethod
    def _tiny_model(folder: Path, family: str = "qwen3", **fields: Any) -> Path:
        from rl_core.selfcheck.torch.tiny_model import write_tiny_model

        return write_tiny_model(folder, family, **fields)

    def _oracle(self, folder: Path | None = None, role: Any = "policy") -> Any:
        from rl_core.selfcheck.torch.oracle import Oracle

        return Oracle(folder or self._folder, role)

    def _assert_trains_like(
        self, model: PooledModel, oracle: Any, batches: list[Batch], loss: Loss, max_grad_norm: float | None = 1.0
    ) -> None:
        for batch in batches:
            expected = oracle.train_step(batch, loss, SGD, max_grad_norm)
            self._assert_metrics(model.train_step(batch, loss), expected)

    def _assert_accumulates_like(
        self, model: PooledModel, oracle: Any, loss: Loss, settings: StepSettings | None
    ) -> None:
        batches = [make_batch(), make_batch((6,), seed=1), make_batch(seed=2)]
        logprobs = [oracle.infer(batch, [LOGPROBS], loss.temperature)["logprobs"] for batch in batches]
        chosen = settings or StepSettings(0.05, max_grad_norm=1.0)
        expected = oracle.train_step(batches, loss, SGD, chosen.max_grad_norm)
        found = [model.accumulate(batch, loss) for batch in batches]
        applied, total = model.apply(settings), sum(metrics["loss"] for metrics, _ in found)
        self._assert_metrics({**applied, "loss": total}, {**expected, "lr": chosen.lr or 0.0})
        for (_, columns), own in zip(found, logprobs, strict=True):
            self._assert_close(columns.ragged("logprobs").values, own, "logprobs")

    def _assert_metrics(self, found: Mapping[str, float], expected: Mapping[str, float]) -> None:
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=self.tolerance, abs=self.tolerance), name

    def _assert_close(self, found: np.ndarray, expected: np.ndarray, name: str) -> None:
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=self.tolerance, atol=self.tolerance, err_msg=name)
