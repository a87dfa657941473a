"""An environment of a third party: sums scored as `math` does, by a verifier that can be told to wait, to hang or to
crash.
"""

import os
import threading
import time
from pathlib import Path

from rl_core.plugins import EnvironmentPlugin, Requirement
from rl_envs.math.environment import MathEnvironment
from rl_envs.math.plugin import MathConfig

ORDERS = {"hang": lambda: threading.Event().wait(), "crash": os.abort}


class TellableConfig(MathConfig):
    orders: str
    """Folder of orders: a file `hang` or `crash` there strikes the next rollout that is scored. Rollouts of the prompt
    whose ID is in the file `hold` wait until that file is removed; the first of them creates the file `held`."""


class TellableEnvironment(MathEnvironment):
    def __init__(self, config):
        super().__init__(config)
        self._orders = Path(config.orders)

    def step(self, conversations, states):
        ids = [conversation.id for conversation in conversations]
        for order, strike in ORDERS.items():
            victim = self._orders / f"{order}.victim"
            if self._takes(order):
                victim.write_text(ids[0])
            if victim.exists() and victim.read_text() in ids:
                strike()
        while self._are_held(ids):
            (self._orders / "held").touch()
            time.sleep(0.05)
        return super().step(conversations, states)

    def _are_held(self, ids):
        try:
            prompt = (self._orders / "hold").read_text()
        except FileNotFoundError:
            return False
        return any(each.startswith(f"{prompt}/") for each in ids)

    def _takes(self, order):
        """Whether this process, of several, is the one that carries it out."""
        try:
            (self._orders / order).rename(self._orders / f"{order}.taken")
        except FileNotFoundError:
            return False
        return True


PLUGIN = EnvironmentPlugin(
    name="tellable",
    config=TellableConfig,
    environment="tellable_environment:TellableEnvironment",
    requirement=Requirement("rl-envs", imports=("math_verify",)),
)


def install(folder: Path) -> str:
    """Describe this module as an installed distribution with a plugin; returns the PYTHONPATH by which it is found."""
    metadata = folder / "tellable_environment-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tellable-environment\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rl.environments]\ntellable = tellable_environment:PLUGIN\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])
