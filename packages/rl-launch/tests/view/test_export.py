"""The page as static files."""

import json

import pytest
from made_runs import add_step, add_tokens, lines, made_evaluation, made_run, rollout
from typer.testing import CliRunner

from rl_core.errors import ConfigError
from rl_launch.cli import app
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.export import chosen, export


def test_steps_are_chosen_at_equal_distances():
    assert chosen(range(1, 101), 4) == [1, 34, 67, 100]
    assert chosen([3, 5], 4) == [3, 5]
    assert chosen([3, 5, 7], 1) == [7]
    assert chosen([3, 5, 7], 0) == []


def test_an_export_has_the_answers_of_the_page(tmp_path):
    made_run(tmp_path / "runs" / "one")
    made_evaluation(tmp_path / "runs" / "eval", 1.0)

    count = export(PageCatalog([tmp_path / "runs"]), tmp_path / "out", steps=2, rollouts=3)

    index = (tmp_path / "out" / "data" / "index.js").read_text()
    found = json.loads(index[index.index("(") + 1 : index.rindex(")")])
    names = found["names"]
    assert found["steps"]["one"] == {"step": [1, 3], "val": [], "spans": []}
    assert count == 2 * 3 + 3
    assert '["rollouts",[["first","1"],["id","one"],["kind","step"],["last","1"],["limit","3"]]]' in names
    name = names['["run",[["id","one"]]]']
    text = (tmp_path / "out" / "data" / f"{name}.js").read_text()
    assert '"best_step":3' in text
    assert all((tmp_path / "out" / name).is_file() for name in ("index.html", "app/main.js", "vendor/LICENSES.txt"))


def test_an_export_has_the_tokens_of_some_rollouts_of_a_step(tmp_path):
    add_tokens(made_run(tmp_path / "runs" / "one"), 3, num_rollouts=2)
    for most in (0, 1, 8):
        assert export(PageCatalog([tmp_path / "runs"]), tmp_path / "out", steps=1, tokens=most) == 4
        index = (tmp_path / "out" / "data" / "index.js").read_text()
        found = json.loads(index[index.index("(") + 1 : index.rindex(")")])
        assert found["tokens"] == most
        keys = [json.loads(each) for each in found["names"]]
        rows = [dict(given)["row"] for name, given in keys if name == "tokens"]
        assert rows == ["0", "1"][:most]


def test_a_hostile_rollout_stays_a_string(tmp_path):
    run = made_run(tmp_path / "runs" / "one", 1)
    text = '</script><script>alert(1)</script>\u2028"); alert(2); ("'
    (run / "rollouts" / "step_1.jsonl").write_bytes(lines([rollout("p", 0, text, 1.0)]))
    export(PageCatalog([tmp_path / "runs"]), tmp_path / "out")

    for path in (tmp_path / "out" / "data").glob("a*.js"):
        content = path.read_text()
        assert "\u2028" not in content
        answer = content[content.index(", ") + 2 : content.rindex(");")]
        json.loads(answer)


def test_an_export_is_made_again_and_nothing_else_is_overwritten(tmp_path):
    run = made_run(tmp_path / "runs" / "one", 1)
    catalog = PageCatalog([tmp_path / "runs"])
    export(catalog, tmp_path / "out")
    add_step(run, 2)
    assert export(catalog, tmp_path / "out") == 8

    with pytest.raises(ConfigError, match="is not empty"):
        export(catalog, tmp_path / "runs")


def test_the_command_exports(tmp_path):
    made_run(tmp_path / "runs" / "one", 1)
    result = CliRunner().invoke(app, ["view", str(tmp_path / "runs"), "--export", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert result.output == f"{tmp_path / 'out' / 'index.html'} (4 rollouts)\n"


@pytest.mark.parametrize("name", ["nothing", "file.txt"])
def test_a_path_without_runs_is_refused(tmp_path, name):
    (tmp_path / "file.txt").write_text("")
    result = CliRunner().invoke(app, ["view", str(tmp_path / name)])
    assert result.exit_code == 2
    assert name in result.output
