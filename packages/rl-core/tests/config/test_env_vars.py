import pytest

from rl_core.config import Config, EnvVars, assemble, load, resolve
from rl_core.errors import ConfigError


class Workers(Config):
    env_vars: EnvVars = {}


ROOT = assemble("Root", {"cluster": Workers})


def read(*overrides):
    return resolve(load({}, overrides), ROOT).config.cluster.env_vars


def test_values_stay_the_text_that_was_written():
    written = read(
        "cluster.env_vars.NCCL_IB_TIMEOUT=22", "cluster.env_vars.NCCL_P2P_LEVEL=NVL", "cluster.env_vars.A=1e5"
    )
    assert written == {"NCCL_IB_TIMEOUT": "22", "NCCL_P2P_LEVEL": "NVL", "A": "1e5"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CUDA_VISIBLE_DEVICES", r"cluster\.env_vars\.CUDA_VISIBLE_DEVICES .*the launcher sets it"),
        ("MASTER_ADDR", "the launcher sets it: ranks meet at an address"),
        ("RAY_ADDRESS", "set it where you start Ray"),
        ("1ST", "not the name of an environment variable"),
    ],
)
def test_names_that_a_config_may_not_set_are_refused_by_key(name, message):
    with pytest.raises(ConfigError, match=message):
        read(f"cluster.env_vars.{name}=0")
