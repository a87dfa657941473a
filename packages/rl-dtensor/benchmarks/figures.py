"""Tables and the machine's description, as the benchmarks of the whole repository print them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from measurement import median, seconds, surroundings, table

__all__ = ["median", "seconds", "surroundings", "table"]
