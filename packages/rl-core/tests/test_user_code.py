"""Functions and classes in a file of the user's own."""

import pickle
import subprocess
import sys
import traceback
from types import SimpleNamespace

import pytest

from rl_core.plugins import resolve
from rl_core.user_code import FromFile, SourceFile, beside, implementation_name, place_of

LOSS = """
from dataclasses import dataclass

WEIGHTS = {"a": 2.0}

class Scale:
    def __init__(self, factor):
        self.factor = factor

@dataclass(frozen=True)
class Loss:
    weight: float
    scale: Scale
    implementation: str = "mine.py:compute"

def compute(loss, value):
    return value * loss.weight * loss.scale.factor * WEIGHTS["a"]

def fails():
    raise KeyError("of the user's")
"""


@pytest.fixture
def written(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_an_instance_of_a_file_is_the_same_in_a_process_that_has_no_such_file(written, tmp_path):
    path = written(LOSS)
    loss = resolve(f"{path}:Loss")(3.0, resolve(f"{path}:Scale")(0.5))
    (tmp_path / "loss.pickle").write_bytes(pickle.dumps(loss))
    path.unlink()
    script = (
        "import pickle, sys; from rl_core.plugins import resolve\n"
        "from rl_core.user_code import implementation_name\n"
        "loss = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(loss.weight, resolve(implementation_name(loss, loss.implementation))(loss, 7.0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "loss.pickle")], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("3.0 21.0\n", "")


def test_a_file_is_run_once_and_again_when_its_text_has_changed(written):
    path = written("import itertools\nCOUNT = itertools.count(1)\n\ndef tick():\n    return next(COUNT)\n")
    assert [resolve(f"{path}:tick")(), resolve(f"{path}:tick")()] == [1, 2]
    written(path.read_text().replace("count(1)", "count(100)"))
    assert resolve(f"{path}:tick")() == 100


def test_files_of_the_same_name_do_not_meet(written, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = written("VALUE = 1"), written("VALUE = 2", "other/mine.py")
    assert (resolve(f"{first}:VALUE"), resolve(f"{second}:VALUE")) == (1, 2)


def test_a_traceback_shows_the_line_of_a_file_that_is_gone(written):
    path = written(LOSS)
    fails = resolve(f"{path}:fails")
    path.unlink()
    with pytest.raises(KeyError) as caught:
        fails()
    assert """raise KeyError("of the user's")""" in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def broken(:\n    pass", r"mine\.py:1 is not valid Python"),
        ("\nimport no_such_engine", r"imports no_such_engine, which is not installed here.*inside the function"),
        ("\nfrom rl_core.no_such_room import Batch", r"imports rl_core\.no_such_room.*\(from rl_core import \.\.\.\)"),
        ("VALUE = 1", r"has no 'Loss'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(written, text, says):
    with pytest.raises(ValueError, match=says):
        resolve(f"{written(text)}:Loss")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"mine\.py cannot be read: No such file"):
        resolve(f"{tmp_path / 'mine.py'}:Loss")


def test_a_file_that_failed_is_tried_again(written):
    path = written("VALUE = 1 / 0")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            resolve(f"{path}:VALUE")


def test_names_of_files_are_relative_to_a_folder_and_others_are_left_alone(tmp_path):
    assert beside("mine.py:Loss", tmp_path) == f"{tmp_path}/mine.py:Loss"
    assert beside("/there/mine.py:Loss", tmp_path) == "/there/mine.py:Loss"
    for other in ("package.module:Loss", "see mine.py", "mine.py", "val:accuracy", ""):
        assert beside(other, tmp_path) == other


def test_an_implementation_in_another_file_is_refused(written):
    path = written(LOSS.replace("mine.py:compute", "kernels.py:compute"))
    loss = resolve(f"{path}:Loss")(1.0, None)
    with pytest.raises(ValueError, match=r"Loss names kernels\.py:compute, which is in another file than the class"):
        implementation_name(loss, loss.implementation)


def test_an_implementation_in_a_package_is_itself():
    assert implementation_name(SimpleNamespace(), "package.module:compute") == "package.module:compute"


def test_the_module_of_a_text_is_its_own():
    assert SourceFile("a/b-c.py", "x = 1").module_name.startswith("user_code_b_c_")
    assert SourceFile("a/b-c.py", "x = 1").module_name != SourceFile("a/b-c.py", "x = 2").module_name


def test_a_file_beside_the_recipe_comes_before_one_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "recipes").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here/mine.py").touch()
    assert beside("mine.py:Loss", tmp_path / "recipes") == f"{tmp_path}/here/mine.py:Loss"
    (tmp_path / "recipes/mine.py").touch()
    assert beside("mine.py:Loss", tmp_path / "recipes") == f"{tmp_path}/recipes/mine.py:Loss"


def test_what_a_file_defines_is_known_without_running_it(written):
    text = (
        "raise RuntimeError('run')\n\ndef score(): ...\n\nasync def judge(): ...\n\nclass Game: ...\n\nscale = score\n"
    )
    path = written(text.replace("raise RuntimeError('run')", "print('run')"))
    assert [FromFile.read(f"{path}:{name}").is_function for name in ("score", "judge", "Game", "scale")] == [
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match=r"mine\.py has no 'scor'; did you mean score\?"):
        FromFile.read(f"{path}:scor")
    with pytest.raises(ValueError, match=r"mine\.py has no 'zzz'; it defines score, judge, Game, scale"):
        FromFile.read(f"{path}:zzz")
    # what stands under an `if` may define it
    assert str(FromFile.read(f"{written('if True:' + chr(10) + '    score = print')}:score")) == "mine.py:score"
    with pytest.raises(ValueError, match=r"mine\.py:1 is not valid Python"):
        FromFile.read(f"{written('def score(')}:score")


def test_a_function_of_a_file_runs_where_the_file_is_not(written):
    path = written("def double(value):\n    return 2 * value\n")
    sent = pickle.dumps(FromFile.read(f"{path}:double"))
    path.unlink()
    assert pickle.loads(sent).load()(4) == 8


def test_a_file_may_import_others_beside_it(written):
    written("WEIGHT = 3\n", "weights_of_mine.py")
    path = written("from weights_of_mine import WEIGHT\n\ndef weigh(value):\n    return WEIGHT * value\n")
    assert resolve(f"{path}:weigh")(2) == 6


def test_the_place_of_a_function_or_class_is_its_file_and_line(written):
    path = written(LOSS)
    assert place_of(resolve(f"{path}:compute")) == "mine.py:16"
    assert place_of(resolve(f"{path}:Scale")) == "mine.py:6"
    assert place_of(3) == place_of(len) == ""
