from rl_launch.commands.environments.check import sought_texts

CODE = r"""
import re

NUMBER = re.compile(r"code: (\d+)")


class Door:
    def step(self, response, answer):
        said = response.removeprefix("I say ").split("####")
        if response == "open" or "please" in response or said[-1] in ("a", "b"):
            return 1.0
        return float(NUMBER.search(response) is not None and re.fullmatch("x", response) != answer)
"""


def test_what_code_looks_for_in_responses_is_found(tmp_path):
    (tmp_path / "door.py").write_text(CODE)
    assert sought_texts(f"{tmp_path}/door.py:Door") == [
        r"door.py:4: re.compile code: (\d+)",
        "door.py:9: .split ####",
        "door.py:9: .removeprefix I say ",
        "door.py:10: == open",
        "door.py:10: in please",
        "door.py:10: in a",
        "door.py:10: in b",
        "door.py:12: re.fullmatch x",
    ]


def test_an_environment_without_a_file_that_can_be_read_has_none(tmp_path):
    (tmp_path / "broken.py").write_text("def (")
    for name in ("math", "package.module:Door", f"{tmp_path}/none.py:Door", f"{tmp_path}/broken.py:Door"):
        assert sought_texts(name) == []


def test_the_constant_parts_of_a_composed_string_are_found(tmp_path):
    (tmp_path / "sums.py").write_text(
        'def score(response, answer):\n    return response in ("It is " + answer, f"{answer}!")\n'
    )
    assert sought_texts(f"{tmp_path}/sums.py:score") == ["sums.py:2: in It is ", "sums.py:2: in !"]


def test_texts_of_other_definitions_of_the_file_are_left_out(tmp_path):
    (tmp_path / "two.py").write_text(
        'import re\nBOX = re.compile("box")\n\ndef read(text):\n    return BOX.search(text)\n\n'
        'def boxed(response):\n    return read(response)\n\ndef other(response):\n    return response == "yes"\n'
    )
    assert sought_texts(f"{tmp_path}/two.py:boxed") == ["two.py:2: re.compile box"]
    assert sought_texts(f"{tmp_path}/two.py:other") == ["two.py:11: == yes"]
