"""Plans of loads, of small modules that load as the engine's models do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from rl_core.torch.transport.bucket import ArrivedBucket, Region, lay_out
from rl_core.weights import Manifest, TensorSpec
from rl_vllm.weights.load_plan import plan_load
from rl_vllm.weights.planned_load import PlannedLoad
from rl_vllm.weights.probe import WeightProbe
from rl_vllm.weights.weight_receiver import WeightReceiver

NAMES = ("mlp.shared_expert.weight", "mlp.gate.weight")


class Runner(nn.Module):
    """Holds a layer of another module under a name of its own, as vLLM's runner of experts does."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self._layer = shared


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2, bias=False)
        self.shared_expert = nn.Linear(4, 3, bias=False)
        self.experts = Runner(self.shared_expert)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mixture()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


def manifest(model: nn.Module, *names: str, tied: Mapping[str, str] | None = None) -> Manifest:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors = tuple(TensorSpec(name, shapes[name], "float32") for name in names)
    return Manifest(version=1, tensors=tensors, tied=tied or {})


def test_a_layer_with_two_names_is_filled_once_and_misses_nothing() -> None:
    model = Model()
    record_metadata_for_reloading(model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    plan = plan_load(model, manifest(model, *NAMES))
    assert plan.missing == []
    assert plan.unknown == {}
    assert plan.aliases == {"mlp.experts._layer.weight": "mlp.shared_expert.weight"}
    assert {piece.name for piece in plan.pieces["mlp.shared_expert.weight"]} == {"mlp.shared_expert.weight"}
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def copy_scaled(parameter: Tensor, tensor: Tensor, *, scale: float) -> None:
    parameter.data.copy_(tensor * scale if scale != 1 else tensor)


def test_loaders_may_be_partial_functions() -> None:
    model = Model()
    model.mlp.gate.weight.weight_loader = partial(copy_scaled, scale=1.0)
    record_metadata_for_reloading(model)
    assert plan_load(model, manifest(model, *NAMES)).missing == []


def test_what_a_manifest_lacks_is_missing_under_the_first_name() -> None:
    model = Model()
    record_metadata_for_reloading(model)
    assert plan_load(model, manifest(model, "mlp.gate.weight")).missing == ["mlp.shared_expert.weight"]


def test_a_tied_name_that_the_engine_has_no_parameter_of_is_not_fed() -> None:
    """Gemma 2 of vLLM has no head: it computes with the embedding."""
    model = Model()
    record_metadata_for_reloading(model)
    told = manifest(model, *NAMES, tied={"lm_head.weight": "mlp.gate.weight"})
    sent = {spec.name: torch.randn(spec.shape) for spec in told.tensors}
    plan = plan_load(model, told)
    assert plan.unknown == {}
    assert plan.missing == []
    with torch.no_grad():
        receiver = WeightReceiver(model, SimpleNamespace(dtype=torch.float32), told, plan, None)
        receiver.load(sent.items())
    assert receiver.stale() == []
    assert all(torch.equal(dict(model.named_parameters())[name], tensor) for name, tensor in sent.items())


class Scaled(nn.Module):
    """Two layers with a buffer that checkpoints have, a vector and a number, and one that makes a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.norm.register_buffer("beta", torch.tensor(0.5))
        self.layer, self.rotary = nn.Module(), nn.Module()
        self.layer.register_buffer("scale", torch.ones(1))
        self.rotary.register_buffer("table", torch.ones(3), persistent=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        places = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        for name, tensor in weights:
            places[name].data.copy_(tensor)


SCALED = Manifest(
    1,
    tuple(
        TensorSpec(name, shape, "float32")
        for name, shape in {"norm.weight": (4,), "norm.beta": (), "layer.scale": (1,)}.items()
    ),
)


@pytest.mark.parametrize("is_planned", [True, False])
def test_buffers_that_checkpoints_have_are_loaded_and_checked(*, is_planned: bool) -> None:
    model = Scaled()
    record_metadata_for_reloading(model)
    plan = plan_load(model, SCALED)
    assert (plan.unknown, plan.missing) == ({}, [])
    assert plan.pieces.keys() == {"norm.weight", "norm.beta", "layer.scale"}
    config = SimpleNamespace(dtype=torch.float32)
    planned = PlannedLoad.of(model, plan, torch.float32)
    assert planned is not None
    receiver = WeightReceiver(model, config, SCALED, plan, planned if is_planned else None)
    sent = {spec.name: torch.randn(spec.shape) for spec in SCALED.tensors}
    live = dict(model.named_buffers())
    with torch.no_grad():
        receiver.load(sent.items())
    assert receiver.stale() == []
    assert all(torch.equal(tensor, sent[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model.rotary.table, torch.ones(3))
    assert all(buffer is live[name] for name, buffer in model.named_buffers())
    model.norm.beta += 1
    model.layer.scale += 1
    assert receiver.stale() == ["norm.beta", "layer.scale"]


def test_a_buffer_that_checkpoints_have_is_missing_if_it_is_not_sent() -> None:
    model = Scaled()
    record_metadata_for_reloading(model)
    assert plan_load(model, Manifest(1, SCALED.tensors[:1])).missing == ["norm.beta", "layer.scale"]


def test_a_bias_of_a_router_that_experts_hold_too_is_filled_once_and_misses_nothing() -> None:
    """vLLM's experts of models that it runs through transformers take the router's buffer as one of their own."""
    model = Scaled()
    bias = nn.Buffer(torch.ones(3))
    model.norm.e_score_correction_bias = model.layer.e_score_correction_bias = bias
    record_metadata_for_reloading(model)
    sent = TensorSpec("norm.e_score_correction_bias", (3,), "float32")
    plan = plan_load(model, Manifest(1, (*SCALED.tensors, sent)))
    assert (plan.unknown, plan.missing) == ({}, [])
    assert plan.aliases == {"layer.e_score_correction_bias": sent.name}
    assert torch.equal(bias, torch.ones(3))


class Shard(nn.Module):
    """Keeps rows of one matrix, columns of another and nothing of a third; a scale is read as a number."""

    def __init__(self, *, scales: bool = False) -> None:
        super().__init__()
        self.fused = nn.Linear(4, 4, bias=False)
        self.scales = scales

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        target = self.fused.weight.data
        for name, tensor in weights:
            match name:
                case "rows":
                    target[:2].copy_(tensor.narrow(0, 2, 2))
                case "columns":
                    columns = tensor.narrow(1, 4, 4)
                    target[2:].copy_(columns * 2 if self.scales else columns)
                case "scale":
                    assert tensor.item() is not None


SHARDED = Manifest(
    1,
    tuple(
        TensorSpec(name, shape, "float32")
        for name, shape in {"rows": (4, 4), "columns": (2, 8), "elsewhere": (5, 5), "scale": ()}.items()
    ),
)


def test_parts_are_what_the_loaders_copy() -> None:
    model = Shard()
    record_metadata_for_reloading(model)
    parts = plan_load(model, SHARDED).parts(SHARDED)
    rows, columns = torch.empty(4, 4)[2:], torch.empty(2, 8)[:, 4:]
    assert parts == {"rows": (Region.of(rows),), "columns": (Region.of(columns),), "elsewhere": ()}


def test_a_rank_whose_loaders_compute_keeps_everything() -> None:
    model = Shard(scales=True)
    record_metadata_for_reloading(model)
    assert plan_load(model, SHARDED).parts(SHARDED) == {}


class Router(LinearBase):
    """A linear layer of the engine in bfloat16 with a bias of its own and one, in float32, of experts."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.params_dtype = torch.bfloat16
        self.quant_method = UnquantizedLinearMethod()
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.correction = nn.Parameter(torch.zeros(4, dtype=torch.float32))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


@pytest.mark.parametrize(
    ("computes_with", "stale"),
    [
        pytest.param(lambda sent: sent, [], id="what was sent"),
        pytest.param(lambda sent: sent.bfloat16().float(), ["correction"], id="what rounding leaves of it"),
    ],
)
def test_a_float32_tensor_of_a_layer_in_bfloat16_is_checked_unrounded(
    computes_with: Callable[[Tensor], Tensor], stale: list[str]
) -> None:
    model = Router()
    record_metadata_for_reloading(model)
    told = Manifest(1, tuple(TensorSpec(name, (4,), "float32") for name in ("bias", "correction")))
    sent = {spec.name: 7 + torch.rand(4) for spec in told.tensors}
    probe = WeightProbe(model, plan_load(model, told), 1)
    with torch.no_grad():
        for name, tensor in sent.items():
            probe.take(name, lambda region, sent=tensor: region.read(sent))
        model.bias.copy_(sent["bias"])
        # the engine on CPU widens a bias after it was rounded
        model.bias.data = model.bias.data.float()
        model.correction.copy_(computes_with(sent["correction"]))
    assert probe.stale() == stale


class Experts(RoutedExperts):
    """Three stacked experts of the engine, computed by a kernel that exists, with the map of expert parallelism."""

    def __init__(self, backend: UnquantizedMoeBackend) -> None:
        nn.Module.__init__(self)
        self.w13_weight = nn.Parameter(torch.zeros(3, 4, 5), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.zeros(3, 5, 2), requires_grad=False)
        self.register_buffer("_expert_map", torch.arange(3), persistent=False)
        self.moe_config = SimpleNamespace(is_act_and_mul=True)
        self.quant_method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        nn.Module.__init__(self.quant_method)
        self.quant_method.unquantized_backend, self.quant_method.moe_kernel = backend, object()


class ExpertModel(nn.Module):
    def __init__(self, backend: UnquantizedMoeBackend) -> None:
        super().__init__()
        self.experts = Experts(backend)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            index, kind = name.split(".")
            match kind:
                case "gate":
                    self.experts.w13_weight.data[int(index), :2].copy_(tensor)
                case "up":
                    self.experts.w13_weight.data[int(index), 2:].copy_(tensor)
                case "down":
                    self.experts.w2_weight.data[int(index)].copy_(tensor)


EXPERTS = Manifest(
    1,
    tuple(
        TensorSpec(f"{index}.{kind}", shape, "float32")
        for index in range(3)
        for kind, shape in {"gate": (2, 5), "up": (2, 5), "down": (5, 2)}.items()
    ),
)


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        pytest.param(UnquantizedMoeBackend.TRITON, ("gate", "up"), id="in place"),
        pytest.param(UnquantizedMoeBackend.FLASHINFER_CUTLASS, ("up", "gate"), id="by the kernel's order"),
    ],
)
def test_experts_load_by_plan_into_the_tensors_that_kernels_hold(
    monkeypatch: pytest.MonkeyPatch, backend: UnquantizedMoeBackend, order: tuple[str, str]
) -> None:
    model = ExpertModel(backend)
    record_metadata_for_reloading(model)
    processed: list[nn.Module] = []
    process = UnquantizedFusedMoEMethod.process_weights_after_loading
    monkeypatch.setattr(
        UnquantizedFusedMoEMethod,
        "process_weights_after_loading",
        lambda method, layer: (processed.append(layer), process(method, layer)),
    )
    held = dict(model.experts.named_parameters())
    kernel, places = model.experts.quant_method.moe_kernel, {name: each.data_ptr() for name, each in held.items()}
    plan = plan_load(model, EXPERTS)
    planned = PlannedLoad.of(model, plan, torch.float32)
    assert planned is not None
    for _ in range(2):
        sent = {spec.name: torch.randn(spec.shape) for spec in EXPERTS.tensors}
        with torch.no_grad():
            WeightReceiver(model, SimpleNamespace(dtype=torch.float32), EXPERTS, plan, planned).load(sent.items())
        for index in range(3):
            fused = torch.cat([sent[f"{index}.{kind}"] for kind in order])
            assert torch.equal(model.experts.w13_weight[index], fused)
            assert torch.equal(model.experts.w2_weight[index], sent[f"{index}.down"])
    assert {name: each.data_ptr() for name, each in model.experts.named_parameters()} == places
    assert all(each is held[name] for name, each in model.experts.named_parameters())
    assert model.experts.quant_method.moe_kernel is kernel
    assert torch.equal(model.experts._expert_map, torch.arange(3))
    assert len(processed) == (0 if order == ("gate", "up") else 2)


def test_experts_load_straight_from_the_buckets_that_their_parts_arrive_in() -> None:
    """A rank keeps three of six experts; buckets divide a layer."""
    model = ExpertModel(UnquantizedMoeBackend.TRITON)
    load = model.load_weights
    model.load_weights = lambda weights: load(  # type: ignore[method-assign]
        (name, tensor) for name, tensor in weights if int(name[0]) < 3
    )
    record_metadata_for_reloading(model)
    specs = [replace(spec, name=f"{index}.{spec.name[2:]}") for index in range(6) for spec in EXPERTS.tensors[:3]]
    told = Manifest(1, tuple(specs))
    plan = replace(plan_load(model, told), unknown={})
    receiver = WeightReceiver(
        model, SimpleNamespace(dtype=torch.float32), told, plan, PlannedLoad.of(model, plan, torch.float32)
    )
    assert receiver.loads_parts
    assert [name for name, parts in receiver.parts.items() if not parts] == [spec.name for spec in specs[9:]]
    sent = {spec.name: torch.randn(spec.shape) for spec in specs}
    layout = lay_out(told, bucket_bytes=128).keeping(receiver.parts)

    def arriving() -> Iterator[ArrivedBucket]:
        for bucket in layout.buckets:
            buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for slot in bucket.slots:
                slot.fill(buffer, sent[slot.spec.name])
            arrived = ArrivedBucket(bucket, buffer)
            yield arrived
            arrived.leave()

    with torch.no_grad():
        receiver.load_parts(
            ((slot.spec.name, partial(bucket.read, slot)) for slot in bucket.slots) for bucket in arriving()
        )
    assert receiver.stale() == []
    for index in range(3):
        fused = torch.cat([sent[f"{index}.gate"], sent[f"{index}.up"]])
        assert torch.equal(model.experts.w13_weight[index], fused)
        assert torch.equal(model.experts.w2_weight[index], sent[f"{index}.down"])


def test_one_missing_expert_is_missing_and_nothing_is_planned() -> None:
    model = ExpertModel(UnquantizedMoeBackend.TRITON)
    record_metadata_for_reloading(model)
    plan = plan_load(model, Manifest(1, EXPERTS.tensors[:-1]))
    assert plan.missing == ["experts.w2_weight"]
    assert PlannedLoad.of(model, plan, torch.float32) is None
