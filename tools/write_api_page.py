"""Write docs/api.md and docs/service-names.md; run it after every change of a stub or of a public docstring.

`--check` fails if a page is stale instead.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rl_core.exports import homes_of
from rl_core.testing.public_names import summaries_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("rl_core", "rl_algos", "rl_envs", "rl_dtensor", "rl_megatron", "rl_vllm", "rl_launch")
SERVICES = ("rl_core.service", "rl_algos.service")
_OPENING = """# Public names

These are the names that your code and configs can rely on. Import them from the package that lists them, as in
`from rl_core import Batch`; in a config, write `rl_core:thinking_format`. Modules behind them may move in any release.
Each line is the start of a docstring; `help()` shows the rest.
"""
_SERVICE_OPENING = """# Service names

These are the names of rl-core and rl-algos that packages built on them use, by the module that defines them. They stay
until the next breaking version; [What stays compatible](compatibility.md) has the rules. Your own algorithms, rewards,
environments and backends need only [public names](api.md).

Import them from `rl_core.service` or `rl_algos.service`. Each line is the start of a docstring.
"""
_SENTENCE_END = re.compile(r"(?<=\.)(?<!Dr\.)\s(?=[A-Z`])")


def pages() -> dict[Path, str]:
    """Return the text of each page by its path."""
    public = "".join(f"\n## {package}\n\n{_lines(summaries_of(package))}" for package in public_packages())
    return {DOCS / "api.md": _OPENING + public, DOCS / "service-names.md": _SERVICE_OPENING + _services()}


def public_packages() -> list[str]:
    """Return the packages and modules that have a stub with public names, in the order of the page."""
    found = []
    for package in PACKAGES:
        source = ROOT / "packages" / package.replace("_", "-") / "src"
        stubs = (stub.relative_to(source).with_suffix("") for stub in source.rglob("*.pyi") if stub.stem != "service")
        found += sorted(".".join(stub.parts).removesuffix(".__init__") for stub in stubs)
    return found


def _services() -> str:
    text = ""
    for service in SERVICES:
        text += f"\n## {service.partition('.')[0]}\n"
        summaries = summaries_of(service)
        for module, names in groupby(sorted(homes_of(service).items(), key=itemgetter(1, 0)), key=itemgetter(1)):
            text += f"\nOf `{module}`:\n\n{_lines({name: summaries[name] for name, _ in names})}"
    return text


def _lines(summaries: Mapping[str, str]) -> str:
    return "".join(f"- `{name}`: {_first_sentence(text)}\n" for name, text in summaries.items())


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text, maxsplit=1)[0].removesuffix(":")


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` return 1 if one is stale."""
    if arguments == ["--check"]:
        stale = [path.name for path, text in pages().items() if not path.is_file() or path.read_text("utf-8") != text]
        sys.stderr.write("".join(f"docs/{name} is stale; run python tools/write_api_page.py\n" for name in stale))
        return int(bool(stale))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
