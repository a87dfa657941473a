"""A head that trains in the processes of its policy."""

import json
import shutil

import numpy as np
import pytest
from draft_head_cases import (
    OF_FAMILY,
    OF_HEAD,
    HeadLoss,
    attend_in_parts,
    reference_losses,
    reference_mtp_losses,
    write_head,
    write_mtp,
)
from safetensors.torch import load_file

from rl_core.metrics import reduce_metrics
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import DraftHeadConfig, HeadOptimizerConfig, ModelConfig, SequencePackingConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import free_port
from rl_core.selfcheck.torch.received import receive, receiving_threads
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.exhaustive import partly_exhaustive
from rl_core.testing.model_worker import make_batch
from rl_core.weights import Transport

EXACT = 2e-5
"""Largest relative difference of a float32 loss from that of the same formula in float64."""

ADAM = HeadOptimizerConfig(kwargs={"lr": 1e-2})


class PooledHead(PooledModel):
    """A policy with a head, which the calls of `train_head` and those of `draft_head.` are of."""

    def train_head(self, batch):
        rows = self._rows_per_shard(batch)
        return reduce_metrics(self._call_shards("draft_head.train_step", batch, rows, HeadLoss()))


def open_model(ranks, policy, head, num_ranks=1, *, packed=True, num_tokens=3, precision="float32", **settings):
    config = ModelConfig(
        model_name=str(policy),
        precision=precision,
        train_micro_batch_size=2,
        sequence_packing=SequencePackingConfig(enabled=packed, train_mb_tokens=24 if packed else None),
        draft_head=DraftHeadConfig(model_name=str(head), num_tokens=num_tokens, optimizer=ADAM),
    )
    return PooledHead(ranks, "dtensor_factories:build", config, ModelSpec(), num_ranks, **settings)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("policy"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module", params=partly_exhaustive(OF_FAMILY, always=["glm4_moe"]))
def with_layer(request, tmp_path_factory):
    return write_mtp(tmp_path_factory.mktemp("model"), request.param)


def expected(policy, head, batch, num_tokens=3, reference=reference_losses):
    rows = list(batch.ragged("tokens"))
    masks = list(batch.ragged("loss_mask"))
    losses = reference(policy, head, rows, num_tokens)
    total = sum(int(mask.sum()) for mask in masks)
    sums = sum((found.numpy() * (mask[:, None] > 0)).sum(0) for found, mask in zip(losses, masks, strict=True))
    return {f"loss_{place}": value / total for place, value in enumerate(sums)}


HEADS = {
    "its own output layer": {},
    "the output layer of the policy": {"own_head": False},
    "its own embedding": {"own_embedding": True},
    "a reduced vocabulary": {"drafted": [3, 4, 10, 11, 30, 57, 99]},
    "the normed hidden state as its residual": {"norm_before_residual": True},
}


@pytest.mark.parametrize("kind", partly_exhaustive(HEADS, always=["its own output layer", "a reduced vocabulary"]))
def test_losses_are_those_of_drafts_that_an_engine_makes(ranks, policy, kind, tmp_path):
    head, batch = write_head(tmp_path, **HEADS[kind]), make_batch()
    with open_model(ranks, policy, head) as model:
        found = model.train_head(batch)
    reference = expected(policy, head, batch)
    assert {name: found[name] for name in reference} == pytest.approx(reference, rel=EXACT)


def test_padded_and_packed_rows_and_two_ranks_make_the_same_steps(ranks, policy, head):
    def steps(num_ranks, **settings):
        with open_model(ranks, policy, head, num_ranks, **settings) as model:
            found = [model.train_head(make_batch(seed=seed)) for seed in range(3)]
        return np.array([(step["loss"], step["grad_norm"]) for step in found])

    expected = steps(1)
    for others in ((1, {"packed": False}), (2, {}), (2, {"dp_replicate_size": 2})):
        assert steps(others[0], **others[1]) == pytest.approx(expected, rel=1e-4), others


def test_a_head_in_half_precision_has_nearly_the_same_losses(ranks, policy, head):
    batch = make_batch()
    with open_model(ranks, policy, head, 2, precision="bfloat16") as model:
        found = model.train_head(batch)
        assert model.train_head(batch)["loss"] < found["loss"]
    reference = expected(policy, head, batch)
    assert {name: found[name] for name in reference} == pytest.approx(reference, rel=0.02)


def test_a_long_row_is_attended_to_in_parts(ranks, policy, head):
    batch = make_batch(lengths=(3, 40, 2))
    with open_model(ranks, policy, head) as model:
        whole = model.train_head(batch)
    with open_model(ranks, policy, head) as model:
        ranks.run(attend_in_parts, [(7,)])
        parts = model.train_head(batch)
        ranks.run(attend_in_parts, [(512,)])
    reference = expected(policy, head, batch)
    for found in (whole, parts):
        assert {name: found[name] for name in reference} == pytest.approx(reference, rel=EXACT)


def test_a_head_learns_and_leaves_its_policy_alone(ranks, policy, head):
    batch = make_batch()
    with open_model(ranks, policy, head, 2) as model:
        before = model.infer(batch, [LOGPROBS])["logprobs"].values
        losses = [model.train_head(batch)["loss"] for _ in range(12)]
        assert np.array_equal(model.infer(batch, [LOGPROBS])["logprobs"].values, before)
    assert losses[-1] < 0.9 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_a_head_reads_the_policy_as_it_is(ranks, policy, head, tmp_path):
    batch = make_batch()
    with open_model(ranks, policy, head) as model:
        for _ in range(3):
            model.train_step(batch, TokenLoss())
        model.export(str(tmp_path / "policy"))
        found = model.train_head(batch)
    reference = expected(tmp_path / "policy", head, batch)
    assert {name: found[name] for name in reference} == pytest.approx(reference, rel=EXACT)


def test_a_head_resumes_bit_for_bit_with_its_policy(ranks, policy, head, tmp_path):
    batches = [make_batch(seed=seed) for seed in range(4)]

    def train(model, batches):
        return [(model.train_step(each, TokenLoss())["loss"], model.train_head(each)["loss"]) for each in batches]

    with open_model(ranks, policy, head, 2) as model:
        train(model, batches[:2])
        model.save(str(tmp_path / "policy"))
        model.call("draft_head.save", str(tmp_path / "drafter"), wait=False)
        losses = train(model, batches[2:])
        model.call("draft_head.finish_save")
    with open_model(ranks, policy, head, 2) as model:
        model.load(str(tmp_path / "policy"))
        model.call("draft_head.load", str(tmp_path / "drafter"))
        assert train(model, batches[2:]) == losses


@pytest.mark.parametrize("drafted", [None, [3, 4, 10]])
def test_an_export_is_a_head_in_the_format_of_its_files(ranks, policy, drafted, tmp_path):
    source = write_head(tmp_path / "head", drafted=drafted, dtype="bfloat16")
    with open_model(ranks, policy, source, 2) as model:
        model.call("draft_head.export", str(tmp_path / "untrained"))
        model.train_head(make_batch())
        model.call("draft_head.export", str(tmp_path / "trained"))
        loss = model.train_head(make_batch())["loss"]
    weights = load_file(source / "model.safetensors")
    exported, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("untrained", "trained"))
    assert exported.keys() == trained.keys() == weights.keys()
    for name, weight in weights.items():
        assert exported[name].dtype == weight.dtype
        assert exported[name].equal(weight)
        assert trained[name].equal(weight) == (name in ("d2t", "t2d"))
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "trained" / "config.json").read_text()) == {**config, "dtype": "float32"}
    with open_model(ranks, policy, tmp_path / "trained") as model:
        assert model.train_head(make_batch())["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_head_is_sent_by_the_names_of_its_files(ranks, policy, tmp_path):
    source = write_head(tmp_path, drafted=[3, 4, 10])
    with open_model(ranks, policy, source, 2) as model:
        manifest = model.call("draft_head.manifest", 1)[0]
        assert model.manifest(1).tensors != manifest.tensors
        transport = Transport("ipc", f"127.0.0.1:{free_port()}", 1)
        with receiving_threads(1, lambda: receive(manifest, transport)) as received:
            model.call("draft_head.send", manifest, transport)
    weights = load_file(source / "model.safetensors")
    tensors, _ = received[0]
    assert tensors.keys() == weights.keys() - {"t2d"}
    assert all(tensors[name].equal(weights[name]) for name in tensors)


def test_a_head_leaves_the_device_with_its_policy(ranks, policy, head):
    with open_model(ranks, policy, head) as model:
        model.offload(["optimizer"])
        with pytest.raises(Exception, match="optimizer are offloaded"):
            model.train_head(make_batch())
        model.onload(["optimizer"])
        model.train_head(make_batch())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "does not hold a draft head"),
        ({"norm_before_fc": True}, "norm_before_fc=True"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"vocab_size": 80}, "knows 80 tokens and the policy 101"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}}, r"reads layers \[0, 1, 7\]"),
        ({"draft_vocab_size": 50}, "have no d2t"),
    ],
    ids=str,
)
def test_a_head_of_another_kind_or_policy_is_refused(ranks, policy, tmp_path, fields, message):
    with pytest.raises(Exception, match=message):
        open_model(ranks, policy, write_head(tmp_path, **fields))


@pytest.mark.parametrize("size", ["tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"])
def test_a_policy_that_is_split_is_refused(ranks, policy, head, size):
    with pytest.raises(Exception, match=f"{size}: got 2: must be 1 with draft_head"):
        open_model(ranks, policy, head, 2, **{size: 2})


class TestMultiTokenPrediction:
    """The layer for multi-token prediction in the files of a model."""

    def test_losses_are_those_of_drafts_that_an_engine_makes(self, ranks, with_layer):
        batch = make_batch()
        with open_model(ranks, with_layer, with_layer) as model:
            found = model.train_head(batch)
        reference = expected(with_layer, with_layer, batch, reference=reference_mtp_losses)
        assert {name: found[name] for name in reference} == pytest.approx(reference, rel=EXACT)

    def test_it_learns_alike_on_two_ranks_and_leaves_its_policy_alone(self, ranks, with_layer):
        def steps(num_ranks):
            with open_model(ranks, with_layer, with_layer, num_ranks) as model:
                before = model.infer(make_batch(), [LOGPROBS])["logprobs"].values
                found = [model.train_head(make_batch()) for _ in range(6)]
                assert np.array_equal(model.infer(make_batch(), [LOGPROBS])["logprobs"].values, before)
            return np.array([(step["loss"], step["grad_norm"]) for step in found])

        alone = steps(1)
        assert alone[-1, 0] < 0.9 * alone[0, 0]
        assert steps(2) == pytest.approx(alone, rel=1e-4)

    def test_an_export_and_what_is_sent_have_the_names_of_its_files(self, ranks, with_layer, tmp_path):
        with open_model(ranks, with_layer, with_layer, 2) as model:
            model.call("draft_head.export", str(tmp_path / "untrained"))
            model.train_head(make_batch())
            model.call("draft_head.export", str(tmp_path / "trained"))
            manifest = model.call("draft_head.manifest", 1)[0]
            loss = model.train_head(make_batch())["loss"]
        weights = load_file(with_layer / "model.safetensors")
        of_policy = {f"{OF_HEAD}{name}.weight" for name in ("embed_tokens", "shared_head.head")}
        own = {name for name in weights if name.startswith(OF_HEAD)} - of_policy
        exported, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("untrained", "trained"))
        assert exported.keys() == trained.keys() == {spec.name for spec in manifest.tensors} == own
        for name in own:
            assert exported[name].equal(weights[name])
            assert trained[name].equal(weights[name]) == name.endswith("e_score_correction_bias")
        with open_model(ranks, with_layer, tmp_path / "trained") as model:
            assert model.train_head(make_batch())["loss"] == pytest.approx(loss, rel=1e-5)

    @pytest.mark.parametrize("count", [0, 2])
    def test_files_without_exactly_one_are_refused(self, ranks, with_layer, tmp_path, count):
        head = shutil.copytree(with_layer, tmp_path / "head")
        config = json.loads((head / "config.json").read_text())
        (head / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
        with pytest.raises(Exception, match=f"num_nextn_predict_layers={count}"):
            open_model(ranks, with_layer, head)

    def test_files_of_another_model_are_refused(self, ranks, policy, with_layer):
        family = json.loads((with_layer / "config.json").read_text())["model_type"]
        with pytest.raises(Exception, match=f"does not fit the policy: its model_type is {family}"):
            open_model(ranks, policy, with_layer)
