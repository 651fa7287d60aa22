"""The audit finds each way in which a record and its data can part."""

import json
import shutil
from pathlib import Path

import pytest

from fixture_results import Tree, read_rows, write_runs
from moescope.files import digest, sha256_file, write_json
from moescope.record import audit as module
from moescope.record.audit import audit

TEMPLATES = Path(__file__).parents[1] / "templates"


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Tree:
    tree = Tree(tmp_path_factory.mktemp("audit")).make()
    tree.analyse()
    tree.record(TEMPLATES)
    return tree


@pytest.fixture
def tree(original, tmp_path) -> Tree:
    """A copy of a repository with one record, to be tampered with."""
    for name in ("results", "templates"):
        shutil.copytree(original.root / name, tmp_path / name)
    return Tree(tmp_path, keys=dict(original.keys))


def record_folder(tree: Tree) -> Path:
    return tree.folder("record/embedded@test-cpu-2c-8g")


def relist(tree: Tree, path: Path) -> None:
    """Put a file's new hash into record.json, as a careful forger would."""
    listing = record_folder(tree) / "record.json"
    record = json.loads(listing.read_text())
    record["files"][path.relative_to(tree.root).as_posix()] = sha256_file(path)
    listing.write_text(json.dumps(record, ensure_ascii=False))


def test_a_record_that_is_what_its_data_say(tree):
    assert audit(tree.root) == []


def test_no_record_is_no_success(tmp_path):
    assert "no record" in audit(tmp_path)[0]


@pytest.mark.parametrize(
    "name",
    [
        "measure/qwen3-moe:runs.jsonl",
        "measure/qwen3-moe:environment.json",
        "measure/qwen3-moe:guard.jsonl",
        "trace/qwen3-moe.vlm:scopes.json",
        "trace/qwen3-moe.vlm:operations.csv",
        "parity/qwen3-moe:parity.json",
        "inspect/qwen3-moe:architecture.json",
        "fetch/qwen3-moe:tensors.csv",
        "build/mlx-vlm:manifest.json",
        "analyse/embedded:analysis.json",
    ],
)
def test_one_altered_byte_in_a_raw_file(tree, name):
    folder, _, file = name.partition(":")
    path = tree.folder(folder) / file
    data = bytearray(path.read_bytes())
    at = len(data) // 2
    data[at] = ord("7") if data[at] != ord("7") else ord("3")
    path.write_bytes(bytes(data))
    problems = audit(tree.root)
    assert any(
        f"{path.relative_to(tree.root)}" in line and "altered" in line for line in problems
    ), problems
    # The cause, not each of the figures that stand on the file.
    assert not any("no file of the figure has a run" in line for line in problems), problems


@pytest.mark.parametrize(
    ("name", "number"),
    [("record.md", "0.893"), ("record.html", "0.893"), ("record.json", '"value": 0.3')],
)
def test_one_changed_number_in_the_record(tree, name, number):
    path = record_folder(tree) / name
    text = path.read_text()
    assert number in text
    path.write_text(text.replace(number, number[:-1] + "4", 1))
    problems = audit(tree.root)
    assert any(name in line for line in problems), problems


def test_the_place_of_a_difference_is_named(tree):
    path = record_folder(tree) / "record.md"
    path.write_text(path.read_text().replace("**Refuted:**", "**Supported:**", 1))
    (problem,) = audit(tree.root)
    assert "record.md" in problem and "line " in problem and "**Refuted" in problem


def test_a_forged_run_with_forged_hashes(tree):
    """Runs, trailer and listed hash all rewritten: the analysis gives it away."""
    path = tree.folder("measure/qwen3-moe") / "runs.jsonl"
    rows = read_rows(path)
    for row in rows:
        if row["arm"] == "lm" and row["valid"]:
            row["decode_s"] *= 0.5
    write_runs(path, rows)
    relist(tree, path)
    assert any(
        "analysis.json" in line and "is not what the data give" in line for line in audit(tree.root)
    )


def test_a_deleted_run(tree):
    path = tree.folder("measure/qwen3-moe") / "runs.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    relist(tree, path)
    assert any("trailer says" in line for line in audit(tree.root))


def test_a_missing_file(tree):
    path = tree.folder("trace/qwen3-moe.vlm") / "scopes.json"
    path.unlink()
    assert any("is missing" in line and "scopes.json" in line for line in audit(tree.root))


def test_a_record_without_its_page(tree):
    (record_folder(tree) / "record.html").unlink()
    (problem,) = audit(tree.root)
    assert "record.html is missing" in problem


def edit_record(tree: Tree, change) -> list[str]:
    path = record_folder(tree) / "record.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record, ensure_ascii=False))
    return audit(tree.root)


def speed(record: dict) -> dict:
    return record["results"]["qwen3-moe"]["arms"]["lm"]["decode_rate"]


def test_a_number_without_a_file(tree):
    def bare(record):
        record["results"]["qwen3-moe"]["speed_up"] = 1.73

    assert any("speed_up: the number 1.73 names no file" in p for p in edit_record(tree, bare))


def test_a_figure_without_files(tree):
    problems = edit_record(tree, lambda record: speed(record).update(files=[]))
    assert any("lm.decode_rate: the figure names no file" in line for line in problems)


def test_a_figure_of_a_run_that_does_not_exist(tree):
    problems = edit_record(tree, lambda record: speed(record)["runs"].append("r77-lm"))
    assert any("no file of the figure has a run r77-lm" in line for line in problems)


def test_a_figure_of_a_rejected_run(tree):
    problems = edit_record(tree, lambda record: speed(record)["runs"].append("r02-vlm"))
    assert any("the run r02-vlm is not valid" in line for line in problems)


def test_a_figure_of_a_file_that_is_not_listed(tree):
    problems = edit_record(tree, lambda record: speed(record).update(files=["results/x.json"]))
    assert any("results/x.json is not among the record's files" in line for line in problems)


def test_a_value_outside_its_range(tree):
    problems = edit_record(tree, lambda record: speed(record).update(value=1e6))
    assert any("outside its range" in line for line in problems)


def test_a_listed_file_that_leaves_the_repository(tree):
    problems = edit_record(tree, lambda record: record["files"].update({"../secret": "0" * 64}))
    assert any("leaves its folder" in line for line in problems)
    assert all(record_folder(tree).name in line for line in problems)


def test_a_file_taken_off_the_list(tree):
    def shorten(record):
        record["files"] = {k: v for k, v in record["files"].items() if "/parity/" not in k}

    assert any("are not listed" in line for line in edit_record(tree, shorten))


def test_ingredients_that_do_not_give_their_key(tree):
    path = tree.folder("measure/qwen3-moe") / "ingredients.json"
    found = json.loads(path.read_text())
    found["params"]["session"] = 9
    write_json(path, found)
    relist(tree, path)
    assert any("the key is not that of its ingredients" in line for line in audit(tree.root))


def test_other_code_is_said_as_such(tree, monkeypatch):
    monkeypatch.setattr(module, "fingerprints", lambda *names: {"verdict.analyse": "0" * 12})
    (problem,) = audit(tree.root)
    assert "rendered by other code" in problem and "snakemake rerender" in problem


def test_another_template_is_said_as_such(tree):
    path = tree.root / "templates" / "body.j2"
    path.write_text(path.read_text() + "\n{{ w.p('more') }}\n")
    (problem,) = audit(tree.root)
    assert "rendered by other code" in problem


def test_raw_files_are_checked_even_under_other_code(tree, monkeypatch):
    monkeypatch.setattr(module, "fingerprints", lambda *names: {})
    path = tree.folder("parity/qwen3-moe") / "parity.json"
    path.write_text(path.read_text() + " ")
    assert any("was altered" in line for line in audit(tree.root))


def test_the_keys_of_the_fixture_are_those_of_the_framework(tree):
    found = json.loads((record_folder(tree) / "ingredients.json").read_text())
    made_of = {k: found[k] for k in ("stage", "subject", "params", "upstream", "code")}
    assert digest(made_of)[:12] == record_folder(tree).name
