"""Settings of the tests of every package."""

import importlib.util

if importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    # examples have no deadline, as the machine may be busy, and are the same in every run
    settings.load_profile("ci")
