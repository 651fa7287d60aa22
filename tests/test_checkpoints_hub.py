"""Downloads from a Hub that this file plays on 127.0.0.1: cuts, refusals, resuming, the cache."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import traceback
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from moescope.checkpoints import hub
from moescope.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
REPO, REVISION, GONE = "maker/tiny-moe", "a1" * 20, "b2" * 20
TOKEN = "hf_very_secret_token"
SHARDS = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 300_000 for n in (1, 2)}
FILES = {
    "config.json": b'{"model_type": "qwen3_moe"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"t": 1}',
    "tokenizer.model": b"sp",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ m }}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {f"t{n}": name for n, name in enumerate(SHARDS)}}
    ).encode(),
    **SHARDS,
}
OTHERS = {
    "README.md": b"# read me",
    "modeling_tiny.py": b"import os",
    "pytorch_model.bin": b"no",
    "consolidated.safetensors": b"the same again",
    "original/model.safetensors": b"and again",
}


class Hub:
    """What the played Hub holds and how it behaves; ``asked`` counts (path, first byte)."""

    def __init__(self):
        self.files = {**FILES, **OTHERS}
        self.cuts: dict[str, list[int]] = {}  # name -> bytes after which each answer ends
        self.answers: dict[str, list[int]] = {}  # "tree" or a name -> statuses to give first
        self.needs: str | None = None  # the token
        self.gated = False
        self.by_cdn = False  # large files come from elsewhere
        self.wrong: set[str] = set()  # names that come with other bytes
        self.commit = REVISION
        self.ranges = True
        self.asked: Counter = Counter()
        self.seen: list[tuple[str, str | None]] = []  # (server, authorization)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        play: Hub = self.server.play
        path = unquote(self.path.partition("?")[0]).strip("/")
        play.seen.append((self.server.name, self.headers.get("Authorization")))
        parts = path.split("/")
        if path.startswith("api/models/"):
            repo, revision, name = "/".join(parts[2:4]), parts[5], "tree"
        else:
            repo, revision, name = "/".join(parts[0:2]), parts[3], "/".join(parts[4:])
        refusal = self.refusal(play, repo, revision, name)
        if refusal:
            self.refuse(*refusal)
        elif name == "tree":
            self.tree(play)
        elif play.by_cdn and name in SHARDS and self.server.name == "hub":
            self.answer(302, b"", {"Location": f"{self.server.cdn}{self.path}"})
        else:
            self.file(play, name)

    def refusal(self, play, repo, revision, name):
        if self.server.name == "cdn":
            return None
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if play.needs and token and token != play.needs:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}
        if play.needs and not token:
            return 401, {"X-Error-Code": "RepoNotFound"}
        if repo != REPO:
            return (404, {"X-Error-Code": "RepoNotFound"}) if token else (401, {})
        if revision != REVISION:
            return 404, {"X-Error-Code": "RevisionNotFound"}
        if play.gated and name != "tree":
            return (403 if token else 401), {"X-Error-Code": "GatedRepo"}
        given = play.answers.get(name)
        return (given.pop(0), {"Retry-After": "0"}) if given else None

    def refuse(self, status, headers):
        # Like the real one, which repeats signed addresses and more in its bodies.
        self.answer(status, b'{"error": "refused"}', headers)

    def tree(self, play):
        entries = []
        for name, data in play.files.items():
            if "/" in name:
                entries.append({"type": "directory", "oid": "0", "path": name.split("/")[0]})
                continue
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry = {"type": "file", "oid": blob, "size": len(data), "path": name}
            if name in SHARDS:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
            entries.append(entry)
        half = len(entries) // 2
        if "page=2" in self.path:
            self.answer(200, json.dumps(entries[half:]).encode(), {})
            return
        following = f"http://{self.headers['Host']}{self.path.partition('?')[0]}?page=2"
        self.answer(
            200, json.dumps(entries[:half]).encode(), {"Link": f'<{following}>; rel="next"'}
        )

    def file(self, play, name):
        data = play.files[name]
        if name in play.wrong:
            data = bytes(len(data))
        start = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        start = int(start) if play.ranges else 0
        play.asked[name, start] += 1
        status = 206 if start else 200
        headers = {"X-Repo-Commit": play.commit}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = play.cuts.get(name)
        if cut:
            self.answer(status, data[start:], headers, cut.pop(0))
        else:
            self.answer(status, data[start:], headers)

    def answer(self, status, body, headers, cut=None):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def played(monkeypatch, tmp_path):
    """A running Hub; huggingface_hub is told of it, and of no other cache or token."""
    play = Hub()
    servers = []
    for name in ("cdn", "hub"):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        server.play, server.name = play, name
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
    # Another host name, so that it is another origin.
    servers[1].cdn = f"http://localhost:{servers[0].server_port}"
    play.address = f"http://127.0.0.1:{servers[1].server_port}"
    monkeypatch.setenv("HF_ENDPOINT", play.address)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "BACKOFF_S", 0.01)
    yield play
    for server in servers:
        server.shutdown()
        server.server_close()


def get(folder, repo=REPO, revision=REVISION, **arguments):
    hub.fetch({"kind": "hub", "repo": repo, "revision": revision}, folder, **arguments)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(folder, message, **arguments):
    """fetch fails with this message, and no word of it is secret."""
    folder.mkdir(exist_ok=True)
    with pytest.raises(UserError, match=message) as error:
        get(folder, **arguments)
    assert TOKEN not in "".join(traceback.format_exception(error.value))
    return str(error.value)


def test_only_what_decoding_needs(played, tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES
    assert {count for count in played.asked.values()} == {1}


def test_without_an_index_the_one_file(played, tmp_path):
    for name in ("model.safetensors.index.json", *SHARDS):
        del played.files[name]
    played.files["model.safetensors"] = b"weights"
    folder = tmp_path / "c"
    folder.mkdir()
    found = get(folder)
    assert found["model.safetensors"] == b"weights"
    assert "consolidated.safetensors" not in found


def test_a_cut_connection_goes_on_where_it_stopped(played, tmp_path):
    name = next(iter(SHARDS))
    played.cuts[name] = [100_000, 50_000, 7]
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES
    starts = sorted(start for asked, start in played.asked if asked == name)
    assert starts == [0, 100_000, 150_000, 150_007]


def test_an_ended_run_goes_on_where_it_stopped(played, tmp_path, monkeypatch):
    """Partial files stay in the folder between calls; whole ones are not asked for again."""
    name, other = SHARDS
    played.cuts[name] = [100_000] + [0] * 20
    folder = tmp_path / "c"
    monkeypatch.setattr(hub, "TRIES", 3)
    refused(folder, "3 times in a row; check the network")
    assert not (folder / name).exists()
    played.cuts.clear()
    before = Counter(played.asked)
    assert get(folder) == FILES
    again = played.asked - before
    assert again[name, 100_000] == 1
    assert set(again) <= {(name, 100_000), (other, 0), *((other, n) for n in range(1, 300_000))}
    assert sum(again.values()) <= 2


def test_a_killed_process_goes_on_where_it_stopped(played, tmp_path):
    """The folder that a killed process left: a whole file, half a one and hidden names."""
    name, other = SHARDS
    folder = tmp_path / "c"
    (folder / hub.INCOMPLETE).mkdir(parents=True)
    (folder / other).write_bytes(SHARDS[other])
    digest = hashlib.sha256(SHARDS[name]).hexdigest()[:16]
    part = folder / hub.INCOMPLETE / f"{name}.{digest}.part"
    part.write_bytes(SHARDS[name][:123_456])
    assert get(folder) == FILES
    assert played.asked[name, 123_456] == 1
    assert not any(asked == other for asked, _ in played.asked)


def test_a_server_that_knows_no_ranges(played, tmp_path):
    name = next(iter(SHARDS))
    played.cuts[name] = [100_000]
    played.ranges = False
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES


def test_a_part_longer_than_its_file_is_begun_again(played, tmp_path):
    name = next(iter(SHARDS))
    folder = tmp_path / "c"
    (folder / hub.INCOMPLETE).mkdir(parents=True)
    digest = hashlib.sha256(SHARDS[name]).hexdigest()[:16]
    part = folder / hub.INCOMPLETE / f"{name}.{digest}.part"
    part.write_bytes(bytes(300_001))
    assert get(folder) == FILES


@pytest.mark.parametrize("name", ["config.json", next(iter(SHARDS))])
def test_other_bytes_than_listed_are_not_taken(played, tmp_path, name):
    played.wrong.add(name)
    folder = tmp_path / "c"
    refused(folder, "another hash than the Hub says")
    assert not (folder / name).exists()
    played.wrong.clear()
    assert get(folder) == FILES


@pytest.mark.parametrize("name", ["tree", "config.json"])
def test_a_busy_hub_is_asked_again(played, tmp_path, name):
    played.answers[name] = [429, 503, 500]
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES
    assert played.answers[name] == []


def test_a_hub_that_stays_busy(played, tmp_path):
    played.answers["tree"] = [503] * 50
    message = refused(tmp_path / "c", "its list of files: the Hub answers 503, 6 times in a row")
    assert "run it again" in message
    assert len(played.answers["tree"]) == 44


def test_no_network(played, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(tmp_path / "c", r"no answer \(ConnectError\)")


def test_the_time_limit(played, tmp_path):
    folder = tmp_path / "c"
    refused(folder, r"run it again", limit_s=0.0)
    assert get(folder) == FILES


def test_a_revision_that_is_gone_is_never_replaced(played, tmp_path):
    message = refused(tmp_path / "c", f"revision {GONE} is not there", revision=GONE)
    assert "pin another one" in message
    assert not played.asked


@pytest.mark.parametrize("revision", ["main", REVISION[:12], REVISION.upper()])
def test_a_revision_is_forty_digits(played, tmp_path, revision):
    refused(tmp_path / "c", "40 hex digits", revision=revision)
    assert not played.seen


def test_an_answer_from_another_commit(played, tmp_path):
    played.commit = GONE
    refused(tmp_path / "c", f"answers from {GONE}")


def test_no_repository(played, tmp_path, monkeypatch):
    refused(tmp_path / "c", "is private, or does not exist; correct source.repo", repo="maker/no")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused(tmp_path / "c", "there is no such repository", repo="maker/no")


def test_a_private_repository(played, tmp_path, monkeypatch):
    played.needs = TOKEN
    folder = tmp_path / "c"
    refused(folder, "there is no token.*set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}_old")
    refused(folder, "the Hub refuses the token")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert get(folder) == FILES


def test_a_gated_repository(played, tmp_path, monkeypatch):
    played.gated = True
    message = refused(tmp_path / "c", "it is gated and there is no token; accept the terms at")
    assert f"{played.address}/{REPO}" in message
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused(tmp_path / "c", "the token's account has no access yet; accept the terms")


def test_a_token_that_no_header_can_hold(played, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\u00e9")
    refused(tmp_path / "c", "no header can hold")


def test_the_token_stays_with_the_hub(played, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    played.needs, played.by_cdn = TOKEN, True
    monkeypatch.setattr(hub, "SAY_S", -1.0)
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES
    assert {token for server, token in played.seen if server == "cdn"} == {None}
    assert {token for server, token in played.seen if server == "hub"} == {f"Bearer {TOKEN}"}
    shown = "".join(capfd.readouterr())
    assert f"{REPO}: " in shown and TOKEN not in shown


def test_no_room(played, tmp_path, monkeypatch):
    usage = hub.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage)
    refused(tmp_path / "c", "still to come .* make room")
    assert not any(name in SHARDS for name, _ in played.asked)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("config.json",), "there is no config.json"),
        ((next(iter(SHARDS)),), "names model-00001-of-00002.safetensors, which the repository"),
        (("model.safetensors.index.json", "consolidated.safetensors", *SHARDS), "no safetensors"),
    ],
)
def test_a_repository_that_is_no_checkpoint(played, tmp_path, missing, message):
    for name in missing:
        del played.files[name]
    refused(tmp_path / "c", message)


def test_an_index_cannot_reach_outside(played, tmp_path):
    played.files["model.safetensors.index.json"] = b'{"weight_map": {"t": "../x.safetensors"}}'
    refused(tmp_path / "c", "which is no shard beside it")


def cached(played, tmp_path, drop=()):
    """The Hub's own cache with this revision, as huggingface_hub lays it out."""
    root = tmp_path / "home" / "hub" / f"models--{REPO.replace('/', '--')}"
    snapshot, blobs = root / "snapshots" / REVISION, root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, data in played.files.items():
        if name in drop or "/" in name:
            continue
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_what_is_cached_is_not_downloaded(played, tmp_path):
    snapshot = cached(played, tmp_path, drop=("tokenizer.json",))
    (snapshot / "merges.txt").resolve().write_bytes(b"x y")  # damaged
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES
    assert {name for name, _ in played.asked} == {"tokenizer.json", "merges.txt"}
    assert (snapshot / "merges.txt").read_bytes() == b"x y"


def test_a_cached_checkpoint_needs_no_network(played, tmp_path, monkeypatch):
    cached(played, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    folder = tmp_path / "c"
    folder.mkdir()
    assert get(folder) == FILES


def test_offline(played, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder = tmp_path / "c"
    refused(folder, "HF_HUB_OFFLINE is set, and the cache has no complete")
    snapshot = cached(played, tmp_path)
    lost = snapshot / next(iter(SHARDS))
    lost.rename(tmp_path / "lost")
    refused(folder, "the cache has no complete")
    (tmp_path / "lost").rename(lost)
    assert get(folder) == FILES
    assert not played.seen


def test_the_environment_is_honoured(played, tmp_path):
    """Of a new process: HF_HOME with its token, HF_ENDPOINT, HF_HUB_OFFLINE."""
    played.needs = TOKEN
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    cached(played, tmp_path, drop=("config.json",))
    code = (
        "import sys, pathlib; from moescope.checkpoints import hub;"
        f"hub.fetch({{'repo': {REPO!r}, 'revision': {REVISION!r}}}, pathlib.Path(sys.argv[1]))"
    )

    def run(folder, **env):
        folder.mkdir()
        return subprocess.run(
            [sys.executable, "-c", code, folder],
            env={**os.environ, "PYTHONPATH": str(ROOT / "workflow"), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    online = run(tmp_path / "online")
    assert online.returncode == 0, online.stderr
    assert {path.name for path in (tmp_path / "online").iterdir()} == FILES.keys()
    assert {name for name, _ in played.asked} == {"config.json"}
    offline = run(tmp_path / "offline", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in offline.stderr
    assert TOKEN not in online.stderr + offline.stderr
