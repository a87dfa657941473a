"""A worker that answers, waits for a file, or hangs, as told."""

import os
import time
from pathlib import Path

from rl_core.model import Coordinates


class StubbornWorker:
    def echo(self, value):
        return value

    def coordinates(self):
        return Coordinates({"dp": 0}, {"dp": 1})

    def wait_for(self, path):
        while not Path(path).exists():
            time.sleep(0.01)
        if reason := Path(path).read_text():
            raise InterruptedError(reason)
        return path

    def interrupt(self, path, reason):
        aside = Path(f"{path}.aside")
        aside.write_text(reason)
        aside.rename(path)

    def fail(self, text):
        raise ArithmeticError(text)

    def end(self):
        os._exit(3)

    def hang_in_a_named_function(self, path):
        Path(path).touch()
        time.sleep(600)

    def health(self):
        return {}
