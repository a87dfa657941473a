# Commands of this repository; `just` lists them, and CONTRIBUTING.md explains them.
# Without just on the path: uv run just

set positional-arguments
set shell := ["bash", "-cu"]

_list:
    @just --list --unsorted

# style, spelling, import directions, and types without torch
lint:
    uv run tox -e lint

# fix what ruff can fix
format:
    uv run ruff check --fix
    uv run ruff format

# types of the code that uses torch, with torch installed
types:
    uv run tox -e types

# tests of one package in its own environment: just test core -k ragged
test package *args:
    uv run tox -e "$1" -- "${@:2}"

# every block, link and config key of the documents
docs:
    uv run tox -e integration -- test_document_checks.py test_documents.py test_metrics_glossary.py

# the documentation site, in build/site/html
site *args:
    uv run --group site tools/build_site.py "$@"

# a tiny model learns sums by SFT and GRPO
quickstart:
    uv run rl quickstart

# uv.lock, and the exports of it that rl-launch ships
locks:
    uv lock
    uv run python tools/export_worker_locks.py

# digests of the base images' tags, to update images/Dockerfile with; needs docker
image-digests:
    sed -n 's/^ARG [A-Z]*=\([^@]*:[^@]*\)@sha256:.*/\1/p' images/Dockerfile | while read -r image; do \
        echo "$image@$(docker buildx imagetools inspect "$image" --format '{{{{.Manifest.Digest}}')"; done

# all tests of the suites that have slow, largely redundant cases; takes hours
every-case *args:
    uv run tox -e lint,core,envs,algos,dtensor,megatron,vllm,launch,integration -- --every-case --timeout 3600 "$@"

# version, changelog and dependents of a package: just release rl-core 0.2.0
release package version:
    uv run python tools/release.py "$1" "$2"
