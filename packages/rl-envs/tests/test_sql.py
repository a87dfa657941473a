"""Queries of a policy: what they return, and what they cannot do."""

import json
import sqlite3
from pathlib import Path

import pytest

from rl_core import Conversation, DataError
from rl_core.rollouts.environment import UnusableAnswer
from rl_envs import SQLConfig, SQLEnvironment
from rl_envs.sql.dataset import load
from rl_envs.sql.environment import are_equal, check_row, has_outer_order, sql_in

SCHEMA = "CREATE TABLE singer (name TEXT, age INTEGER, fee REAL)"
SINGERS = [("Ana", 30, 10.0), ("Bo", 25, 1 / 3), ("Cy", 30, None), ("Bo", 41, 7.5)]


@pytest.fixture(scope="module")
def databases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("databases")
    (folder / "concert").mkdir()
    with sqlite3.connect(folder / "concert" / "concert.sqlite") as connection:
        connection.execute(SCHEMA)
        connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", SINGERS)
    connection.close()
    return folder


def scored(databases, answer, response, **settings):
    environment = SQLEnvironment(SQLConfig(databases=str(databases), **settings))
    info = {"db_id": "concert", "answer": answer}
    [result] = environment.step([Conversation("c", (), info, response)], [None])
    assert result.done
    return result


OLD = "SELECT name FROM singer WHERE age = 30"


@pytest.mark.parametrize(
    ("answer", "query", "reward"),
    [
        (OLD, "SELECT s.name FROM singer AS s WHERE s.age >= 30 AND s.age < 31;", 1),
        (OLD, f"{OLD} ORDER BY name DESC", 1),
        (OLD, "SELECT name FROM singer", 0),
        (OLD, "SELECT name, age FROM singer WHERE age = 30", 0),
        (f"{OLD} ORDER BY name", f"{OLD} ORDER BY name DESC", 0),
        ("SELECT name FROM singer WHERE name = 'Bo'", "SELECT DISTINCT name FROM singer WHERE name = 'Bo'", 0),
        ("SELECT count(*) FROM singer", "SELECT 4.0", 1),
        ("SELECT count(*) FROM singer", "SELECT '4'", 0),
        ("SELECT fee FROM singer WHERE age = 25", "SELECT 0.333333333333", 1),
        ("SELECT fee FROM singer WHERE age = 25", "SELECT 0.3333", 0),
        ("SELECT max(fee) FROM singer WHERE age > 99", "SELECT NULL", 1),
    ],
)
def test_a_query_is_right_if_it_returns_what_the_rows_query_does(databases, answer, query, reward):
    result = scored(databases, answer, f"So:\n```sql\n{query}\n```")
    assert (result.rewards()["reward"], result.info["executed"]) == (reward, 1)


def test_sets_leave_out_order_and_number(databases):
    answer, query = "SELECT name FROM singer ORDER BY age", "SELECT DISTINCT name FROM singer"
    assert [scored(databases, answer, query, match=match).reward for match in ("rows", "set")] == [0.0, 1.0]


COUNTING = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n"
HOSTILE = {
    "endless": (f"{COUNTING}) SELECT max(i) FROM n", "instructions"),
    "many rows": (f"{COUNTING}) SELECT i FROM n", "more than 100 rows"),
    "product": ("SELECT count(*) FROM " + ", ".join(f"singer s{n}" for n in range(20)), "instructions"),
    "long string": ("SELECT replace(hex(zeroblob(500000)), '0', 'xxxxxxxx')", "too big"),
    "long blob": ("SELECT hex(zeroblob(1000000000))", "too big"),
    "long aggregate": (f"{COUNTING} LIMIT 9999) SELECT group_concat(hex(zeroblob(999))) FROM n", "too big"),
    "chance": ("SELECT random()", "not authorized"),
    "delete": ("DELETE FROM singer", "not authorized"),
    "update": ("UPDATE singer SET age = 1", "not authorized"),
    "create": ("CREATE TABLE mine (x)", "not authorized"),
    "drop": ("DROP TABLE singer", "not authorized"),
    "temporary": ("CREATE TEMP TABLE mine AS SELECT 1", "not authorized"),
    "attach": ("ATTACH '/tmp/mine.sqlite' AS mine", "not authorized"),
    "export": ("VACUUM INTO '/tmp/mine.sqlite'", ""),
    "pragma": ("PRAGMA writable_schema = 1", "not authorized"),
    "pragma function": ("SELECT * FROM pragma_database_list", ""),
    "extension": ("SELECT load_extension('/tmp/mine.so')", "not authorized"),
    "several": ("SELECT 1; DELETE FROM singer", "one statement"),
    "nested": ("SELECT " + "(" * 5000 + "1" + ")" * 5000, ""),
    "null byte": ("SELECT 1\0; DELETE FROM singer", ""),
    "half a pair": ("SELECT '\ud800'", ""),
    "not SQL": ("SELECT FROM WHERE", "syntax error"),
    "other table": ("SELECT * FROM teacher", "no such table"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_query_reads_this_database_within_limits_and_does_nothing_else(databases, kind):
    query, reason = HOSTILE[kind]
    before = (databases / "concert" / "concert.sqlite").read_bytes()
    result = scored(databases, OLD, f"```sql\n{query}\n```", max_rows=100, max_instructions=2_000_000)
    assert (result.reward, result.info["executed"], result.info["unparsed"]) == (0, 0, 0), result
    assert reason in result.info["error"]
    assert (databases / "concert" / "concert.sqlite").read_bytes() == before
    assert not Path("/tmp/mine.sqlite").exists()
    assert scored(databases, OLD, OLD).reward == 1, "a query leaves nothing behind for the next"


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("```sql\nSELECT 1\n```\nno, rather\n```SQL\nSELECT 2\n```", "SELECT 2"),
        ("```\nSELECT 1\n```", "SELECT 1"),
        ("```sql\nSELECT 1\n```\n```\noutput\n```", "SELECT 1"),
        ("  with x as (select 1) select * from x", "with x as (select 1) select * from x"),
        ("The answer is SELECT 1", None),
        ("```python\nprint(1)\n```", None),
        ("```sql\n```", None),
    ],
)
def test_the_query_of_a_response_is_its_last_block_of_sql(text, query):
    assert sql_in(text) == query


def test_thoughts_are_not_read(databases):
    assert scored(databases, OLD, f"<think>```sql\n{OLD}\n```</think>I do not know.").info["unparsed"] == 1


@pytest.mark.parametrize(
    ("query", "is_ordered"),
    [
        ("SELECT a FROM t ORDER  BY a", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT a FROM t WHERE b = 'order by' ", False),
        ("SELECT max(a) FROM t order by (b)", True),
        ('SELECT "order by" FROM t', False),
    ],
)
def test_only_an_order_of_the_whole_result_counts(query, is_ordered):
    assert has_outer_order(query) == is_ordered


def test_equal_results():
    assert are_equal([(1, b"x"), (2, None)], [(2, None), (1.0, b"x")], is_ordered=False, are_counted=True)
    assert not are_equal([(1,)], [(1,), (1,)], is_ordered=False, are_counted=True)
    assert not are_equal([(1,)], [], is_ordered=False, are_counted=False)


def test_rows_are_checked(databases):
    config = SQLConfig(databases=str(databases))
    check_row({"db_id": "concert", "answer": OLD}, config)
    for info, reason in [
        ({"answer": OLD}, "needs the field 'db_id', a string; its fields are answer"),
        ({"db_id": "concert", "answer": 3}, "needs the field 'answer'"),
        ({"db_id": "../concert", "answer": OLD}, "must be the name of a database"),
        ({"db_id": "opera", "answer": OLD}, "there is no database"),
        ({"db_id": "concert", "answer": "SELECT x FROM singer"}, "has no result: no such column: x"),
    ]:
        with pytest.raises(ValueError, match=reason):
            check_row(info, config)
    with pytest.raises(ValueError, match="`databases` of the environment sql must be set"):
        check_row({"db_id": "concert", "answer": OLD}, SQLConfig())
    with pytest.raises(UnusableAnswer, match="no such column"):
        scored(databases, "SELECT x FROM singer", OLD)


def test_questions_in_the_forms_of_spider_and_bird(databases, tmp_path):
    spider = {"db_id": "concert", "question": "Who is 30?", "query": OLD}
    bird = {
        "db_id": "concert",
        "question": "Who is 30?",
        "SQL": OLD,
        "evidence": "30 is an age",
        "difficulty": "simple",
    }
    (tmp_path / "spider.json").write_text(json.dumps([spider]))
    (tmp_path / "bird.jsonl").write_text(json.dumps(bird) + "\n")
    settings = {"databases": str(databases), "num_examples": 1}
    [row] = load({**settings, "path": str(tmp_path / "spider.json")}, "train")
    assert row["info"] == {"db_id": "concert", "answer": OLD}
    asked = row["messages"][0]["content"]
    assert asked == (
        f"{SCHEMA};\n-- Ana | 30 | 10.0\n\n"
        "Answer this question by one SQLite query, in a block between ```sql and ```:\nWho is 30?"
    )
    [row] = load({**settings, "path": str(tmp_path / "bird.jsonl")}, "train")
    assert "\n30 is an age\nAnswer this" in row["messages"][0]["content"]
    (tmp_path / "bad.json").write_text(json.dumps([{"db_id": "opera", "question": "?", "query": "SELECT 1"}]))
    with pytest.raises(DataError, match=r"bad.json: question 1: there is no database .*opera.sqlite"):
        load({**settings, "path": str(tmp_path / "bad.json")}, "train")
    (tmp_path / "other.json").write_text(json.dumps([{"db_id": "concert", "question": "?"}]))
    with pytest.raises(DataError, match="question 1 has no 'query'; it has db_id, question"):
        load({**settings, "path": str(tmp_path / "other.json")}, "train")
