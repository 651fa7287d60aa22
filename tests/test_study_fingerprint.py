"""Code fingerprints: the syntax tree counts, comments, layout and docstrings do not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moescope.study import fingerprint
from moescope.study.fingerprint import fingerprints, tree_text

SOURCE = '''
"""Doc."""
import json


def f(x):
    """Doc."""
    return json.dumps({"a": x, 'b': [1, 2]}, indent=1)
'''


@pytest.mark.parametrize(
    "changed",
    [
        SOURCE.replace("import json", "import json  # why"),
        SOURCE.replace("    return", "    # a comment\n\n    return"),
        SOURCE.replace("'b'", '"b"'),
        SOURCE.replace("Doc.", "Another text."),
        SOURCE.replace("(x):", "(\n    x,\n):"),
        SOURCE.replace('"""Doc."""\n', "", 1),
    ],
)
def test_form_does_not_count(changed):
    assert changed != SOURCE
    assert tree_text(changed) == tree_text(SOURCE)


@pytest.mark.parametrize(
    "changed",
    [
        SOURCE.replace("indent=1", "indent=2"),
        SOURCE.replace("[1, 2]", "[2, 1]"),
        SOURCE.replace("def f", "def g"),
        SOURCE.replace("(x)", "(x=None)"),
        SOURCE.replace("1, 2", "1.0, 2"),
    ],
)
def test_content_counts(changed):
    assert changed != SOURCE
    assert tree_text(changed) != tree_text(SOURCE)


@given(st.lists(st.integers(), max_size=4), st.lists(st.integers(), max_size=4))
def test_different_values_differ(a, b):
    assert (tree_text(f"x = {a}") == tree_text(f"x = {b}")) == (a == b)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in place of moescope: a stage that imports a helper lazily and reads a table."""
    base = tmp_path / "moescope"
    (base / "stage").mkdir(parents=True)
    (base / "__init__.py").write_text("")
    (base / "stage" / "__init__.py").write_text("")
    (base / "stage" / "run.py").write_text(
        'TABLES = ("table.json", "more")\n\n'
        "def run():\n    from ..helper import f\n    return f()\n"
    )
    (base / "stage" / "table.json").write_text('{"a": 1, "b": 2}')
    (base / "stage" / "more").mkdir()
    (base / "stage" / "more" / "kernel.cu").write_text("x")
    (base / "helper.py").write_text("def f():\n    return 1\n")
    (base / "other.py").write_text("x = 1\n")
    monkeypatch.setattr(fingerprint, "PACKAGE", base)
    fingerprint._module.cache_clear()
    yield base
    fingerprint._module.cache_clear()


def test_what_a_stage_imports_and_reads_belongs_to_it(package):
    data = {"stage/table.json", "stage/more/kernel.cu"}
    assert set(fingerprints("stage.run")) == {"stage.run", "helper"} | data


def test_a_helper_s_change_is_the_stage_s(package):
    before = fingerprints("stage.run")
    (package / "helper.py").write_text("def f():\n    return 2\n")
    (package / "other.py").write_text("x = 2\n")
    fingerprint._module.cache_clear()
    after = fingerprints("stage.run")
    assert [name for name in before if before[name] != after[name]] == ["helper"]


def test_a_table_counts_by_its_value(package):
    before = fingerprints("stage.run")
    (package / "stage" / "table.json").write_text('{\n  "b": 2,\n  "a": 1\n}\n')
    assert fingerprints("stage.run") == before
    (package / "stage" / "table.json").write_text('{"a": 1, "b": 3}')
    assert fingerprints("stage.run") != before


def test_a_stage_without_its_module_is_an_error(package):
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        fingerprints("nowhere")
