from rl_dtensor.config import DTensorConfig as DTensorConfig
from rl_dtensor.generation.generator import HFGenerator as HFGenerator
from rl_dtensor.generation.plugin import HFConfig as HFConfig
from rl_dtensor.plugin import PLUGIN as PLUGIN
from rl_dtensor.selfcheck import cases_of as cases_of
from rl_dtensor.worker import DTensorWorker as DTensorWorker

__version__: str
