"""Sections that end in every way, for the test of the check itself."""

import os
import threading


def passes(setup, report):
    report.within("a check", "nothing", 0.0, 1.0)


def raises(setup, report):
    with report.attempt("a check"):
        raise RuntimeError("of the check")
    report.within("another", "nothing", float("nan"), 1.0)
    raise ValueError("of the section")


def dies(setup, report):
    report.holds("before", "nothing", True, "")
    with report.attempt("dying"):
        os._exit(7)


def hangs(setup, report):
    threading.Event().wait()
