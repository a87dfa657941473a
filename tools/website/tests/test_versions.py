"""Sites of several versions stand next to one another, and a reader changes between them from `file://`."""

import pytest
from conftest import ROOT
from website.source import SiteError
from website.versions import publish, versions

PAGE = """<!doctype html><html lang="en"><title>{0}</title><div class="md-header__title">{0}</div>
<script id="__config" type="application/json">{{"base": "{1}"}}</script>
<script src="{1}/assets/version.js"></script><script src="{1}/assets/site.js"></script>"""


@pytest.fixture
def site(tmp_path):
    def make(*pages):
        html = tmp_path / "built"
        (html / "assets").mkdir(parents=True, exist_ok=True)
        for name in ("site.js", "version.js"):
            (html / "assets" / name).write_text((ROOT / "tools/website/assets" / name).read_text())
        for place in ("index.html", *pages):
            path = html / place
            path.parent.mkdir(exist_ok=True)
            path.write_text(PAGE.format(place, ".." if "/" in place else "."))
        return html

    return make


def test_versions_are_listed_newest_first_and_the_index_leads_to_latest(site, tmp_path):
    folder = tmp_path / "sites"
    for name in ("0.9.0", "0.10.0", "latest", "0.2.0", "0.10.0"):
        publish(site("a.html"), folder, name)
    assert versions(folder) == ["latest", "0.10.0", "0.9.0", "0.2.0"]
    assert 'url=latest/index.html"' in (folder / "index.html").read_text()
    assert '{"name": "0.2.0", "pages": ["a.html", "index.html"]}' in (folder / "versions.js").read_text()
    assert (folder / "0.2.0/assets/version.js").read_text() == 'window.siteVersion = "0.2.0";\n'


@pytest.mark.parametrize("name", ["../x", "main", "1.0-rc", ""])
def test_another_name_is_refused(site, tmp_path, name):
    with pytest.raises(SiteError, match="pass latest or a number"):
        publish(site(), tmp_path / "sites", name)


def test_the_switcher_opens_the_same_page_or_the_first_one(site, tmp_path, page):
    folder = tmp_path / "sites"
    publish(site("guides/a.html"), folder, "0.1.0")
    publish(site("guides/a.html", "guides/b.html"), folder, "latest")
    choose = "(name => { const each = document.querySelector('select'); each.value = name; each.onchange(); })"
    for name, expected in (("a", "0.1.0/guides/a.html"), ("b", "0.1.0/index.html")):
        page.open((folder / f"latest/guides/{name}.html").as_uri())
        page.wait("document.querySelector('select')?.value == 'latest'")
        page.js(f"{choose}('0.1.0')")
        page.wait(f"location.href == {(folder / expected).as_uri()!r}")
    assert page.problems == []
