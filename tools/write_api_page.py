"""Write docs/api.md, the public names of each package; run it after every change of a stub or of a public docstring.

`--check` fails if the page is stale instead.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rl_core.testing.public_names import summaries_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/api.md"
PACKAGES = ("rl_core", "rl_algos", "rl_envs", "rl_dtensor", "rl_megatron", "rl_vllm", "rl_launch")
_OPENING = """# Public names

These are the names that your code and configs can rely on. Import them from the package that lists them, as in
`from rl_core import Batch`; in a config, write `rl_core:thinking_format`. Modules behind them may move in any release.
Each line is the start of a docstring; `help()` shows the rest.
"""
_SENTENCE_END = re.compile(r"(?<=\.)(?<!Dr\.)\s(?=[A-Z`])")


def page() -> str:
    """Return the text of the page."""
    return _OPENING + "".join(f"\n## {package}\n\n{_lines(package)}" for package in public_packages())


def public_packages() -> list[str]:
    """Return the packages and modules that have a stub with public names, in the order of the page."""
    found = []
    for package in PACKAGES:
        source = ROOT / "packages" / package.replace("_", "-") / "src"
        stubs = (stub.relative_to(source).with_suffix("") for stub in source.rglob("*.pyi"))
        found += sorted(".".join(stub.parts).removesuffix(".__init__") for stub in stubs)
    return found


def _lines(package: str) -> str:
    return "".join(f"- `{name}`: {_first_sentence(text)}\n" for name, text in summaries_of(package).items())


def _first_sentence(text: str) -> str:
    return _SENTENCE_END.split(text, maxsplit=1)[0].removesuffix(":")


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` return 1 if it is stale."""
    if arguments == ["--check"]:
        is_stale = not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page()
        if is_stale:
            sys.stderr.write("docs/api.md is stale; run python tools/write_api_page.py\n")
        return int(is_stale)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
