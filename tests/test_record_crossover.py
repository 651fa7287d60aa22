"""The record of a crossover: its section, its CSV, what the kernels may take from it."""

import csv
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest

from fixture_crossover import ARM, ASKED, series
from fixture_results import Tree
from moescope.cli import main
from moescope.errors import UserError
from moescope.files import read_json, write_json
from moescope.record import charts
from moescope.record.audit import audit
from moescope.record.known import TABLE, enter, entry

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "templates"
SUBJECT = "embedded@test-gpu-x1"
CROSSES = {768: (1.5, 2.0), 4096: (1.2, 1.5), 8192: (0.8, 1.2)}
WINS = {768: (1.5, 2.0), 4096: (1.2, 1.25), 8192: (1.1, 0.8)}
LOSES = {768: (0.9, 0.5), 4096: (0.8, 0.4)}
RISES = {768: (0.8, 0.5), 4096: (1.2, 1.4)}


def make(root: Path, widths, asked=ASKED, **more) -> Path:
    """The folder of a record, in a repository at root."""
    with series(root, widths, **more) as tree:
        tree.analyse([], crossover=asked)
        # The fixture names the machine while it is patched.
        made = tree.record(TEMPLATES)
    target = root / TABLE
    target.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads((ROOT / TABLE).read_text())
    # What was measured stands on records that are not here.
    kept = [one for one in table["entries"] if one["about"]["kind"] == "carried"]
    write_json(target, table | {"entries": kept})
    return made


@pytest.fixture(scope="module")
def crossing(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("crossing"), CROSSES)


@pytest.fixture
def folder(crossing, tmp_path) -> Path:
    """The same record in a copy of its repository (tmp_path), to be changed."""
    root = crossing.parents[3]
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    return tmp_path / crossing.relative_to(root)


def record_of(folder: Path) -> dict:
    return json.loads((folder / "record.json").read_text())


def section(folder: Path, name: str = "record.md") -> str:
    text = (folder / name).read_text()
    return text.partition("## Crossover over the expert width")[2].partition("\n## ")[0]


def test_the_section_says_where_each_series_crosses(crossing):
    text = section(crossing)
    wall, gpu = (line for line in text.splitlines() if line.startswith(f"- `{ARM}`"))
    # ln 1.2 / (ln 1.2 + ln 1.25) of the way from 4096 to 8192, by logarithms: 5588.
    assert "by the token's time: **55" in wall or "by the token's time: **56" in wall
    assert "from there on slower" in wall and "`w4096` and `w8192`" in wall
    assert "**none between 768 and 8192**: faster at every one by the medians" in gpu
    rows = [line for line in text.splitlines() if line.startswith(f"| `{ARM}`")]
    assert [row.split("|")[3].strip() for row in rows] == ["768", "4096", "8192"]
    assert "| faster |" in rows[0] and "| slower |" in rows[2]


def test_no_effect_is_said_though_the_medians_are_on_one_side(tmp_path):
    text = section(make(tmp_path, {768: (1.5, 2.0), 4096: (1.001, 1.5)}, noise=0.01))
    assert "no effect at `w4096`" in text


def test_a_crossing_whose_range_leaves_the_series_is_open(tmp_path):
    text = section(make(tmp_path, {768: (1.5, 2.0), 4096: (0.995, 1.5)}, noise=0.01))
    assert "to above 4096)" in text


def test_a_refused_series_is_shown_without_a_crossing(tmp_path):
    with series(tmp_path, CROSSES) as tree:
        path = tree.folder("inspect/w768") / "architecture.json"
        write_json(path, read_json(path) | {"vocab": 77})
        tree.analyse([], crossover=ASKED)
        folder = tree.record(TEMPLATES)
    text = section(folder)
    assert "No crossover is given: they differ in vocab too." in text and "| `w768` |" in text
    assert "interpolated," not in (folder / "crossover.csv").read_text()
    with pytest.raises(UserError, match="gives no crossover: they differ in vocab"):
        entry(record_of(folder))


def test_other_records_have_neither_section_nor_csv(tmp_path):
    tree = Tree(tmp_path).make()
    tree.analyse()
    folder = tree.record(TEMPLATES)
    assert not (folder / "crossover.csv").exists()
    assert "Crossover" not in (folder / "record.md").read_text()
    with pytest.raises(UserError, match="the study asks for none"):
        entry(record_of(folder))


def test_the_csv_holds_what_is_measured_and_what_is_interpolated(crossing):
    with open(crossing / "crossover.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    found = record_of(crossing)["crossover"]["arms"][ARM]
    measured = [row for row in rows if row["kind"] == "measured"]
    assert len(measured) == 6 and {row["of"] for row in measured} == {"wall", "gpu"}
    for row in measured:
        (point,) = (p for p in found[row["of"]]["points"] if p["checkpoint"] == row["checkpoint"])
        assert float(row["ratio"]) == point["ratio"]["value"]
        assert float(row["ratio_min"]) <= float(row["ratio"]) <= float(row["ratio_max"])
        assert float(row["base_ms"]) / float(row["arm_ms"]) == pytest.approx(
            float(row["ratio"]), rel=0.2
        )
        assert row["expert_width"] == row["checkpoint"][1:] and row["why"] == ""
    (row,) = (row for row in rows if row["kind"] == "interpolated")
    assert row["of"] == "wall" and row["ratio"] == "1" and row["effect"] == "slower above"
    low, value, high = (float(row[f"expert_width{end}"]) for end in ("_min", "", "_max"))
    assert 4096 < low < value < high < 8192


def test_the_chart_is_drawn_and_the_same_every_time(crossing):
    record = record_of(crossing)
    chart = charts.crossover(record)
    assert charts.crossover(record) == chart
    (drawing,) = chart.drawings
    assert "NaN" not in drawing[1] and "undefined" not in drawing[1]
    assert [label for _, label in chart.legend] == [
        f"{ARM}: token's time",
        f"{ARM}: GPU's time of the block",
    ]
    assert drawing[1] in (crossing / "record.html").read_text()


def test_the_same_data_give_the_same_bytes(crossing, tmp_path):
    again = make(tmp_path, CROSSES)
    assert again.name == crossing.name
    for name in ("record.md", "record.html", "record.json", "crossover.csv"):
        assert (again / name).read_bytes() == (crossing / name).read_bytes(), name


def test_the_audit_holds_the_csv_to_the_data(folder, tmp_path):
    assert audit(tmp_path) == []
    path = folder / "crossover.csv"
    text = path.read_text()
    path.write_text(text.replace("slower above", "faster above"))
    (problem,) = audit(tmp_path)
    assert "crossover.csv: is not what the data give" in problem and "faster above" in problem
    path.unlink()
    (problem,) = audit(tmp_path)
    assert "crossover.csv: is missing" in problem
    path.write_text(text)
    (folder / "other.csv").write_text("1\n")
    (problem,) = audit(tmp_path)
    assert "other.csv: is nothing that the data give" in problem


def test_a_measured_entry_takes_the_place_of_the_carried_one(folder, tmp_path):
    path = tmp_path / TABLE
    table = json.loads(path.read_text())
    own = {"device": "Test GPU", "language": "cuda", "mlx": "0.32.4"}
    about = {"kind": "carried", "source": "elsewhere"}
    table["entries"].append(own | {"max_width": 77, "about": about})
    path.write_text(json.dumps(table))
    made = enter(tmp_path, folder.relative_to(tmp_path))
    after = json.loads(path.read_text())["entries"]
    mine = [one for one in after if one["device"] == "Test GPU"]
    assert mine == [made] and len(after) == len(table["entries"])
    (crossing,) = record_of(folder)["crossover"]["arms"][ARM]["wall"]["crossings"]
    assert made["max_width"] == int(crossing["at"]["value"]) and 5400 < made["max_width"] < 5800
    assert made | own == made
    about = made["about"]
    assert about["kind"] == "measured" and about["record"] == SUBJECT
    assert f"record {SUBJECT}: " in about["source"] and "crosses 1 at 5" in about["source"]
    for name, key in about["measurements"].items():
        assert (tmp_path / "results/measure" / name / key / "runs.jsonl").is_file()
    assert audit(tmp_path) == []
    enter(tmp_path, folder.relative_to(tmp_path))
    assert json.loads(path.read_text())["entries"] == after


def test_an_entry_that_no_record_gives_is_found(folder, tmp_path):
    enter(tmp_path, folder.relative_to(tmp_path))
    path = tmp_path / TABLE
    path.write_text(path.read_text().replace('"max_width": 5', '"max_width": 6'))
    (problem,) = audit(tmp_path)
    assert str(TABLE) in problem and f"no committed record {SUBJECT} gives" in problem


@pytest.mark.parametrize(
    ("widths", "width", "says"),
    [
        (WINS, 8192, "is above 1 from 768 to 8192, the widest measured"),
        (LOSES, 767, "is not above 1 from 768 to 4096"),
    ],
)
def test_without_a_crossing_the_series_own_ends_count(tmp_path, widths, width, says):
    made = entry(record_of(make(tmp_path, widths)))
    assert made["max_width"] == width and says in made["about"]["source"]


def test_no_effect_is_no_win(tmp_path):
    """A ratio just above 1 that the rule calls «no effect» is not fused for."""
    record = record_of(make(tmp_path, WINS))
    points = record["crossover"]["arms"][ARM]["wall"]["points"]
    points[-1]["effect"] = "no effect"
    made = entry(record)
    assert made["max_width"] == points[-2]["at"]["value"]
    assert made["about"]["source"].endswith("above 1 from 768 to 4096, no effect at 8192")
    for point in points:
        point["effect"] = "no effect"
    assert entry(record)["max_width"] == 767


def test_an_arm_that_wins_at_wide_experts_only_has_no_widest(tmp_path):
    with pytest.raises(UserError, match="no widest expert says"):
        entry(record_of(make(tmp_path, RISES)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["results"]["w768"]["arms"][ARM].update(env={}), "MOESCOPE_FUSED=force"),
        (lambda r: r["machine"].pop("gpu"), "names no gpu"),
        (lambda r: r["pins"]["runtimes"]["mlx-vlm"]["packages"].pop("mlx"), "names no mlx"),
        (lambda r: r["crossover"].update(over="hidden"), "no crossover over expert_width"),
    ],
)
def test_a_record_that_cannot_be_entered_says_why(crossing, change, says):
    record = record_of(crossing)
    change(record)
    with pytest.raises(UserError, match=says):
        entry(record)


def test_without_a_record_there_is_nothing_to_enter(root, capsys):
    """By the command; the study was never measured with this session."""
    study = root / "studies/fused-crossover-h200.yaml"
    before = (root / TABLE).read_bytes()
    with mock.patch.dict(os.environ):
        os.environ.pop("MOESCOPE_STUDY", None)
        with mock.patch("moescope.study.plan.folder", lambda *_: Path("results/none")):
            assert main(["--root", str(root), "crossover", "--study", str(study)]) == 2
    assert "results/none: the study has no record yet; make it first" in capsys.readouterr().err
    assert (root / TABLE).read_bytes() == before


def test_the_command_enters_the_record_of_its_study(folder, tmp_path, capsys):
    with mock.patch("moescope.cli._plan") as plan:
        plan.return_value.root = tmp_path
        plan.return_value.record.folder = folder.relative_to(tmp_path)
        assert main(["crossover"]) == 0
    assert f"{TABLE}: Test GPU, MLX 0.32.4: up to 5" in capsys.readouterr().out
