"""The experts that the Hugging Face generator reports, and what a trainer makes of them."""

from transformers import AutoConfig

from rl_core.model_config import GenerationConfig
from rl_core.selfcheck.torch.tiny_model import write_tiny_model
from rl_core.testing.torch.reported_routing import ReportedRoutingSuite
from rl_dtensor.generation.generator import HFGenerator
from rl_dtensor.generation.plugin import HFConfig
from rl_dtensor.selfcheck import write_tiny

FIELDS = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


class TestReportedRouting(ReportedRoutingSuite):
    factory = "dtensor_factories:build"

    @classmethod
    def write(cls, folder):
        return write_tiny_model(folder, "qwen3_moe", **FIELDS)

    @classmethod
    def make_generator(cls, model, placement):
        settings = HFConfig(max_batch_size=4, max_prefill_tokens=24)
        return HFGenerator(GenerationConfig(backend="hf"), settings, model, placement)


class TestReportedRoutingWithoutACache(TestReportedRouting):
    """MiniMax's code refuses the generator's cache."""

    @classmethod
    def write(cls, folder):
        return write_tiny(AutoConfig.for_model("minimax"), folder)
