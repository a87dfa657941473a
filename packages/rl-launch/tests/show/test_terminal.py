"""Charts of braille dots."""

from hypothesis import given
from hypothesis import strategies as st

from rl_launch.show.terminal import Curve, overlay, side_by_side

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200)


def chart(title, points, **sizes):
    return [line.plain for line in overlay(title, [Curve(points)], **sizes)]


def dots(line):
    return sum(bin(ord(char) - 0x2800).count("1") for char in line if 0x2800 <= ord(char) < 0x2900)


def test_a_rising_line_goes_from_the_bottom_left_to_the_top_right():
    lines = chart("reward", [(step, step / 10) for step in range(1, 11)], width=40, height=5)
    plot = [line[9:] for line in lines[1:-1]]
    assert lines[0].strip() == "reward"
    assert lines[1].split()[0] == "1"
    assert lines[-2].split()[0] == "0.1"
    assert lines[-1].split() == ["1", "step", "10"]
    assert dots(plot[0][-2:]) > 0
    assert dots(plot[-1][:2]) > 0
    assert dots(plot[0][:10]) == dots(plot[-1][-10:]) == 0


def test_a_flat_line_is_one_row_of_dots_in_the_middle():
    lines = chart("loss", [(1, 2.0), (50, 2.0)], width=40, height=5)
    drawn = [line for line in lines[1:-1] if dots(line)]
    assert len(drawn) == 1
    assert drawn[0] == lines[3]
    assert dots(drawn[0]) == 2 * (40 - 9)


@given(VALUES, st.integers(20, 120), st.integers(2, 12))
def test_every_chart_fits_its_width_and_draws_a_line_without_gaps(values, width, height):
    lines = chart("m", list(enumerate(values)), width=width, height=height)
    assert {len(line) for line in lines} == {width}
    assert len(lines) == height + 2
    columns = [any(dots(row[column]) for row in (line[9:] for line in lines[1:-1])) for column in range(width - 9)]
    assert all(columns) or len(values) == 1


def test_charts_stand_side_by_side():
    one = overlay("a", [Curve([(1, 1.0)])], width=20, height=3)
    lines = [line.plain for line in side_by_side([one, one, one])]
    assert len(lines) == 10
    assert lines[-1].split() == ["1", "step", "1"]
    assert lines[4].split() == ["1", "step", "1"] * 2
    assert len(lines[4]) == 42
