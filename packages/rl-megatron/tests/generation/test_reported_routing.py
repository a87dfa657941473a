"""The experts that the Megatron generator reports, and what a trainer makes of them."""

from layouts import write_family

from rl_core.model_config import GenerationConfig
from rl_core.testing.torch.reported_routing import ReportedRoutingSuite
from rl_megatron.generation.generator import MegatronGenerator
from rl_megatron.generation.plugin import MegatronGenerationConfig


class TestReportedRouting(ReportedRoutingSuite):
    factory = "megatron_factories:build"

    @classmethod
    def write(cls, folder):
        return write_family(folder, "qwen3_moe", num_experts=8)

    @classmethod
    def make_generator(cls, model, placement):
        settings = MegatronGenerationConfig(max_batch_size=4, max_prefill_tokens=24)
        return MegatronGenerator(GenerationConfig(backend="megatron"), settings, model, placement)
