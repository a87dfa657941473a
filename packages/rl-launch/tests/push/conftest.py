import sys
from pathlib import Path

# `counting_run`, a run without engines, is that of the session's tests
sys.path.insert(0, str(Path(__file__).parents[1] / "session"))
