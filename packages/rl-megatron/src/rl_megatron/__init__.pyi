from rl_megatron.config import MegatronConfig as MegatronConfig
from rl_megatron.conversion.splits import Blocks as Blocks
from rl_megatron.conversion.splits import Chunks as Chunks
from rl_megatron.conversion.splits import QueryKeyValue as QueryKeyValue
from rl_megatron.conversion.splits import Split as Split
from rl_megatron.conversion.splits import Vocabulary as Vocabulary
from rl_megatron.conversion.splits import Whole as Whole
from rl_megatron.conversion.weight_map import HFTensor as HFTensor
from rl_megatron.conversion.weight_map import WeightMap as WeightMap
from rl_megatron.families.dense import Family as Family
from rl_megatron.generation.generator import MegatronGenerator as MegatronGenerator
from rl_megatron.generation.plugin import MegatronGenerationConfig as MegatronGenerationConfig
from rl_megatron.plugin import PLUGIN as PLUGIN
from rl_megatron.worker import MegatronWorker as MegatronWorker

__version__: str
