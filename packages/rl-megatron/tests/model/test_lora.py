"""Adapters train on every layout as they do in one process, and what leaves the model has them merged in."""

import threading
import warnings

import numpy as np
import pytest
import torch
from layouts import EXPERT_LAYOUTS, LAYOUTS, write_family
from megatron_factories import kept_tensors
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from rl_core.errors import WorkerError
from rl_core.model import LOGPROBS, ModelSpec
from rl_core.model_config import LoraConfig, ModelConfig, OptimizerConfig
from rl_core.selfcheck.losses import TokenLoss
from rl_core.selfcheck.pooled_model import PooledModel
from rl_core.selfcheck.rank_pool import free_port
from rl_core.selfcheck.torch.oracle import Oracle, adapt, merge, merge_files
from rl_core.selfcheck.torch.received import receive
from rl_core.testing.exhaustive import exhaustive
from rl_core.testing.model_worker import LAYOUTS as BATCHINGS
from rl_core.testing.model_worker import make_batch
from rl_core.weights import Transport

ALL = LAYOUTS | EXPERT_LAYOUTS
SGD = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.5, "momentum": 0.9})
LORA = LoraConfig(enabled=True, dim=4, alpha=8)
# rl-megatron puts no adapter on the gate of shared experts
UNGATED = LoraConfig(enabled=True, dim=4, alpha=8, exclude_modules=["shared_expert_gate"])
ATTENTION = LoraConfig(enabled=True, match_all_linear=False, target_modules=["q_proj", "v_proj", "self_attn.o_proj"])
PATTERNS = LoraConfig(
    enabled=True,
    dim=4,
    alpha=8,
    rank_pattern={"q_proj": 2, r"layers\.1\.mlp\.(up|gate)_proj": 6},
    alpha_pattern={"layers.0.self_attn.q_proj": 3, "down_proj": 16},
)
PISSA = LoraConfig(enabled=True, dim=4, alpha=8, init="pissa", rank_pattern={"q_proj": 2})
MODELS = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_next": ("qwen3_next", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "glm4_moe": ("glm4_moe", {}),
    "deepseek_v3 dense": ("deepseek_v3", {"first_k_dense_replace": 4}),
}
CASES = [
    ("qwen3", "tp2", "packed-16", LORA, {}),
    pytest.param("qwen3", "pp2 virtual", "padded-3", LORA, {"recompute": "full"}, marks=exhaustive),
    ("llama", "tp2 pp2+sp", "padded-3", ATTENTION, {}),
    ("llama", "tp2+sp", "packed-16", PATTERNS, {}),
    ("qwen3", "tp2 pp2+sp", "padded-3", PISSA, {}),
    pytest.param("llama", "tp1", "packed-16", PISSA, {}, marks=exhaustive),
    ("qwen3_moe", "tp2 etp2 ep2+sp", "packed-16", LORA, {}),
    pytest.param("deepseek_v3", "tp2+sp", "packed-16", LORA, {}, marks=exhaustive),
    # layouts and layers of those above, in other pairs
    pytest.param("llama", "cp2", "packed-16", LORA, {}, marks=exhaustive),
    pytest.param("qwen2_moe", "tp2 ep2+sp", "padded-3", UNGATED, {}, marks=exhaustive),
    pytest.param("qwen3_next", "tp2 ep2+sp", "packed-16", UNGATED, {}, marks=exhaustive),
    pytest.param("deepseek_v3 dense", "tp2", "padded-3", LORA, {}, marks=exhaustive),
    pytest.param("glm4_moe", "tp2 ep2+sp", "packed-16", LORA, {}, marks=exhaustive),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def of(model):
        if model not in made:
            family, fields = MODELS[model]
            made[model] = write_family(tmp_path_factory.mktemp(family), family, **fields)
        return made[model]

    return of


def open_model(ranks, folder, layout, lora=LORA, *, spec=None, precision="float32", options=None, **settings):
    num_ranks, backend = ALL[layout]
    config = ModelConfig(
        model_name=str(folder), precision=precision, max_grad_norm=0.5, optimizer=SGD, lora_cfg=lora, **settings
    )
    return PooledModel(
        ranks, "megatron_factories:build", config, spec or ModelSpec(), num_ranks, **backend, **(options or {})
    )


def received_from(model):
    """The tensors that one receiver of the model's weights gets."""
    manifest = model.manifest(1)
    transport = Transport("collective", f"127.0.0.1:{free_port()}", 1, bucket_bytes=4096, timeout_s=60)
    received = []
    receiver = threading.Thread(target=lambda: received.append(receive(manifest, transport)[0]))
    receiver.start()
    model.send(manifest, transport)
    receiver.join(60)
    return received[0]


@pytest.mark.parametrize(("model", "layout", "batching", "lora", "options"), CASES)
def test_steps_of_adapters_equal_those_of_one_process(ranks, folders, tmp_path, model, layout, batching, lora, options):
    folder = folders(model)
    oracle = Oracle(folder)
    adapt(oracle.model, lora)
    expected = [oracle.train_step(make_batch(seed=seed), TokenLoss(), SGD, 0.5) for seed in range(2)]
    with open_model(ranks, folder, layout, lora, options=options, **BATCHINGS[batching]) as worker:
        for seed, metrics in enumerate(expected):
            found = worker.train_step(make_batch(seed=seed), TokenLoss())
            for name, value in metrics.items():
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (seed, name)
        worker.export(str(tmp_path))
        worker.export_adapter(str(tmp_path / "adapter"))
    exported = dict(Oracle(tmp_path).model.named_parameters())
    source = dict(Oracle(folder).model.named_parameters())
    from_files = Oracle(folder).model
    merge_files(from_files, tmp_path / "adapter")
    merge(oracle.model)
    trained = dict(oracle.model.named_parameters())
    for name, weight in trained.items():
        np.testing.assert_allclose(exported[name].detach(), weight, atol=1e-5, rtol=1e-5, err_msg=name)
        by_adapter = from_files.get_parameter(name).detach()
        np.testing.assert_allclose(by_adapter, weight, atol=1e-5, rtol=1e-5, err_msg=name)
    stayed = {name for name, weight in trained.items() if weight.equal(source[name])}
    assert stayed
    assert stayed < trained.keys()
    assert all(exported[name].equal(source[name]) for name in stayed)


def test_a_checkpoint_has_the_adapters_alone_and_resumes_on_another_layout(ranks, folders, tmp_path):
    folder = folders("qwen3")
    with open_model(ranks, folder, "tp2+sp", spec=ModelSpec(keeps_reference=True)) as model:
        start = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        for seed in range(2):
            model.train_step(make_batch(seed=seed), TokenLoss())
        model.save(str(tmp_path / "adapters"))
        trained = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        assert abs(trained - start).max() > 1e-3
        reference = model.infer(make_batch(), [LOGPROBS], reference=True).ragged("logprobs").values
        assert np.array_equal(reference, start)
        (expected,) = model.train_steps([make_batch(seed=2)], TokenLoss())
    with open_model(ranks, folder, "pp2") as model:
        model.load(str(tmp_path / "adapters"))
        found = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        np.testing.assert_allclose(found, trained, atol=1e-5)
        (metrics,) = model.train_steps([make_batch(seed=2)], TokenLoss())
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)
    saved = FileSystemReader(tmp_path / "adapters" / "shards").read_metadata().state_dict_metadata
    assert {name.split("/")[0] for name in saved} == {"model", "momentum_buffer"}
    assert all(".adapters." in name for name in saved)


@pytest.mark.parametrize(
    ("model", "layout", "lora"),
    [
        ("qwen3", "tp2 pp2+sp", LORA),
        ("llama", "tp2", LoraConfig(enabled=True, dim=3, alpha=6, use_rslora=True, exclude_modules=["up_proj"])),
        pytest.param("llama", "tp1", ATTENTION, marks=exhaustive),
        pytest.param("qwen3_moe", "tp2 etp2 ep2+sp", LORA, marks=exhaustive),
    ],
)
def test_peft_gives_the_logprobs_of_the_run(ranks, folders, tmp_path, model, layout, lora):
    folder, batch = folders(model), make_batch(seed=7)
    with open_model(ranks, folder, layout, lora) as worker:
        for seed in range(2):
            worker.train_step(make_batch(seed=seed), TokenLoss())
        expected = worker.infer(batch, [LOGPROBS]).ragged("logprobs").values
        worker.export_adapter(str(tmp_path))
    oracle = Oracle(folder)
    before = oracle.infer(batch, [LOGPROBS])["logprobs"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*adapter keys")  # of factors that are missing
        oracle.model = PeftModel.from_pretrained(oracle.model, tmp_path).merge_and_unload()
    found = oracle.infer(batch, [LOGPROBS])["logprobs"]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert abs(found - before).max() > 1e-3


def test_a_model_starts_from_an_adapter_on_another_layout(ranks, folders, tmp_path):
    folder, batch = folders("qwen3"), make_batch(seed=7)
    with open_model(ranks, folder, "tp2") as model:
        model.train_step(make_batch(), TokenLoss())
        expected = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
        model.export_adapter(str(tmp_path))
    start = LORA.model_copy(update={"adapter": str(tmp_path)})
    with open_model(ranks, folder, "pp2", start) as model:
        found = model.infer(batch, [LOGPROBS]).ragged("logprobs").values
    np.testing.assert_allclose(found, expected, atol=1e-5)
    with pytest.raises(WorkerError, match="tensors of layers without an adapter here"):
        open_model(ranks, folder, "tp1", ATTENTION.model_copy(update={"dim": 4, "adapter": str(tmp_path)}))


def test_a_reference_of_adapters_follows_them_and_is_saved(ranks, folders, tmp_path):
    folder, spec = folders("qwen3"), ModelSpec(keeps_reference=True)
    with open_model(ranks, folder, "tp2+sp", spec=spec) as model:
        model.train_step(make_batch(), TokenLoss())
        model.update_reference()
        moved = model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values
        model.train_step(make_batch(seed=1), TokenLoss())
        model.save(str(tmp_path / "adapters"))
        reference = model.infer(make_batch(), [LOGPROBS], reference=True).ragged("logprobs").values
        assert np.array_equal(reference, moved)
        assert not np.allclose(model.infer(make_batch(), [LOGPROBS]).ragged("logprobs").values, moved, atol=1e-4)
    with open_model(ranks, folder, "pp2", spec=spec) as model:
        model.load(str(tmp_path / "adapters"))
        found = model.infer(make_batch(), [LOGPROBS], reference=True).ragged("logprobs").values
        np.testing.assert_allclose(found, moved, atol=1e-5)


def test_half_precision_sends_the_sum_of_weights_and_adapters_rounded_once(ranks, folders, tmp_path):
    folder = folders("llama")
    with open_model(ranks, folder, "tp1", ATTENTION, precision="bfloat16") as model:
        model.train_step(make_batch(), TokenLoss())
        (kept,) = ranks.run(kept_tensors, [()])
        received = received_from(model)
    source, names = load_file(folder / "model.safetensors"), set()
    for name, weight in source.items():
        layer, _, short = name.removesuffix(".weight").rpartition(".")
        fused = "linear_proj" if short == "o_proj" else "linear_qkv"
        ours = layer.replace("model.layers", "decoder.layers").replace("self_attn", "self_attention")
        prefix = f"{ours}.{fused}.adapters.{short}"
        total = weight.bfloat16().float()
        if f"{prefix}.up" in kept:
            names.add(short)
            total = total + 4.0 * (torch.from_numpy(kept[f"{prefix}.up"]) @ torch.from_numpy(kept[f"{prefix}.down"]))
        assert received[name].equal(total.bfloat16()), name
    assert names == {"q_proj", "v_proj", "o_proj"}


def test_dropout_of_adapters_drops_alike_on_ranks_that_share_inputs(ranks, folders):
    lora = LORA.model_copy(update={"dropout": 0.5})
    downs = "linear_qkv.adapters.q_proj.down"
    for layout in ("tp2", "tp2+sp"):
        with open_model(ranks, folders("qwen3"), layout, lora) as model:
            plain = model.evaluate(make_batch(), TokenLoss())["loss"]
            first = model.train_step(make_batch(), TokenLoss())
            assert first["loss"] == pytest.approx(plain, abs=1e-5)  # what comes up starts from zero
            evaluated = [model.evaluate(make_batch(seed=1), TokenLoss())["loss"] for _ in range(2)]
            assert evaluated[0] == evaluated[1]
            assert model.train_step(make_batch(seed=1), TokenLoss())["loss"] != pytest.approx(evaluated[0], abs=1e-5)
            one, other = ranks.run(kept_tensors, [()] * 2)
        for name in [name for name in one if name.endswith(downs)]:
            assert np.array_equal(one[name], other[name]), (layout, name)


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        ("qwen3_moe", ["q_proj", "down_proj"], "'down_proj' is a router, a gate or an expert, which get no adapters"),
        ("qwen3_moe", ["mlp.gate"], "'mlp.gate' is a router, a gate or an expert"),
        ("qwen2_moe", ["shared_expert_gate"], "'shared_expert_gate' is a router, a gate or an expert"),
        ("llama", ["linear_qkv"], "'linear_qkv' is not a linear layer of this llama model; it has down_proj"),
        ("llama", [], "match no linear layer of a llama model"),
    ],
)
def test_what_gets_no_adapter_is_refused_by_name(ranks, folders, model, targets, message):
    lora = LoraConfig(enabled=True, match_all_linear=False, target_modules=targets)
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folders(model), "tp1", lora)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_parameters": ["experts.down_proj"]}, r"lora_cfg\.target_parameters: .*experts"),
        ({"use_dora": True}, r"lora_cfg\.use_dora: .*is not supported by rl-megatron"),
        ({"base_quantization": "nf4"}, r"lora_cfg\.base_quantization: .*is not supported by rl-megatron"),
    ],
)
def test_adapters_of_other_kinds_are_refused(ranks, folders, settings, message):
    with pytest.raises(WorkerError, match=message):
        open_model(ranks, folders("qwen3_moe"), "tp1", LoraConfig(enabled=True, **settings))


def test_a_run_from_principal_factors_resumes_bit_equal(ranks, folders, tmp_path):
    batches = [make_batch(seed=seed) for seed in (1, 2)]
    with open_model(ranks, folders("qwen3"), "tp2+sp", PISSA) as model:
        model.train_step(make_batch(), TokenLoss())
        model.save(str(tmp_path / "saved"))
        expected = model.train_steps(batches, TokenLoss())
    with open_model(ranks, folders("qwen3"), "tp2+sp", PISSA) as model:
        model.load(str(tmp_path / "saved"))
        assert model.train_steps(batches, TokenLoss()) == expected
