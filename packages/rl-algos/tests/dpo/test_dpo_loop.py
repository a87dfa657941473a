"""The loop with a stand-in for the model whose loss is computed for real, by the implementation that workers run."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from file_loss import path_of

from rl_algos.data.config import DataConfig
from rl_algos.dpo.algorithm import DPO
from rl_algos.dpo.loss import LOSSES
from rl_algos.dpo.plugin import PLUGIN, dpo_section
from rl_core.data.batch import Batch
from rl_core.errors import DataError
from rl_core.metrics import Metric
from rl_core.plugins import resolve
from rl_core.run import Components
from rl_core.testing.fakes import FakeModel, FakeRun
from rl_core.torch.rows import to_rows
from rl_core.user_code import implementation_name


class UnigramPolicy(FakeModel):
    """A policy with one logit for each token, whatever went before: it learns which tokens are preferred."""

    def __init__(self, num_tokens, lr=0.5):
        super().__init__()
        self.logits = torch.zeros(num_tokens, requires_grad=True)
        self._lr = lr

    def infer(self, batch, reads, *, reference=False, temperature=1.0):
        logits = torch.zeros_like(self.logits) if reference else self.logits.detach()
        tokens = batch.ragged("tokens")
        return Batch({"logprobs": tokens.like(self._logprobs(tokens.values, logits).numpy())})

    def evaluate(self, batch, loss):
        return self._pass(batch, loss)[1]

    def train_step(self, batch, loss):
        share, metrics = self._pass(batch, loss)
        (gradient,) = torch.autograd.grad(share, [self.logits])
        with torch.no_grad():
            self.logits -= self._lr * gradient / gradient.norm().clamp(min=1.0)
        return metrics

    def _pass(self, batch, loss):
        totals = loss.totals(batch)
        rows = to_rows(batch.only(["tokens", *loss.columns]).local(), torch.device("cpu"))
        compute = resolve(implementation_name(loss, loss.implementation))
        sums = compute(loss, {"logprobs": self._logprobs(batch.ragged("tokens").values, self.logits)}, rows)
        share = sums.loss(totals)
        metrics = {
            name: Metric(
                part.value.item(),
                totals[part.denominator] if isinstance(part.denominator, str) else float(part.denominator),
            )
            for name, part in sums.metrics.items()
        }
        return share, {
            **metrics,
            "loss": Metric(share.item(), reduction="sum"),
            "num_tokens": Metric(float(len(rows["tokens"])), reduction="sum"),
        }

    def _logprobs(self, tokens, logits):
        return logits.log_softmax(0)[torch.from_numpy(tokens.astype(np.int64))]


def trained(tmp_path, tokenizer, loss, *, steps=6, also=None, lr=0.5, **dpo):
    """What is recorded of a run on pairs of which the chosen response is `a` and the rejected one `b`."""
    rows = [{"prompt": str(number), "chosen": "aa", "rejected": "bab", **(also or {})} for number in range(8)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {"loss": loss, "max_num_steps": steps, "val_at_start": True, "val_at_end": True, "val_period": 0, **dpo}
    config = SimpleNamespace(
        dpo=dpo_section(written).model_validate(written),
        data=DataConfig.model_validate({"train": {"data_path": str(path)}, "validation": {"data_path": str(path)}}),
        policy=SimpleNamespace(train_global_batch_size=4, max_total_sequence_length=32),
    )
    policy, run = UnigramPolicy(len(tokenizer), lr), FakeRun()
    algorithm = DPO()
    data = algorithm.prepare(config, tokenizer, algorithm.load(config))
    algorithm.run(config, Components(models={"policy": policy}, data=data), run)
    assert set(PLUGIN.validation_metrics(config) or ()) <= set(run.metrics[0])
    return run


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_teaches_what_is_preferred(tmp_path, tokenizer, name):
    # With its default tau, discopop does not turn around a pair of which the policy has no opinion.
    run = trained(tmp_path, tokenizer, {"name": name, "tau": 1.0} if name == "discopop" else name)
    before, after = run.metrics[0], run.metrics[6]
    assert after["val/loss"] < before["val/loss"]
    assert after["val/accuracy"] == 1.0
    if name != "kto":
        assert after["val/margin"] > before["val/margin"]
    else:
        assert after["val/reward_desirable"] > 0 > after["val/reward_undesirable"]


def test_losses_of_a_file_learn_from_pairs_or_from_single_responses(tmp_path, tokenizer):
    of_pairs = trained(tmp_path, tokenizer, {"name": path_of(tmp_path, "Pairs"), "target": 0.5}, lr=0.02)
    assert of_pairs.metrics[0]["val/loss"] == pytest.approx(0.25)
    assert of_pairs.metrics[0]["val/num_pairs"] == 8
    assert of_pairs.metrics[6]["val/loss"] < 0.25
    judged = trained(tmp_path, tokenizer, path_of(tmp_path, "Judged"))
    assert judged.metrics[0]["val/num_responses"] == 16
    assert judged.metrics[6]["val/loss"] < judged.metrics[0]["val/loss"]


def test_a_loss_that_reads_margins_refuses_pairs_without_one(tmp_path, tokenizer):
    with pytest.raises(DataError, match="the pair has no margin"):
        trained(tmp_path, tokenizer, path_of(tmp_path, "Margins"))
    run = trained(tmp_path, tokenizer, path_of(tmp_path, "Margins"), steps=1, also={"margin": 1.0})
    assert "train/loss" in run.metrics[1]


def test_a_validation_of_a_loss_with_several_totals_says_what_it_needs(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"Uncounted\.totals .*responses, tokens"):
        trained(tmp_path, tokenizer, path_of(tmp_path, "Uncounted"))


def test_the_first_loss_is_that_of_no_opinion(tmp_path, tokenizer):
    run = trained(tmp_path, tokenizer, "dpo")
    assert run.metrics[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run.metrics[1]["train/accuracy"] == 0.5
    assert trained(tmp_path, tokenizer, "kto").metrics[1]["train/loss"] == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(("loss", "reads"), [("dpo", True), ("simpo", False), ("kto", True)])
def test_logprobs_are_read_in_a_phase_of_their_own_if_the_loss_needs_them(tmp_path, tokenizer, loss, reads):
    run = trained(tmp_path, tokenizer, loss, steps=1)
    assert run.phases == ["validation", "data", *(["logprobs"] if reads else []), "training", "validation"]


def test_a_kept_reference_trains_the_same(tmp_path, tokenizer):
    runs = [trained(tmp_path, tokenizer, "dpo", cache_reference_logprobs=cached).metrics for cached in (False, True)]
    assert runs[0] == runs[1]


def test_options_of_losses_train_with_what_they_need_of_the_batch(tmp_path, tokenizer):
    """Each changes the first step of the policy, which has no opinion, and teaches the same preference."""
    options = {
        "plain": {},
        "mixed": {"added_losses": {"bco": {"weight": 0.5}, "aot": {"weight": 0.5}}},
        "length": {"ld_alpha": 0.2},
        "divergence": {"f_divergence": "js_divergence"},
        "margin": {"loss": {"name": "dpo", "margin_weight": 0.5}, "also": {"margin": 2.0}},
    }
    runs = {name: trained(tmp_path, tokenizer, **{"loss": "dpo", **each}).metrics for name, each in options.items()}
    losses = {name: round(metrics[6]["val/loss"], 6) for name, metrics in runs.items()}
    assert len(set(losses.values())) == len(options), losses
    assert all(metrics[6]["val/accuracy"] == 1.0 for metrics in runs.values())
    assert runs["margin"][1]["train/loss"] == pytest.approx(math.log1p(math.e), abs=1e-6)
    assert {"train/preference_loss_bco", "val/preference_loss_aot"} <= set(runs["mixed"][1]) | set(runs["mixed"][6])
