"""Pins: a fake Hub on this host, commits of a toy repository, files that keep their comments."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

import toy_runtime as toy
from moescope.errors import UserError
from moescope.study.pin import Document, hub_revision, pin

MAIN, TAG = "a" * 40, "0" * 39 + "1"
REPOS = {"org/model": {"main": MAIN, "v2": TAG}, "org/other": {"main": "b" * 40}}


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        repo, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
        self.server.asked.append((repo, revision))
        if repo == "org/gated":
            return self.answer(403, {"error": "gated"}, "GatedRepo")
        if repo == "org/broken":
            return self.answer(500, {"error": "oops"})
        if repo not in REPOS:
            return self.answer(404, {"error": "not found"}, "RepoNotFound")
        if revision not in REPOS[repo]:
            return self.answer(404, {"error": "no revision"}, "RevisionNotFound")
        self.answer(200, {"id": repo, "sha": REPOS[repo][revision], "siblings": []})

    def answer(self, status, body, code=None):
        data = json.dumps(body).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


STUDY = """\
# My study.
study: {name: mine}   # short

checkpoints:
  one:                     # the first
    role: subject
    source:
      kind: hub
      repo: org/model      # given by me
      revision: null       # to be pinned
  two: {role: control, source: {kind: hub, repo: org/model, branch: v2}}
  three:
    source: &other
      kind: hub
      repo: org/other      # no revision at all
      branch: main
  four:
    source: *other
  five:
    source: {kind: hub, repo: org/model, revision: "cccccccccccccccccccccccccccccccccccccccc"}
  six:
    source: {kind: synthetic, seed: 1}
  seven:
    source:
      repo: org/model
      kind: hub
      revision:
# the end
"""


def test_branches_become_revisions_and_nothing_else_changes(hub, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    lines = pin(tmp_path, path)
    assert f"checkpoints.one.source.revision: main -> {MAIN}" in lines
    assert f"checkpoints.two.source.revision: v2 -> {TAG}" in lines
    text = path.read_text()
    sources = {n: c["source"] for n, c in yaml.safe_load(text)["checkpoints"].items()}
    assert sources["one"]["revision"] == sources["seven"]["revision"] == MAIN
    assert sources["two"]["revision"] == TAG
    assert sources["three"] == sources["four"]
    assert sources["three"]["revision"] == "b" * 40
    assert sources["five"]["revision"] == "c" * 40
    assert "revision" not in sources["six"]
    expected = (
        STUDY.replace("revision: null ", f'revision: "{MAIN}" ')
        .replace("repo: org/model, branch", f'repo: org/model, revision: "{TAG}", branch')
        .replace(
            "repo: org/other      # no revision at all\n",
            f'repo: org/other      # no revision at all\n      revision: "{"b" * 40}"\n',
        )
        .replace("revision:\n", f'revision: "{MAIN}"\n')
    )
    assert text == expected
    asked = len(hub.asked)
    assert pin(tmp_path, path) == ["study.yaml: everything is pinned"]
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("repo", "branch", "complaint"),
    [
        ("org/gated", "main", "is gated: accept its terms"),
        ("org/none", "main", "has no repository org/none, or it is private"),
        ("org/model", "nothing", "has no branch or tag 'nothing'"),
        ("org/broken", "main", "does not answer for org/broken"),
    ],
)
def test_what_the_hub_says_is_told_apart(hub, repo, branch, complaint):
    with pytest.raises(UserError, match=complaint):
        hub_revision(repo, branch)


def test_a_hub_that_is_not_there(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(UserError, match=r"the Hub (cannot be reached|does not answer)"):
        hub_revision("org/model", "main")


def test_a_failure_does_not_keep_the_others_from_being_written(hub, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("repo: org/other", "repo: org/gated"))
    with pytest.raises(UserError, match=r"checkpoints\.three\.source: org/gated is gated") as error:
        pin(tmp_path, path)
    assert f"one.source.revision: main -> {MAIN}" in str(error.value)
    assert yaml.safe_load(path.read_text())["checkpoints"]["one"]["source"]["revision"] == MAIN


RUNTIME = """\
runtimes:
  toy:
    kind: command   # a binary
    preset: mlxcel
    source:
      kind: git
      url: {url}
      ref: {ref}
    build:
      features: [cuda]
"""


def test_commits_and_the_framework_in_their_tree_are_pinned(tmp_path):
    url = tmp_path / "toy"
    first = toy.write(url, message="first")
    third = toy.write(url, pin=toy.OTHER_PIN, message="move the pin")
    # The toy's list stands where mlxcel's does.
    (url / "src/lib/mlx-cpp").mkdir(parents=True)
    commits = []
    for value in (toy.PIN, toy.OTHER_PIN):
        text = toy.CMAKE.format(pin=value).replace("example.invalid", "github.com")
        (url / "src/lib/mlx-cpp/CMakeLists.txt").write_text(text)
        toy.git(url, "add", "--all")
        toy.git(url, "commit", "--quiet", "-m", value)
        commits.append(toy.git(url, "rev-parse", "HEAD").strip())
    assert len({first, third, *commits}) == 4
    path = tmp_path / "study.yaml"
    path.write_text(RUNTIME.format(url=url, ref=f'"{commits[0][:8]}"'))
    lines = pin(tmp_path, path)
    assert lines == [
        f"runtimes.toy.source.commit: {commits[0][:8]} -> {commits[0]}",
        f"runtimes.toy.framework.value: not given -> {toy.PIN}",
    ]
    found = yaml.safe_load(path.read_text())["runtimes"]["toy"]
    assert found["source"]["commit"] == commits[0]
    assert found["framework"] == {"value": toy.PIN}
    assert "kind: command   # a binary\n    framework:" in path.read_text()
    # A commit moved by hand: the framework's pin follows.
    path.write_text(path.read_text().replace(commits[0] + '"', commits[1] + '"'))
    assert pin(tmp_path, path) == [
        f"runtimes.toy.framework.value: {toy.PIN} -> {toy.OTHER_PIN}",
    ]
    assert pin(tmp_path, path) == ["study.yaml: everything is pinned"]


def test_a_runtime_without_ref_and_an_unknown_one(tmp_path):
    toy.write(tmp_path / "toy")
    path = tmp_path / "study.yaml"
    path.write_text(RUNTIME.format(url=tmp_path / "toy", ref="null"))
    with pytest.raises(UserError, match=r"source\.ref: missing; give a branch"):
        pin(tmp_path, path)
    path.write_text(RUNTIME.format(url=tmp_path / "toy", ref="release-9"))
    with pytest.raises(UserError, match=r"no branch, tag or commit 'release-9'"):
        pin(tmp_path, path)


@pytest.mark.parametrize(
    ("ref", "read"), [("69728692", "69728692"), ("01234567", "342391"), ("1.10", "1.1")]
)
def test_what_yaml_reads_as_a_number_is_no_name(hub, tmp_path, ref, read):
    """A commit's first digits may be digits only, of which YAML makes another number."""
    path = tmp_path / "study.yaml"
    path.write_text(
        RUNTIME.format(url=tmp_path / "toy", ref=ref)
        + f"checkpoints:\n  m:\n    source: {{kind: hub, repo: org/model, branch: {ref}}}\n"
    )
    before = path.read_text()
    with pytest.raises(UserError) as raised:
        pin(tmp_path, path)
    assert str(raised.value).splitlines() == [
        f"study.yaml: {key}: {read} is not a text; put it in quotes"
        for key in ("checkpoints.m.source: branch", "runtimes.toy: source.ref")
    ]
    assert path.read_text() == before and hub.asked == []


def test_what_a_source_does_not_give_is_asked_for(tmp_path):
    path = tmp_path / "study.yaml"
    for text, line in (
        ("checkpoints:\n  m:\n    source: {kind: hub}\n", "checkpoints.m.source: repo: missing"),
        (RUNTIME.format(url="null", ref="main"), "runtimes.toy: source.url: missing"),
        ("runtimes:\n  toy: {kind: command, source: a}\n", "runtimes.toy.source: a mapping is"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=line):
            pin(tmp_path, path)


def test_merged_mappings_keep_their_form():
    text = "base: &b\n  kind: hub\n  repo: x/y\nchild:\n  <<: *b\n  branch: main\n"
    document = Document(text, "t")
    child = document.at("child")
    assert document.values(child) == {"kind": "hub", "repo": "x/y", "branch": "main"}
    document.put(child, "revision", "r", after="branch")
    assert document.edited() == text + '  revision: "r"\n'
    with pytest.raises(UserError, match="not YAML"):
        Document("a: [", "t")
