"""A Megatron model made ready for generation, alone in its process."""

from __future__ import annotations

import socket

from rl_core.devices import Device
from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import LoraConfig, ModelConfig
from rl_core.torch.files.model_files import WeightFiles, model_folder
from rl_core.torch.training.lora import InitialFactors
from rl_megatron.config import MegatronConfig
from rl_megatron.generation.plugin import LINEAR_PROBLEM
from rl_megatron.model.build import build_model
from rl_megatron.model.model import ReadingModel
from rl_megatron.parallel.mesh import Mesh
from rl_megatron.parallel.random import seed_all
from rl_megatron.training.weights import Weights


def join_alone(device: Device) -> Mesh:
    """The process groups of a model on one rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rendezvous = Rendezvous(0, 1, 0, "127.0.0.1", port, device.name)
    return Mesh.join(rendezvous, MegatronConfig())


def load_model(config: ModelConfig, mesh: Mesh) -> tuple[ReadingModel, Weights]:
    """The model and its weights, in its precision, without dropout and gradients. Adapters are left out: weights arrive
    with them merged in.

    Raises:
        ValueError: If the files, the config and the family do not fit together, or the cache does not hold the state of
            the model's layers.
    """
    folder = model_folder(config.model_name)
    plain = config.model_copy(update={"lora_cfg": LoraConfig()})
    spec = ModelSpec(role="policy", trains=False)
    seed_all(spec.seed)
    # only the local layers' attention reads a static batch's cache
    backend = MegatronConfig(transformer_engine=False)
    model = build_model(plain, backend, spec, folder=folder, is_packed=False, mesh=mesh)
    if model.config.linear_attention_freq is not None:
        raise ValueError(f"{LINEAR_PROBLEM.key}: {LINEAR_PROBLEM.message}")
    weights = Weights(model, WeightFiles.of(folder), mesh)
    weights.load(InitialFactors(spec.seed))
    model.train(False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, weights
