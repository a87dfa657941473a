"""The page in a real browser: every view of a finished run and of one that goes on, and hostile rollouts."""

import json
import threading
from pathlib import Path

import pytest
from browser import PROGRAM, browser
from made_runs import (
    Words,
    add_profiles,
    add_step,
    add_tokens,
    add_traces,
    agent_rollout,
    group,
    made_evaluation,
    made_run,
    made_server,
    rollout,
)

from rl_core.testing.exhaustive import partly_exhaustive
from rl_launch.view.catalog import PageCatalog
from rl_launch.view.export import export
from rl_launch.view.server import ViewServer

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")

AXE = Path(__file__).parent / "vendor" / "axe.min.js"

HOSTILE = (
    '<script>window.hacked = 1</script><img src="http://evil.example/x" onerror="window.hacked = 1">'
    "\x1b[31mred\x1b[0m \u202egnp.exe\u202c {{7*7}} ${window.hacked = 1} javascript:alert(1)\n" + "x" * 250_000
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made_run(folder / "one", 12)
    add_tokens(folder / "one", 12)
    add_traces(folder / "one", 30)
    add_profiles(folder / "one")
    made_run(folder / "two", 12, lr=0.002)
    made_evaluation(folder / "evals" / "a", 0.0)
    made_evaluation(folder / "evals" / "b", 1.0)
    made_server(folder / "served")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        opened.size(1440)
        yield opened


@pytest.fixture(scope="module")
def server(root):
    made = ViewServer(PageCatalog([root]))
    threading.Thread(target=made.serve, daemon=True).start()
    yield made
    made.close()


@pytest.fixture
def view(page, server):
    page.problems.clear()
    page.requests.clear()
    page.open(server.url)
    page.wait("document.querySelector('tbody tr')")

    def go(address, condition):
        page.js(f"location.hash = {json.dumps(address)}")
        page.wait(condition)

    yield go
    assert page.problems == []
    assert {url.split("/")[2] for url in page.requests if "//" in url} == {f"127.0.0.1:{server.port}"}


HAS_TEXT = "document.body.innerText.includes({})"
VIEWS = {
    "#/runs": "document.querySelectorAll('.u-wrap').length >= 2",
    "#/runs?filter=lr=0.002&x=time&smooth=0.5&log=1": "document.querySelectorAll('tbody tr').length === 1",
    "#/run/one/metrics": "document.querySelectorAll('.u-wrap').length >= 2",
    "#/run/one/rollouts": "document.querySelectorAll('tbody tr').length === 4",
    "#/run/one/rollouts?first=1&last=12&sort=-reward": HAS_TEXT.format("'48 rollouts'"),
    "#/run/one/rollouts?open=12:1": HAS_TEXT.format("'answer 1 of step 12'"),
    "#/run/one/rollouts?open=12:1&as=group": "document.querySelectorAll('.side-by-side article').length === 2",
    "#/run/one/rollouts?open=12:1&as=diff&with=12:0": "document.querySelector('del') && document.querySelector('ins')",
    "#/run/one/rollouts?open=12:1&as=tokens": "document.querySelectorAll('.tokens .token').length === 8",
    "#/run/one/rollouts?open=12:1&as=tokens&color=difference": "document.querySelector('.tokens .tone-below4')",
    "#/run/one/rollouts?open=12:1&as=tokens&color=weight_version": "document.querySelector('.tokens .tone-group1')",
    "#/run/one/rollouts?open=12:2&as=tokens": HAS_TEXT.format("'logger.token_level=all'"),
    "#/run/one/timeline": "document.querySelectorAll('.timeline rect').length > 12",
    "#/run/one/timeline?trace=2": "document.querySelectorAll('.processes .mark').length === 1",
    "#/run/two/timeline": HAS_TEXT.format("'no traces'"),
    "#/run/one/advice": "document.querySelector('.advice, .empty')",
    "#/run/one/config?other=two": HAS_TEXT.format("'policy.optimizer.kwargs.lr'"),
    "#/run/one/logs": HAS_TEXT.format("'replica 1 was lost'"),
    "#/run/one/checkpoints": HAS_TEXT.format("'no checkpoints'"),
    "#/evaluations?first=evals/a&second=evals/b": HAS_TEXT.format("'2 / 0'"),
    "#/servers": "document.querySelectorAll('tbody tr').length === 2",
    "#/run/evals%2Fa/rollouts?kind=evaluation": "document.querySelectorAll('tbody tr').length === 4",
}


FIRST = (
    "#/runs",
    "#/run/one/rollouts?open=12:1&as=tokens",
    "#/run/one/timeline?trace=2",
    "#/evaluations?first=evals/a&second=evals/b",
)
"""Lists, texts, figures and tables; the others show the same parts with other choices."""


@pytest.mark.parametrize("address", partly_exhaustive(VIEWS, always=FIRST))
def test_every_view_is_shown_fits_and_can_be_read_aloud(view, page, address):
    view(address, VIEWS[address])
    for width in (390, 1440):
        page.size(width)
        assert page.js("document.documentElement.scrollWidth <= innerWidth"), width

    if not page.js("!!window.axe"):
        page.js(f"{AXE.read_text()}; 0")
    for theme in ("dark", "light"):
        page.js(f"document.documentElement.dataset.theme = '{theme}'")
        found = page.js(
            "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations"
            ".filter((each) => ['serious', 'critical'].includes(each.impact))"
            ".map((each) => `${each.id}: ${each.nodes.slice(0, 3).map((node) => node.html).join(' | ')}`))"
        )
        assert found == [], theme


def test_a_new_step_and_a_new_run_appear_by_themselves(view, page, root):
    view("#/run/two/rollouts", HAS_TEXT.format("'step 12'"))
    add_step(root / "two", 13, group(13, 0))
    page.wait(HAS_TEXT.format("'answer 0 of step 13'"))

    view("#/run/two/logs", HAS_TEXT.format("'replica 1 was lost'"))
    with (root / "two" / "logs" / "driver.log").open("a") as file:
        file.write("a line that was added\n")
    page.wait(HAS_TEXT.format("'a line that was added'"))

    view("#/runs", "document.querySelectorAll('tbody tr').length === 2")
    made_run(root / "three")
    page.wait("document.querySelectorAll('tbody tr').length === 3")


def test_ticks_of_steps_are_whole(view, page, root):
    made_run(root / "short", 3)
    page.wait("RlView.ask('runs').then((found) => found.runs.some((run) => run.id === 'short'))")
    view("#/run/short/metrics", "document.querySelectorAll('.u-wrap').length >= 2")
    ticks = page.js("uPlot.sync('rl-view').plots.flatMap((plot) => plot.axes[0]._splits)")
    assert len(ticks) > 2
    assert [tick for tick in ticks if tick != int(tick)] == []


def test_a_config_begins_with_what_was_set_and_is_searched_in_whole(view, page, root):
    keys = "[...document.querySelectorAll('tbody tr td:first-child')].map((each) => each.textContent).join(' ')"
    origins = {"grpo.max_num_steps": "command line"} | dict.fromkeys(("policy.model_name", "algorithm"), "default")
    (made_run(root / "set") / "origins.json").write_text(json.dumps(origins))
    page.wait("RlView.ask('runs').then((found) => found.runs.some((run) => run.id === 'set'))")
    view("#/run/set/config", f"{keys}.includes('grpo.max_num_steps')")
    assert "policy.model_name" not in page.js(keys)
    view("#/run/set/config?defaults=1", f"{keys}.includes('policy.model_name')")
    view("#/run/set/config?key=model", f"{keys} === 'policy.model_name'")


def test_the_chosen_tab_is_in_view_on_a_narrow_screen(view, page):
    page.size(390)
    chosen = "document.querySelector('.tabs [aria-current]').getBoundingClientRect()"
    try:
        for tab in ("checkpoints", "metrics", "logs"):
            view(f"#/run/one/{tab}", f"document.querySelector('.tabs [aria-current]')?.textContent === '{tab}'")
            page.wait(f"{chosen}.left >= 0 && {chosen}.right <= innerWidth")
    finally:
        page.size(1440)


def test_an_unknown_run_leads_back_to_all_runs(view, page):
    view("#/run/nosuch/metrics", HAS_TEXT.format("'There is no run or evaluation nosuch'"))
    page.js("document.querySelector('main .problem a').click()")
    page.wait("document.querySelectorAll('tbody tr').length >= 2")


def test_the_segments_of_an_agent_are_shown_one_after_the_other(view, page, root):
    add_step(made_run(root / "agents"), 4, [agent_rollout()])
    page.wait("RlView.ask('runs').then((found) => found.runs.some((run) => run.id === 'agents'))")
    view("#/run/agents/rollouts?open=4:0", HAS_TEXT.format("'It is repaired.'"))
    order = [
        "Segment 1",
        "tools: look",
        "You repair code.",
        "I look.",
        "42 files",
        "many files",
        "Segment 2",
        "In short",
    ]
    shown = page.js("document.querySelector('.turns').innerText")
    assert [shown.index(each) for each in order] == sorted(shown.index(each) for each in order)
    assert "begins with 1 of the messages of segment 1" in shown
    view("#/run/agents/rollouts?first=4&last=4&text=you+repair", "document.querySelectorAll('tbody tr').length === 1")


def test_hostile_rollouts_are_shown_as_text(view, page, root):
    verdicts = [{"judge": HOSTILE, "question": HOSTILE, "answer": HOSTILE, "value": {HOSTILE: HOSTILE}, "cached": True}]
    others = {"prompt": [{"role": "<b>x", "content": HOSTILE}], "failure": HOSTILE, "verdicts": verdicts}
    records = [rollout(HOSTILE[:60], 0, HOSTILE, 1.0, **others)]
    add_step(made_run(root / "hostile"), 4, records)
    page.wait("RlView.ask('runs').then((found) => found.runs.some((run) => run.id === 'hostile'))")
    view("#/run/hostile/rollouts?open=4:0", HAS_TEXT.format("'<script>window.hacked = 1</script>'"))

    page.wait("(document.querySelector('.turns')?.innerText ?? '').includes('verdicts of judges')")
    assert page.js("window.hacked === undefined")
    assert page.js("[...document.querySelectorAll('main script, main img')].length") == 0
    marks = page.js("[...document.querySelectorAll('.hidden-character')].map((each) => each.innerText)")
    assert {"ESC", "RLO", "PDF"} <= set(marks)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")


COLOURED = [
    (color, theme) for color in ("logprob", "difference", "loss_mask", "weight_version") for theme in ("light", "dark")
]


@pytest.mark.parametrize(
    ("color", "theme"), partly_exhaustive(COLOURED, always=[("logprob", "light"), ("weight_version", "dark")])
)
def test_coloured_tokens_can_be_read_in_both_themes(view, page, theme, color):
    view(f"#/run/one/rollouts?open=12:1&as=tokens&color={color}", "document.querySelector('.tokens .token')")
    page.js(f"document.documentElement.dataset.theme = '{theme}'")
    if not page.js("!!window.axe"):
        page.js(f"{AXE.read_text()}; 0")
    # the mark of a newline is not text, so that axe does not decide on it
    nodes = "[...found.violations, ...found.incomplete].flatMap((each) => each.nodes.map((node) => node.html))"
    try:
        unreadable = page.js(f"axe.run('.rollout', {{runOnly: ['color-contrast']}}).then((found) => {nodes})")
    finally:
        page.js("document.documentElement.dataset.theme = 'system'")
    assert [each for each in unreadable if not each.startswith('<i class="newline"')] == []


def test_the_pointer_and_the_keys_show_all_values_of_a_token(view, page):
    view("#/run/one/rollouts?open=12:1&as=tokens", "document.querySelector('.tokens .token')")
    card = "document.querySelector('.token-card')?.innerText ?? ''"
    page.js("document.querySelector('.tokens').focus()")
    page.wait(f"({card}).includes('not sampled by the policy')")
    assert "<|user|>" in page.js(card)
    for _ in range(4):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    page.wait(f"({card}).includes('w0')")
    shown = page.js(card).split("\n")
    assert shown[0] == '"w0\\n"'
    assert {"4 at 4", "-1.5 (0.2231)", "-1.25 (0.2865)", "-0.25", "1.5", "yes", "3"} <= set(shown)
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    page.wait("!document.querySelector('.token-card')")
    assert page.js("!!document.querySelector('.tokens')")

    place = page.js(
        "(() => { const box = [...document.querySelectorAll('.tokens .token')].at(-1).getClientRects()[0];"
        "return [box.left + box.width / 2, box.top + box.height / 2] })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=place[0], y=place[1])
    page.wait(f"({card}).includes('weight version')")
    assert page.js(card).split("\n")[-1] == "4"
    assert page.js("document.querySelector('.token.current').textContent") == "w3\u21b5\n"


def test_tokens_of_the_prompt_are_not_trained_on_and_special_ones_are_marked(view, page):
    view("#/run/one/rollouts?open=12:0&as=tokens&color=loss_mask", "document.querySelector('.tokens .token')")
    classes = page.js("[...document.querySelectorAll('.tokens .token')].map((each) => each.className)")
    assert classes[:3] == ["token special untrained", "token untrained", "token tone-group0"]
    assert page.js("document.querySelector('.tokens .hidden-character').textContent") == "e2 82"


def test_hostile_tokens_are_shown_as_text(view, page, root):
    class Hostile(Words):
        def text(self, number):
            return HOSTILE[:150].encode()

    run = made_run(root / "hostile-tokens")
    add_step(run, 4, [rollout("p0", 0, "x", 1.0)])
    add_tokens(run, 4, num_rollouts=1, texts=Hostile())
    page.wait("RlView.ask('runs').then((found) => found.runs.some((run) => run.id === 'hostile-tokens'))")
    view("#/run/hostile-tokens/rollouts?open=4:0&as=tokens", HAS_TEXT.format("'<script>window.hacked = 1</script>'"))
    page.js("document.querySelector('.tokens').focus()")
    page.wait("document.querySelector('.token-card')")

    assert page.js("window.hacked === undefined")
    assert page.js("[...document.querySelectorAll('main script, main img')].length") == 0
    marks = page.js("[...document.querySelectorAll('.tokens .hidden-character')].map((each) => each.innerText)")
    assert {"ESC", "RLO", "PDF"} <= set(marks)
    assert page.js("document.documentElement.scrollWidth <= innerWidth")


def test_links_hold_the_view_and_keys_move_through_it(view, page):
    view("#/run/one/rollouts", "document.querySelectorAll('tbody tr').length > 0")
    page.js("document.querySelector('tbody tr').focus()")
    for key in ("ArrowDown", "Enter"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    page.wait("document.querySelector('.rollout')")
    assert page.js("location.hash").startswith("#/run/one/rollouts?open=")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    page.wait("!document.querySelector('.rollout')")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="t")
    page.wait("document.querySelector('.timeline')")


def test_the_timeline_shows_rows_of_processes_and_moves_by_step(view, page):
    view("#/run/one/timeline", HAS_TEXT.format("'Processes in step 30'"))
    page.wait("document.querySelectorAll('.processes').length === 2")
    page.js("document.querySelector('[aria-label=\"earlier traced step\"]').click()")
    page.wait(HAS_TEXT.format("'Processes in step 29'"))
    assert page.js("location.hash").endswith("trace=29")
    row = "document.querySelector('svg[aria-label^=\"policy-0 calls: 1 spans, idle 50%\"]')"
    page.wait(row)
    page.js(f"{row}.querySelector('rect').dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    page.wait(HAS_TEXT.format("'train_step: 1.0 s, from 1.0 s'"))
    assert page.js("document.body.innerText.includes('speedscope.app')")


def test_an_export_opens_from_a_file(page, tmp_path):
    add_step(made_run(tmp_path / "runs" / "one"), 4, group(4, 0), **{"policy/nll": 0.5})
    add_tokens(tmp_path / "runs" / "one", 3)
    add_traces(tmp_path / "runs" / "one", 4)
    made_run(tmp_path / "runs" / "two")
    export(PageCatalog([tmp_path / "runs"]), tmp_path / "out")
    page.problems.clear()
    page.requests.clear()

    page.open(f"file://{tmp_path}/out/index.html#/run/one/rollouts?open=3:1")
    page.wait(HAS_TEXT.format("'answer 1 of step 3'"))
    page.js("location.hash = '#/run/one/rollouts?open=3:1&as=tokens'")
    page.wait("document.querySelectorAll('.tokens .token').length === 8")
    page.js("location.hash = '#/run/one/rollouts?open=3:2&as=tokens'")
    page.wait(HAS_TEXT.format("'This export has no tokens of this rollout'"))
    for address in ("#/run/one/metrics", "#/runs"):
        page.js(f"location.hash = {json.dumps(address)}")
        page.wait("document.querySelectorAll('.u-wrap').length === 3")
        assert not page.js("!!document.querySelector('.problem')")

    page.js("location.hash = '#/run/one/timeline?trace=2'")
    page.wait("document.querySelectorAll('.processes .mark').length === 1")

    assert page.problems == []
    assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}
