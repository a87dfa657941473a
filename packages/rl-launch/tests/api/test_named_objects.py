"""Functions and classes where YAML has names."""

import collections
import subprocess
import sys
import textwrap
from pathlib import Path

import pydantic
import pytest

from rl_core import thinking_format
from rl_core.errors import ConfigError
from rl_core.plugins import resolve
from rl_launch.api.api import with_names


def score(completion):
    return 1.0


class Holder:
    @staticmethod
    def score(completion):
        return 0.5


def test_a_function_of_a_file_is_named_by_the_file():
    named = with_names({"data": {"train": [{"env_name": score}]}})["data"]["train"][0]["env_name"]
    assert named == f"{Path(__file__).absolute()}:score"
    assert resolve(named)("anything") == 1.0
    assert with_names(Holder.score).endswith(":Holder.score")


def test_what_is_installed_is_named_by_its_package():
    assert with_names({"name": collections.OrderedDict}) == {"name": "collections:OrderedDict"}
    assert with_names({"type": pydantic.TypeAdapter}) == {"type": "pydantic.type_adapter:TypeAdapter"}


def test_a_public_name_is_that_of_its_package():
    assert with_names({"rewards": [thinking_format]}) == {"rewards": ["rl_core:thinking_format"]}


def test_classes_of_optimizers_are_named_with_dots():
    optimizer = {"policy": {"optimizer": {"name": collections.OrderedDict}}}
    assert with_names(optimizer)["policy"]["optimizer"]["name"] == "collections.OrderedDict"


def test_other_values_stay_and_paths_are_texts():
    plain = {"a": 1, "b": [True, None, 0.5, "x"], "c": {}}
    assert with_names(plain) == plain
    assert with_names({"run_dir": Path("runs/a"), "pair": (1, 2)}) == {"run_dir": "runs/a", "pair": [1, 2]}


def test_what_no_worker_could_import_is_refused_with_the_remedy():
    def inner(completion):
        return 0.0

    with pytest.raises(ConfigError, match=r"data\.train\.env_name: .*lambda.*define it at the top level of a file"):
        with_names({"data": {"train": {"env_name": lambda completion: 0.0}}})
    with pytest.raises(ConfigError, match="defined inside a function"):
        with_names({"env_name": inner})


def test_a_cell_of_a_notebook_is_refused_with_the_remedy():
    space = {"__name__": "__main__"}
    exec(compile("def score(completion): return 0.0", "<ipython-input-1>", "exec"), space)
    with pytest.raises(ConfigError, match=r"env_name: score is defined in a notebook.*%%writefile .*'mine\.py:score'"):
        with_names({"env_name": space["score"]})


@pytest.mark.parametrize(
    ("rest", "is_fine"),
    [
        ('if __name__ == "__main__":\n    print(with_names({"env_name": score}))', True),
        ('print(with_names({"env_name": score}))', False),
        ('"text"\nLIMIT = max(1, 2)\nif __name__ == "__main__":\n    print(with_names({"env_name": score}))', True),
    ],
)
def test_a_script_may_hold_the_function_if_running_it_again_starts_nothing(tmp_path, rest, is_fine):
    script = tmp_path / "script.py"
    head = """
        from rl_launch.api.api import with_names

        def score(completion):
            return 0.0
        """
    script.write_text(textwrap.dedent(head) + rest + "\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if is_fine:
        assert f"{script}:score" in done.stdout
    else:
        assert "line 6 would run there as well" in done.stderr
        assert 'if __name__ == "__main__":' in done.stderr
