"""Environment variables of an environment's process: an allow-list, so that the driver's secrets stay outside."""

from __future__ import annotations

from collections.abc import Mapping

_PATHS_LOCALE_AND_CACHES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP TERM
    VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH LD_PRELOAD
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME
    HF_HOME HF_HUB_CACHE HUGGINGFACE_HUB_CACHE HF_ASSETS_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE
    HF_HUB_OFFLINE HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM
    NLTK_DATA MPLCONFIGDIR RL_HOME
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE
"""
PASSED = frozenset(_PATHS_LOCALE_AND_CACHES.split())
"""Names that an environment's process sees as its parent does."""

PASSED_PREFIXES = ("LC_", "PYTHON")
"""Beginnings of further such names."""

DEFAULTS = {
    # every process computes with one thread, as there is a process per core
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # devices belong to the models
    "CUDA_VISIBLE_DEVICES": "",
    # a print is in the log even if the process is killed right after it
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every environment's process."""


def process_variables(inherited: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an environment's process starts with.

    Args:
        inherited: variables of the process that starts it; only those on the allow-list are kept.
        settings: `env.<name>.env_vars`, which win over everything else.
    """
    kept = {name: value for name, value in inherited.items() if name in PASSED or name.startswith(PASSED_PREFIXES)}
    return kept | DEFAULTS | dict(settings)
