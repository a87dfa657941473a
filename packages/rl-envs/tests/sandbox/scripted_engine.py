"""A container engine of tests: takes the arguments of `docker`, and runs containers as processes of this machine.

Some images behave badly: their names are their behavior.
"""

import json
import os
import signal
import sys
import tempfile
import time

home = os.path.dirname(os.path.abspath(sys.argv[0]))
verb, *rest = sys.argv[1:]
with open(f"{home}/log", "a") as log:
    print(json.dumps([verb, *(word[:100] for word in rest)]), file=log)
if verb == "image" and rest[1].startswith("missing"):
    sys.exit(1)
if verb == "pull":
    sys.exit(f"{rest[-1]} does not exist")
if verb == "kill":
    with open(f"{home}/{rest[0]}") as file:
        os.kill(int(file.read()), signal.SIGKILL)
if verb == "run":
    at = rest.index("--entrypoint")
    python, image, *arguments = rest[at + 1 :]
    with open(f"{home}/{rest[rest.index('--name') + 1]}", "w") as file:
        file.write(str(os.getpid()))
    if image == "engine-fails":
        sys.stderr.write("the daemon is away")
        sys.exit(125)
    if image == "without-python":
        sys.exit(127)
    if image == "out-of-memory":
        sys.exit(137)
    if image == "huge":
        while True:
            os.write(1, bytes(2**20))
    if image == "garbage":
        sys.stdout.write("all is well")
        sys.exit(0)
    if image == "silent":
        time.sleep(600)
    os.chdir(tempfile.mkdtemp(dir=home))
    os.environ["OF_IMAGE"] = image
    os.execvp(sys.executable, [python, *arguments])
