import sys
from pathlib import Path

# `counting_run` is imported by the tests and started as a process
sys.path.insert(0, str(Path(__file__).parent))
