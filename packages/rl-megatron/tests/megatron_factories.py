"""Workers for the suites, built in the processes of a rank pool."""

from rl_core.model import ModelSpec, Rendezvous
from rl_core.model_config import ModelConfig
from rl_megatron.config import MegatronConfig
from rl_megatron.worker import MegatronWorker


def build(config: ModelConfig, spec: ModelSpec, rendezvous: Rendezvous, **settings: object) -> MegatronWorker:
    return MegatronWorker(config, MegatronConfig(**settings), spec, rendezvous)
