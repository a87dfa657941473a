import os
import py_compile
import subprocess
import sys

from share_bytecode import take_over


def write(folder, module, text):
    """A module of an environment, with the time that every link of its file has."""
    path = folder / module
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (10**9, 10**9))
    return path


def test_compiled_modules_of_equal_files_are_used_and_others_are_compiled_again(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        write(folder, "same/part.py", "value = 1\n")
        write(folder, "other.py", f"value = {folder.name!r}\n")
    write(theirs, "absent/part.py", "value = 1\n")
    for path in theirs.rglob("*.py"):
        py_compile.compile(str(path))
    (compiled,) = theirs.glob("same/__pycache__/*.pyc")
    assert take_over(ours, theirs) == 2
    assert take_over(ours, theirs) == 0
    assert (ours / compiled.relative_to(theirs)).samefile(compiled)
    assert not (ours / "absent").exists()
    command = [sys.executable, "-v", "-c", "import other, same.part; print(other.value, same.part.value)"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ours)}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ours", "1"]
    sources = [line.partition("code object from ")[2] for line in done.stderr.splitlines() if str(ours) in line]
    assert [source for source in sources if source] == [f"{ours}/other.py", f"'{ours / compiled.relative_to(theirs)}'"]
