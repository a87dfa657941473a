"""How tests find the processes of the runs that they start."""

import subprocess
import sys

import psutil
from runs import family

WATCHER = """
import os
import sys

watched = os.pidfd_open(os.getppid())
print(os.getpid(), flush=True)
sys.stdin.read()
"""

PARENT = """
import subprocess
import sys

subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


def test_processes_that_have_descriptors_of_one_another_are_found_once():
    command = [sys.executable, "-c", PARENT, WATCHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        watcher = int(parent.stdout.readline())
        assert [each.pid for each in family(psutil.Process(parent.pid))] == [parent.pid, watcher]
        parent.stdin.close()
