from rl_launch.api.api import TrainResult as TrainResult
from rl_launch.api.api import compare as compare
from rl_launch.api.api import evaluate as evaluate
from rl_launch.api.api import train as train
from rl_launch.api.interactive import Session as Session
from rl_launch.api.interactive import session as session
from rl_launch.evaluation.result import EvaluationResult as EvaluationResult
from rl_launch.run_session.directory.run_folder import RunFolder as RunFolder
from rl_launch.run_session.directory.run_folder import find_runs as find_runs

__version__: str
