"""The history: rows by date and pin, and series that are not joined."""

import json
from pathlib import Path

import pytest

from fixture_results import Tree
from moescope.record.history import history

TEMPLATES = Path(__file__).parents[1] / "templates"


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> dict:
    tree = Tree(tmp_path_factory.mktemp("history")).make()
    tree.analyse()
    return json.loads((tree.record(TEMPLATES) / "record.json").read_text())


def put(root: Path, record: dict, key: str, date: str, change=lambda record: None) -> None:
    record = json.loads(json.dumps(record))
    record["key"] = key
    record["measured"] = {"first": f"{date}T10:00:00Z", "last": f"{date}T10:20:00Z"}
    change(record)
    path = root / "results/records" / f"embedded@{record['machine']['name']}" / key / "record.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record))


def tables(text: str, checkpoint: str) -> list[list[str]]:
    """The rows of each table of a checkpoint."""
    parts = text.split(f"**`{checkpoint}`")[1:]
    return [
        [line for line in part.split("\n\n")[1].splitlines()[2:] if line.startswith("| 20")]
        for part in parts
    ]


def test_rows_by_date_with_the_pins_that_changed(tmp_path, record):
    def bump(record):
        record["pins"]["runtimes"]["mlx-lm"]["packages"]["mlx"] = "0.33.0"

    put(tmp_path, record, "b" * 12, "2027-01-05", bump)
    put(tmp_path, record, "a" * 12, "2026-11-29")
    (rows,) = tables(history(tmp_path), "qwen3-moe")
    assert [row.split(" | ")[1] for row in rows] == ["`aaaaaaaaaaaa`", "`bbbbbbbbbbbb`"]
    assert "**mlx-lm: mlx** 0.32.4 → 0.33.0" in rows[1]
    assert "0.893 (" in rows[0] and "effect" in rows[0]


def test_a_session_without_another_change(tmp_path, record):
    put(tmp_path, record, "a" * 12, "2026-11-29")
    put(tmp_path, record, "b" * 12, "2026-12-01", lambda r: r["study"].update(session=2))
    (rows,) = tables(history(tmp_path), "qwen3-moe")
    assert "same, session 2" in rows[1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda r: r["machine"].update(name="other-cpu-8c-32g"), "the machine class differs"),
        (lambda r: r["method"]["shape"].update(prompt=512), "the shape differs"),
        (lambda r: r["checkpoints"]["qwen3-moe"].update(compare="0" * 12), "the recipe differs"),
    ],
)
def test_what_is_not_joined(tmp_path, record, change, why):
    put(tmp_path, record, "a" * 12, "2026-11-29")
    put(tmp_path, record, "b" * 12, "2026-12-01", change)
    text = history(tmp_path)
    found = tables(text, "qwen3-moe")
    assert [len(rows) for rows in found] == [1, 1]
    assert why in text


def test_a_checkpoints_new_source_is_a_pin_that_changed(tmp_path, record):
    put(tmp_path, record, "a" * 12, "2026-11-29")
    put(
        tmp_path,
        record,
        "b" * 12,
        "2026-12-01",
        lambda r: r["pins"]["checkpoints"]["qwen3-moe"].update(seed=9),
    )
    (rows,) = tables(history(tmp_path), "qwen3-moe")
    assert "**checkpoint**" in rows[1]


def test_void_and_unreadable(tmp_path, record):
    put(tmp_path, record, "a" * 12, "2026-11-29")
    put(tmp_path, record, "b" * 12, "2026-11-30", lambda r: r.update(schema="moescope/record/0"))
    text = history(tmp_path)
    assert "`lm` void" in text
    assert "cannot read" in text and "moescope/record/0" in text
    assert str(tmp_path) not in text


def test_only_one_study(tmp_path, record):
    put(tmp_path, record, "a" * 12, "2026-11-29")
    put(tmp_path, record, "b" * 12, "2026-11-30", lambda r: r["study"].update(name="other"))
    assert "`other`" in history(tmp_path)
    assert "`other`" not in history(tmp_path, "embedded")


def test_nothing_yet(tmp_path):
    assert "No record is committed yet" in history(tmp_path)
