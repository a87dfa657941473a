"""Files of the page that ship with the package."""

from __future__ import annotations

from importlib.resources import files

_APP = ("core", "parts", "charts", "runs", "run", "processes", "rollouts", "tokens", "rollout", "pages", "main")
SCRIPTS = ("vendor/uPlot.iife.min.js", "vendor/preact-htm.umd.js", *(f"app/{name}.js" for name in _APP))
"""Classic scripts in loading order: a page on `file://` cannot load modules."""

STYLES = ("vendor/uPlot.min.css", "app/style.css")

TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

POLICY = (
    "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
"""Content security policy of the page: no inline code, and nothing from elsewhere."""


def names() -> list[str]:
    """Return the name of every file, except the page itself."""
    return [*SCRIPTS, *STYLES, "icon.svg", "vendor/LICENSES.txt"]


def content(name: str) -> bytes:
    """Return the contents of a file.

    Args:
        name: One of `names`.

    Raises:
        FileNotFoundError: If the page has no such file.
    """
    if name not in names():
        raise FileNotFoundError(name)
    return files(__package__).joinpath("static", *name.split("/")).read_bytes()


def page(*, data_script: str = "") -> bytes:
    """Return the page.

    Args:
        data_script: A script to load before the others, in an export; empty for a page that asks a server.
    """
    # a page in a file has no headers, and frame-ancestors is only valid in one
    rules = "; ".join(rule for rule in POLICY.split("; ") if not rule.startswith("frame-ancestors"))
    policy = f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n' if data_script else ""
    styles = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    names = (data_script, *SCRIPTS) if data_script else SCRIPTS
    scripts = "\n".join(f'<script defer src="{name}"></script>' for name in names)
    text = files(__package__).joinpath("static", "index.html").read_text(encoding="utf-8")
    return text.replace("<!-- head -->", f"{policy}{styles}\n{scripts}").encode()
