"""The record: what stands in it, in both forms, and that it is the same every time."""

import html.parser
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixture_results import ARMS, SHAPE, Tree
from moescope.errors import UserError
from moescope.record import assemble, charts, numbers, render, tables, trace_tables, writers
from moescope.record.writers import Html, Markdown, Table, plain
from moescope.verdict.quantities import PATTERNS
from moescope.verdict.statistics import figure

TEMPLATES = Path(__file__).parents[1] / "templates"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    tree = Tree(tmp_path_factory.mktemp("record"), bandwidth=12e9).make()
    tree.analyse()
    return tree.record(TEMPLATES)


@pytest.fixture(scope="module")
def markdown(made) -> str:
    return (made / "record.md").read_text()


@pytest.fixture(scope="module")
def page(made) -> str:
    return (made / "record.html").read_text()


@pytest.fixture(scope="module")
def record(made) -> dict:
    return json.loads((made / "record.json").read_text())


def test_the_answer_comes_first(markdown):
    first = markdown.split("\n\n")[1]
    assert "Is the expert gather the dominant term of a decode step here?" in first
    assert "synthetic weights" in first and "2026-11-29" in first
    answer = markdown.partition("## Answer")[2].partition("\n## ")[0]
    for verdict in ("Unresolved:", "Refuted:", "Supported:"):
        assert verdict in answer
    assert "Settled by `fixed_share`" in answer
    assert "`saved.skip-experts` is 38" in answer


def test_all_sections_are_there_in_both_forms(markdown, page):
    titles = re.findall(r"^## (.+)$", markdown, re.M)
    assert len(titles) == len(set(titles))
    for title in (
        "Answer",
        "Premises refuted",
        "Results",
        "Ceilings",
        "Parity",
        "Comparisons refused",
        "Host and pins",
        "Checkpoints",
        "Method",
        "Rejected runs",
        "Not measured",
        "Reproduce",
        "Data",
    ):
        assert title in titles
    assert re.findall(r"<h2[^>]*>(.+?)</h2>", page) == titles


def test_void_speeds_are_struck_out_with_the_reason(markdown, page):
    (row,) = (
        line for line in markdown.splitlines() if line.startswith("| `lm` ") and "void" in line
    )
    assert row.count("~~") == 6 and "| void |" in row
    assert "repetition loop: 4 tokens" in markdown
    assert "<del>" in page


def test_candidates_stand_beside_what_skipping_the_block_saves(tmp_path):
    tree = Tree(tmp_path, kernels=True, slow={"lm": 0.75}).make()
    tree.analyse()
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    table = text.partition("**Candidates beside their base**")[2].partition("\n\n|")[2]
    rows = [line for line in table.partition("\n\n")[0].splitlines() if "`lm`" in line]
    assert [row.split("|")[1].strip() for row in rows] == ["`qwen3-moe`"]
    assert re.search(r"\| 1\.3\d.*faster.*\| (49|50|51)\.?\d* % \(.*→", rows[0])


def test_refusals_rejections_and_rule(markdown):
    assert "`inkling-affine` with `inkling-nvfp4`: refused" in markdown
    assert "another process used 1.4 cores during the run" in markdown
    assert "«no effect»" in markdown
    assert "the tool's own convention" in markdown


def test_data_files_are_listed_with_their_hashes(markdown, record):
    for path, sha256 in record["files"].items():
        assert f"`{path}` | `{sha256}`" in markdown
    assert not any(path.endswith("cost.json") for path in record["files"])
    assert any(path.endswith("analysis.json") for path in record["files"])


def test_nothing_of_this_machine_and_no_clock(made, tmp_path):
    for name in ("record.md", "record.html", "record.json"):
        text = (made / name).read_text()
        assert str(made.parents[3]) not in text
        dates = set(re.findall(r"\b20\d\d-\d\d-\d\d", text))
        assert dates == {"2026-11-29"}


def test_slices_processor_time_and_failed_arms_are_told(tmp_path):
    def spend(run):
        run["cpu_s"] = run["forwards"] * 0.0071

    tree = Tree(tmp_path, edit_run=spend, sliced={"slices": 4}).make()
    path = tree.folder("measure/qwen3-moe") / "environment.json"
    failed = {"lm": {"kind": "timeout", "why": "decode: no answer within the time limit; killed"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": failed}))
    tree.analyse()
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    assert "in 4 slices each" in text and f"{SHAPE['generate'] - 5} forwards ÷ their time" in text
    assert "host CPU ms/token" in text and "| 7.10 |" in text
    assert "No speed here of `lm`: failed (timeout): decode: no answer within" in text


def test_whole_runs_without_processor_time_have_no_word_of_it(markdown):
    assert "slices" not in markdown and "host CPU ms/token" not in markdown
    assert f"{SHAPE['generate'] - 1} forwards ÷ their time" in markdown


def test_the_same_data_give_the_same_bytes(made, tmp_path):
    tree = Tree(tmp_path, bandwidth=12e9).make()
    tree.analyse()
    again = tree.record(TEMPLATES)
    assert again.name == made.name
    for name in ("record.md", "record.html", "record.json"):
        assert (again / name).read_bytes() == (made / name).read_bytes(), name


def test_charts_are_the_same_every_time(record):
    once = charts.draw(record)
    assert set(once) == {"rates", "terms", "sweep", "roofline"}
    assert charts.draw(record) == once
    drawings = [svg for chart in once.values() for _, svg in chart.drawings]
    assert len(drawings) == 7, "one of the rates for each checkpoint"
    for svg in drawings:
        assert svg.startswith("<svg") and 'role="img"' in svg and "aria-label=" in svg
        assert "NaN" not in svg and "undefined" not in svg
        assert " id=" not in svg and "url(" not in svg


class Page(html.parser.HTMLParser):
    """Balanced tags, unique ids, links that lead somewhere, no resource from elsewhere."""

    VOID = ("meta", "link", "br", "img", "hr", "!doctype")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        assert tag not in ("script", "img", "link", "iframe", "object"), tag
        assert not attrs.get("src")
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_stands_alone(page):
    parser = Page()
    parser.feed(page)
    assert not parser.open
    assert len(parser.ids) == len(set(parser.ids))
    assert all(link[1:] in parser.ids for link in parser.links if link.startswith("#"))
    assert not [link for link in parser.links if not link.startswith("#")]
    assert "http" not in re.sub(r'xmlns="[^"]*"|xmlns:xlink="[^"]*"', "", page)
    assert "prefers-color-scheme: dark" in page
    assert page.count("<svg") == 7


def test_all_colours_of_the_charts_are_defined(page):
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", page))
    light, _, dark = page.partition("prefers-color-scheme: dark")
    for scheme in (light, dark.partition("</style>")[0]):
        assert used <= set(re.findall(r"(--[a-z0-9-]+):", scheme))


def test_a_template_that_asks_for_too_much_is_an_error(record, tmp_path):
    for path in TEMPLATES.glob("*.j2"):
        (tmp_path / path.name).write_text(path.read_text())
    body = tmp_path / "body.j2"
    body.write_text(body.read_text() + "{{ record.no_such_key }}")
    with pytest.raises(UserError, match="no_such_key"):
        render.render(record, tmp_path)


def test_a_record_with_kernels_shows_them(tmp_path):
    tree = Tree(tmp_path, kernels=True, bandwidth=12e9).make()
    tree.analyse()
    folder = tree.record(TEMPLATES)
    text = (folder / "record.md").read_text()
    assert "kernel_attention<float, 4>" in text and "`cudaGraphLaunch`" in text
    assert "| `kernel_expert_gather` | 8 | 2 | 0.380 |" in text
    assert "bounded by **host**; in the last traced pass most of the loop is MLX's encoding" in text
    assert "4.50 launches per token" in text
    assert "`work/timelines/abc.json.gz`, sha256" in text
    page = (folder / "record.html").read_text()
    assert "The terms of one decoded token of vlm on qwen3-moe" in page
    assert "| 10.8 GB/s" in text


@pytest.mark.parametrize(
    ("values", "unit", "text"),
    [
        ([157.55, 123.14, 166.38], "tokens/s", "158 (123 to 166)"),
        ([157.55, 157.41, 157.7], "tokens/s", "157.6 (157.4 to 157.7)"),
        ([0.99712, 0.99301, 1.00518], "ratio", "0.997 (0.993 to 1.005)"),
        ([0.379, 0.371, 0.3812], "share", "37.9 % (37.1 to 38.1)"),
        ([0.0042, 0.0042, 0.0042], "share", "0.42 %"),
        ([5308416], "bytes/token", "5.31 MB"),
        ([9.1e9], "bytes", "9.10 GB"),
        ([1.2e12], "bytes/s", "1.20 TB/s"),
        ([812], "bytes", "812 B"),
        ([1593], "launches/token", "1593"),
        ([12.5], "launches/token", "12.5"),
        ([30], "runs", "30"),
        ([0], "runs", "0"),
        ([0.0902, 0.0878, 0.0906], "ms/token", "0.0902 (0.0878 to 0.0906)"),
        ([-0.002, -0.004, 0.001], "share", "-0.20 % (-0.40 to 0.10)"),
        ([0.0, 0.0, 0.0], "share", "0.00 %"),
    ],
)
def test_how_numbers_are_printed(values, unit, text):
    made = figure([values[0]], unit, ["f"])
    made |= {"min": min(values), "max": max(values)}
    assert numbers.show(made) == text


@given(st.floats(1e-9, 1e12), st.floats(0, 1), st.sampled_from(["ms/token", "share", "bytes"]))
def test_printed_numbers_are_near_what_they_print(value, spread, unit):
    made = figure([value, value * (1 + spread)], unit, ["f"])
    text = numbers.show(made, spread=False)
    number, _, suffix = text.partition(" ")
    scale = {"%": 0.01, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}.get(suffix, 1)
    error = abs(float(number) * scale - made["value"])
    # Half a unit of the third digit of the largest number in the range.
    assert error <= max(0.0051 * made["max"], {"bytes": 0.5, "share": 0.00051}.get(unit, 1e-9))


def test_a_missing_figure_is_a_dash():
    assert numbers.show(None) == numbers.ABSENT


@given(st.text(max_size=40))
def test_text_from_data_is_no_markup(text):
    written = Html({}).p(plain(text))
    inner = written.removeprefix("<p>").removesuffix("</p>\n")
    assert "<" not in inner
    assert html.unescape(inner) == " ".join(text.split())


def test_markup_in_both_forms():
    text = "a `b|c` **d** ~~e~~ [f](#g) " + plain("<h> *i*")
    assert Html({}).inline(text.replace("b|c", "b\\|c")) == (
        'a <code>b|c</code> <strong>d</strong> <del>e</del> <a href="#g">f</a> &lt;h&gt; *i*'
    )
    assert Markdown().inline(plain("<h> < 5")) == "&lt;h> < 5"
    table = Table(["x", "y"], [["1", plain("a|b")]], {0})
    assert Markdown().table(table).strip() == "| x | y |\n|--:|---|\n| 1 | a\\|b |"


def test_every_place_that_is_linked_to_is_there(markdown):
    """GitHub's anchor of a heading, or one before it."""
    headings = re.findall(r"^#+ (.*)$", markdown, re.M)
    places = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in headings}
    places |= set(re.findall(r'<a id="([\w-]+)"></a>', markdown))
    linked = set(re.findall(r"\]\(#([\w-]+)\)", markdown))
    assert "interventions" in linked and linked <= places


def test_a_claim_that_nothing_tests_says_so():
    assert tables.conditions({"checkpoints": {}}) == [
        "It speaks of MoE subjects, and no checkpoint here is one: nothing tests it."
    ]


def test_a_round_in_slices_is_not_called_minutes_apart(tmp_path, markdown):
    assert "between runs minutes apart at most" in markdown
    tree = Tree(tmp_path, sliced={"slices": 4}).make()
    tree.analyse()
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    assert "minutes apart" not in text and "decode in turn, a slice of the tokens each" in text


def test_each_bandwidth_names_its_checkpoint_and_the_arms_whose_ceiling_it_is(record):
    found = json.loads(json.dumps(record))
    rows = tables.bandwidths(found).rows
    assert [row[0] for row in rows] == [f"`{name}`" for name in found["ceilings"]]
    assert "vlm-null" in found["ceilings"]["qwen3-moe"]["arms"]
    assert not any("vlm-null" in row[1] for row in rows), "the ceilings' table has none of it"
    arms = found["ceilings"]["qwen3-moe"]["arms"]
    own = {way: rate | {"files": ["trace.json"]} for way, rate in arms["lm"]["bandwidths"].items()}
    own["read"] |= dict.fromkeys(("value", "min", "max"), 77e9)
    arms["lm"]["bandwidths"] = own
    rows = {row[1]: row for row in tables.bandwidths(found).rows if row[0] == "`qwen3-moe`"}
    assert rows["`lm`"][2] == "77.0 GB/s" and rows["`vlm`"][2] != rows["`lm`"][2]
    arms["vlm"]["bandwidths"] = {}
    (row,) = (row for row in tables.bandwidths(found).rows if row[0] == "`qwen3-moe`")
    assert row[1] == "`lm`", "an arm without a ceiling has no share"


def test_the_ceiling_that_is_drawn_is_the_one_that_is_told(record, page):
    """Beside the reference, whatever arm comes first in the table."""
    found = json.loads(json.dumps(record))
    name = next(iter(found["ceilings"]))
    for arm, entry in found["ceilings"][name]["arms"].items():
        if arm != "vlm":
            entry["bandwidths"]["read"] |= dict.fromkeys(("value", "min", "max"), 77e9)
    read = found["ceilings"][name]["bandwidths"]["read"]["value"] / 1e9
    drawn = "".join(svg for _, svg in charts.roofline(found).drawings)
    assert f"ceiling {read:.3g} GB/s" in drawn and "ceiling 77 GB/s" not in drawn
    assert "is the read beside the reference, on the first checkpoint that has one" in page


def test_a_table_without_rows_is_a_sentence():
    table = writers.Table(["a"], [], empty="the study has none.")
    assert writers.Markdown().table(table, "Arms").strip() == "Arms: the study has none."
    assert writers.Html({}).table(table) == "<p>The study has none.</p>\n"


def test_no_record_has_a_table_without_rows(tmp_path, monkeypatch):
    for name, arm in list(ARMS.items()):
        if arm["role"] == "intervention":
            monkeypatch.delitem(ARMS, name)
    tree = Tree(tmp_path).make()
    tree.analyse(claims=[])
    folder = tree.record(TEMPLATES)
    text, page = (folder / "record.md").read_text(), (folder / "record.html").read_text()
    assert "The study has no intervention here." in text
    assert not re.search(r"^\|[-:|]+\|\n(?!\|)", text, re.M) and "<tbody></tbody>" not in page


@pytest.mark.parametrize("unit", ["max sm mhz", "bytes/year", "layers", ""])
def test_an_unknown_unit_is_an_error(unit):
    with pytest.raises(UserError, match="unit"):
        numbers.show(figure([3201], unit, ["environment.json"]))


@pytest.mark.parametrize(
    ("fact", "value", "text"),
    [
        ("gpu.max_memory_mhz", 3201, "3201 MHz"),
        ("gpu.power_limit_w", 700.0, "700 W"),
        ("gpu.memory", 150754820096, "151 GB"),
        ("last_level_cache", 33554432, "33.6 MB"),
        ("performance_cores", 12, "12"),
    ],
)
def test_facts_of_a_host_have_their_units(fact, value, text):
    assert numbers.show(figure([value], assemble._unit(fact), ["e.json"])) == text


def test_a_number_without_a_known_unit_makes_no_record():
    with pytest.raises(UserError, match="memory_errors"):
        assemble._unit("gpu.memory_errors")
    with pytest.raises(UserError, match="cosine"):
        assemble._sourced({"cosine": 0.5}, "forced", ["parity.json"])


def test_each_quantity_s_bound_is_in_its_unit(record):
    for pattern in PATTERNS:
        share = "share" in pattern or pattern.split(".")[0] in ("lead", "saved", "gain", "busy",
                                                                "gpu_lead")  # fmt: skip
        assert numbers.bound(pattern, 0.5) == ("50 %" if share else "0.5")


COUNTED = {
    name: figure([count], "tokens", ["parity.json"])
    for name, count in {"decided": 0, "decided_mismatches": 0, "tokens": 512}.items()
}


def test_the_reference_is_not_compared_with_itself(record):
    rows = [row for row in tables.parity(record).rows if row[1] == "`vlm`"]
    assert rows and all(row[2:7] == ["the reference itself", *["–"] * 4] for row in rows)


def test_rates_of_the_instrumented_pass_are_called_so(markdown):
    ceilings = markdown.partition("## Ceilings")[2].partition("\n## ")[0]
    assert "| expert gather (instrumented pass) |" in ceilings and "a lower bound" in ceilings
    assert "| whole token |" in ceilings


def test_a_share_of_the_gpu_s_time_by_the_forced_pass_is_marked(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/qwen3-moe.vlm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": "forced"}))
    tree.analyse()
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    rows = [line for line in text.splitlines() if "| `skip_experts` |" in line]
    assert [row.endswith("(forced pass) |") for row in rows if "qwen3-moe" in row] == [True]
    assert not any(row.endswith("(forced pass) |") for row in rows if "qwen3-moe" not in row)


def test_a_pair_with_one_side_unknown_is_no_pair():
    one = figure([2], "launches/token", ["terms.json"])
    assert tables._arrow([one, one]) == "2 → 2" and tables._arrow([one, None]) == "–"


def test_no_mismatch_of_none_says_so():
    assert tables._decided(COUNTED) == "none of 512 tokens is decided"
    some = {"decided": figure([17], "tokens", ["p"])}
    assert tables._decided(COUNTED | some) == "0 of 17"
    assert tables._decided({}) == numbers.ABSENT


def test_an_arm_void_for_its_path_is_void_beside_its_tokens_too(record):
    found = json.loads(json.dumps(record))
    found["results"]["qwen3-moe"]["arms"]["lm"]["void"] = "its experts ran qmm_naive"
    cells = {(row[0], row[1]): row[7] for row in tables.parity(found).rows}
    assert cells["`qwen3-moe`", "`lm`"] == "**void**: its experts ran qmm_naive"
    assert cells["`qwen3-moe`", "`vlm`"] == "no"


def test_what_was_not_compared_neither_differs_nor_passes(markdown):
    assert tables.greedy({"greedy": None}) == tables.greedy({}) == "not compared"
    why = {"not_compared": "the command prints no token ids", "finite": None}
    assert tables._voids(why, None) == (
        "no, logits not seen; not compared: the command prints no token ids"
    )
    assert tables._voids({"finite": True}, None) == "no" and "| passes |" not in markdown


def test_the_commands_name_the_record_s_own_study():
    studies = TEMPLATES.parent / "studies"
    for path in studies.glob("*.yaml"):
        assert f"\n  name: {path.stem}" in path.read_text(), "the commands find it by its name"
    text = render.commands("moe-families-h200")
    assert "snakemake --cores 1 record --configfile studies/moe-families-h200.yaml" in text
    assert "explain --configfile studies/moe-families-h200.yaml" in text
    assert "studies/" not in render.commands("embedded") and "{" not in text


def test_a_null_arm_on_one_side_of_one_is_told(record):
    record = json.loads(json.dumps(record))
    result = record["results"]["qwen3-moe"]
    result["noise"]["decode"] |= {"value": 0.97, "min": 0.94, "max": 0.999}
    assert any("One-sided noise" in line and "slower" in line for line in _notes(record))
    result["noise"]["decode"] |= {"max": 1.01}
    assert not any("One-sided" in line for line in _notes(record))


def _notes(record):
    return tables.notes(record, "qwen3-moe")


def test_a_question_about_a_candidate_s_rate_tells_its_tokens(record):
    figures = {"figure": figure([1.2], "ratio", ["terms.json"]), "why": None}
    asked = {"asks": "Faster, with the same tokens?", "claims": [], "paths": {}}
    asked |= {"not_measured": None, "by": [{"quantity": "ratio.lm", "checkpoints": {}}]}
    asked["by"][0]["checkpoints"]["qwen3-moe"] = figures
    rows = trace_tables.answers(record | {"answers": [asked]}).rows
    assert re.search(r"greedy tokens of `lm`: `qwen3-moe` (identical|differ)", rows[0][2])


@pytest.mark.parametrize(
    ("share", "text"), [(0.05042, "5.042 %"), (0.04979, "4.979 %"), (0.09, "9.0 %")]
)
def test_a_figure_is_printed_on_its_side_of_the_limit(share, text):
    assert trace_tables._beside(figure([share], "share", ["terms.json"]), 0.05) == text
    assert trace_tables._shown(figure([share], "share", ["terms.json"]), 0.05) == text


def test_a_reference_with_changing_tokens_qualifies_parity(record):
    record = json.loads(json.dumps(record))
    assert tables.unsteady(record) == []
    arms = record["results"]["qwen3-moe"]["arms"]
    arms[record["reference"]]["same_tokens_every_round"] = False
    assert tables.unsteady(record) == ["`qwen3-moe`"]
    by = [{"quantity": "ratio.lm", "checkpoints": {"qwen3-moe": {"figure": {}, "why": None}}}]
    by[0]["checkpoints"]["qwen3-moe"]["figure"] = figure([1.2], "ratio", ["runs.jsonl"])
    (told,) = trace_tables._tokens({"by": by}, record)
    assert told.endswith("(where the reference's own vary)")


def test_a_claim_says_when_it_stands_on_the_forced_pass_alone():
    condition = {"quantity": "gpu_share.router", "is": "<", "than": 0.1, "state": "holds"}
    condition |= {
        "figure": figure([0.08], "share", ["terms.json"]),
        "forced": True,
        "of_work": None,
    }
    claim = {"checkpoints": {"a": {"verdict": "supported", "settled_by": []}}}
    claim["checkpoints"]["a"]["conditions"] = [condition]
    assert "8.0 % by the forced pass alone, claimed" in tables.conditions(claim)[0]
    condition |= {"forced": False, "of_work": figure([0.09], "share", ["terms.json"])}
    assert "is 8.0 %, 9.0 % without synchronisation, claimed" in tables.conditions(claim)[0]
    condition |= {"of_work": None, "unproved": True}
    assert "8.0 %, of an arm whose kernels are not proved, claimed" in tables.conditions(claim)[0]
    condition |= {"unproved": False, "drifts": True}
    assert "is 8.0 %, drifting one way through the rounds," in tables.conditions(claim)[0]
    condition |= {"drifts": False, "by_term": condition["figure"], "by_term_state": "unclear"}
    assert "in the whole term's, by which it is unclear, claimed" in tables.conditions(claim)[0]


def test_an_answer_says_what_its_figure_stands_on():
    at = {"figure": figure([0.08], "share", ["terms.json"]), "why": None}
    assert trace_tables._known(at) == "8.0 %"
    assert trace_tables._known(at | {"forced": True}) == "8.0 % (forced pass)"
    doubts = {"unproved": True, "no_bound": "outdone"}
    assert trace_tables._known(at | doubts).startswith("8.0 % (kernels not proved; no bound since")


def test_a_gain_s_bound_has_its_unit():
    assert numbers.bound("gain.vlm-fused", 0.85) == "85 %"


def test_figures_of_a_trace_that_fell_back_are_marked(tmp_path):
    tree = Tree(tmp_path, kernels=True, bandwidth=12e9, slow={"lm": 0.75}).make()
    path = tree.folder("trace/qwen3-moe.lm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": "forced"}))
    tree.analyse()
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    table = text.partition("**Candidates beside their base**")[2].partition("\n\n|")[2]
    (row,) = (line for line in table.partition("\n\n")[0].splitlines() if "`lm`" in line)
    assert row.count("(forced pass)") == 4, (
        "launches and time of the block, both shares of its rate"
    )
    ceilings = text.partition("## Ceilings")[2].partition("\n## ")[0]
    assert re.search(r"`lm` \| expert gather \(forced pass\)", ceilings)
    assert "`lm` | whole token |" in ceilings and "`vlm` | expert gather |" in ceilings


def test_modules_stand_by_time_and_a_large_other_is_told(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    path = tree.folder("trace/inkling-affine.vlm") / "terms.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dropped": 7}))
    tree.analyse()
    folder = tree.record(TEMPLATES)
    text, page = (folder / "record.md").read_text(), (folder / "record.html").read_text()
    table = text.partition("**GPU time by module of `vlm` on `qwen3-moe`")[2]
    table = table.partition("\n\n**")[0]
    assert "| `model.layers.*.expert_gather.big` | expert gather | 5.33 | 0.253 | 24.1 % |" in table
    assert "| outside modules | synchronisation | 1 | 0.0500 | 4.8 % |" in table
    last = table.strip().splitlines()[-1]
    assert re.match(r"\| \d+ more, below 3 % each \| – \|", last)
    assert "<code>model.layers.*.expert_gather.big</code>" in page
    (other,) = (line for line in text.splitlines() if "the term other takes" in line)
    assert other == (
        "- In `vlm` the term other takes 19.0 % of the GPU's busy time; its largest modules: "
        "`model.layers.*.other.big` 12.7 %, `model.layers.*.other.small` 6.3 %."
    ), "of the dense checkpoint, whose other traced arm is void"
    record = json.loads((folder / "record.json").read_text())
    assert len(trace_tables.others(record, "qwen3-dense")) == 1
    record["attribution"]["kernels"]["qwen3-dense"]["vlm"]["refused"] = "unclassified"
    assert trace_tables.others(record, "qwen3-dense") == []
    assert "module of `vlm` on `inkling-affine`" not in text, "its attribution is refused"
    assert "module of `vlm` on `inkling-nvfp4`" in text


def test_a_path_by_the_forced_pass_is_told_as_such(tmp_path):
    tree = Tree(tmp_path, kernels=True).make()
    folder = tree.folder("trace/qwen3-moe.lm")
    terms = json.loads((folder / "terms.json").read_text())
    terms |= {"method": "forced", "path": terms["path"] | {"experts": [], "uneven": []}}
    (folder / "terms.json").write_text(json.dumps(terms))
    (folder / "modules.csv").unlink()
    table = (folder / "kernels.csv").read_text()
    old, gather = '"void mlx::core::cu::kernel_expert_gather<float, 4>(float*, int)"', "gather_qmv"
    (folder / "kernels.csv").write_text(table.replace(old, gather))
    asked = [{"asks": "which?", "by": ["path"], "arm": "lm", "checkpoints": ["qwen3-moe"]}]
    tree.analyse(experts={"lm": {"qwen3-moe": ["gather_qmv*"]}}, answers=asked)
    text = (tree.record(TEMPLATES) / "record.md").read_text()
    assert "- `lm` on `qwen3-moe` is to run `gather_qmv*`: proved by the forced pass." in text
    assert "| `qwen3-moe` | `lm` | `gather_qmv` (forced pass) | 8 | 2 | 0.380 |" in text
    assert "| `qwen3-moe` | `vlm` | `kernel_expert_gather` | 8 | 2 | 0.380 |" in text
    assert "`qwen3-moe` runs by the forced pass `gather_qmv` 8 launches/token, 0.380 ms" in text
    assert "module of `lm` on `qwen3-moe`" not in text and "by module of `vlm`" in text
