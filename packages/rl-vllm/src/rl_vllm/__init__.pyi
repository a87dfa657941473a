from rl_vllm.config import VllmConfig as VllmConfig
from rl_vllm.engine_worker import EngineWorker as EngineWorker
from rl_vllm.generator import VllmGenerator as VllmGenerator
from rl_vllm.plugin import PLUGIN as PLUGIN

__version__: str
