"""A Hub repository's files at one revision: found in the cache, or downloaded and gone on with.

Each file is checked by size and hash before it gets its name. What was downloaded of a file stays
in ``.incomplete`` until it is whole, so a download goes on where it stopped. Another revision is
never taken instead. Neither tokens nor signed addresses get into a message.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from ..errors import UserError
from ..files import read_json, write_json
from .headers import INDEX

# What the loaders read, at the top of a repository. No code (*.py) is ever run, so none is fetched.
WANTED = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt")
WEIGHTS = ("model*.safetensors", "*.safetensors")  # the second if the first finds none
INCOMPLETE = ".incomplete"
LISTING = "listing.json"
LISTING_SCHEMA = "moescope/hub-listing/1"
LIMIT_S = 6 * 3600.0  # all of it
STALL_S = 60.0  # without a byte
TRIES = 6  # in a row without a new byte
BACKOFF_S = 1.0  # doubles with each try
LONGEST_BACKOFF_S = 60.0
SAY_S = 10.0
WORKERS = 4
CHUNK = 1 << 20
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
HEX40 = re.compile(r"[0-9a-f]{40}")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Entry:
    """A file of the repository. size: bytes. sha256: of a large file; blob: git's hash of it."""

    path: str
    size: int
    sha256: str | None
    blob: str | None


class _Again(Exception):
    """What may pass if it is tried again. wait_s: what the server asks for."""

    def __init__(self, why: str, wait_s: float | None = None):
        super().__init__(why)
        self.wait_s = wait_s


def fetch(source: dict[str, Any], folder: Path, limit_s: float = LIMIT_S) -> None:
    """Put the files that decoding needs of source["repo"] at source["revision"] into ``folder``.

    folder: empty, or as an earlier call left it. Honours HF_TOKEN, HF_HOME, HF_ENDPOINT and
    HF_HUB_OFFLINE. Raises UserError, saying what to do, when there is no access, no repository, no
    such revision, no network, no room, or more than limit_s seconds were needed.
    """
    from huggingface_hub import constants

    repo, revision = source["repo"], source["revision"]
    if not HEX40.fullmatch(revision):
        raise UserError(
            f"revision is {revision!r}; 40 hex digits are allowed, `moescope pin` finds them",
            where=repo,
        )
    download = _Download(repo, revision, folder, limit_s)
    if constants.is_offline_mode():
        if not download.is_whole() and not download.from_cache():
            raise UserError(
                f"HF_HUB_OFFLINE is set, and the cache has no complete {revision}; unset it, or"
                " point HF_HOME at a cache that has it",
                where=repo,
            )
    else:
        try:
            download.run()
        except _Unreachable as error:
            if not download.from_cache():
                raise UserError(str(error), where=repo) from None
    shutil.rmtree(folder / INCOMPLETE, ignore_errors=True)


class _Unreachable(Exception):
    """The Hub does not answer, however often it is asked."""


class _Download:
    def __init__(self, repo: str, revision: str, folder: Path, limit_s: float):
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers

        self.repo, self.revision, self.folder = repo, revision, folder
        self.parts = folder / INCOMPLETE
        self.limit_s, self.deadline = limit_s, time.monotonic() + limit_s
        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        self.headers = build_hf_headers(library_name="moescope")
        self.has_token = "authorization" in {name.lower() for name in self.headers}
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.received, self.said = 0, time.monotonic()

    def run(self) -> None:
        """List, then fetch the small files, then the weights that the index names."""
        listing = self._tried("its list of files", self._list)
        self.parts.mkdir(parents=True, exist_ok=True)
        self._write_listing(listing)
        small = [listing[path] for path in listing if _matches(path, WANTED)]
        if "config.json" not in listing:
            raise self._error("there is no config.json; name a repository with a model")
        self._all(small)
        weights = self._weights(listing)
        self._check_room(weights)
        self._all(weights)

    def is_whole(self) -> bool:
        """An earlier call got everything, and was ended before it could say so."""
        path = self.parts / LISTING
        if not path.is_file():
            return False
        listing = {
            entry["path"]: Entry(**entry) for entry in read_json(path, LISTING_SCHEMA)["files"]
        }
        small = [listing[name] for name in listing if _matches(name, WANTED)]
        if not all(self._has(entry) for entry in small):
            return False
        return all(self._has(entry) for entry in self._weights(listing))

    def from_cache(self) -> bool:
        """Take everything from the Hub's cache on this machine; False if that is not complete."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            snapshot = snapshot_download(
                self.repo,
                revision=self.revision,
                local_files_only=True,
                allow_patterns=[*WANTED, *WEIGHTS],
                ignore_patterns=["*/*"],
            )
        except LocalEntryNotFoundError:
            return False
        root = Path(snapshot)
        found = {path.name: path for path in root.iterdir() if path.is_file()}
        try:
            names = _weight_names(root, set(found))
        except UserError:
            return False
        if "config.json" not in found or not names or not names <= found.keys():
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, path in found.items():
            if name in names or _matches(name, WANTED):
                _link(path, self.folder / name)
        return True

    def _list(self) -> dict[str, Entry]:
        """The files at the top of the repository."""
        from huggingface_hub.utils import get_session

        address = f"{self.endpoint}/api/models/{self.repo}/tree/{self.revision}"
        found: dict[str, Entry] = {}
        while address:
            response = get_session().get(address, headers=self.headers, timeout=STALL_S)
            self._check_answer(response)
            for entry in response.json():
                if entry["type"] == "file":
                    large = entry.get("lfs")
                    found[entry["path"]] = Entry(
                        entry["path"],
                        large["size"] if large else entry["size"],
                        large["oid"] if large else None,
                        None if large else entry["oid"],
                    )
            address = response.links.get("next", {}).get("url")
        return found

    def _write_listing(self, listing: dict[str, Entry]) -> None:
        files = [asdict(entry) for entry in listing.values()]
        write_json(self.parts / LISTING, {"schema": LISTING_SCHEMA, "files": files})

    def _weights(self, listing: dict[str, Entry]) -> list[Entry]:
        names = _weight_names(self.folder, set(listing))
        missing = sorted(names - listing.keys())
        if missing:
            raise self._error(f"{INDEX} names {missing[0]}, which the repository does not have")
        if not names:
            raise self._error("there are no safetensors; other formats cannot be read")
        return [listing[name] for name in sorted(names)]

    def _check_room(self, entries: list[Entry]) -> None:
        needed = sum(entry.size for entry in entries if not self._has(entry))
        needed -= sum(part.stat().st_size for part in self.parts.glob("*.part"))
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise self._error(
                f"{needed / 1e9:.1f} GB are still to come and {free / 1e9:.1f} GB are free under"
                f" {self.folder.parent}; make room"
            )

    def _has(self, entry: Entry) -> bool:
        path = self.folder / entry.path
        return path.is_file() and path.stat().st_size == entry.size

    def _all(self, entries: list[Entry]) -> None:
        """Several at a time; the first error stops the others, and what they have stays."""
        with ThreadPoolExecutor(WORKERS) as pool:
            jobs = [pool.submit(self._one, entry) for entry in entries]
            try:
                for job in jobs:
                    job.result()
            except Exception:
                self._stop(pool)
                raise self._first_error(jobs) from None
            except BaseException:  # the user's interrupt
                self._stop(pool)
                raise

    def _stop(self, pool: ThreadPoolExecutor) -> None:
        self.stopped.set()
        pool.shutdown(cancel_futures=True)

    def _first_error(self, jobs: list) -> BaseException:
        """The error that stopped the others, not their being stopped."""
        errors = [error for job in jobs if not job.cancelled() and (error := job.exception())]
        return next((error for error in errors if not isinstance(error, _Stopped)), errors[0])

    def _one(self, entry: Entry) -> None:
        if self._has(entry):
            return
        part = self.parts / f"{entry.path}.{(entry.sha256 or entry.blob or '')[:16]}.part"
        if not part.exists() and self._take_cached(entry, part):
            return
        self._tried(entry.path, lambda: self._go_on(entry, part), lambda: _size(part))

    def _take_cached(self, entry: Entry, part: Path) -> bool:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.repo, entry.path, revision=self.revision)
        if not isinstance(cached, str):
            return False
        _link(Path(cached), part)
        if _size(part) == entry.size and _is(entry, part):
            os.replace(part, self.folder / entry.path)
            return True
        part.unlink()  # a link: the cache keeps its own, to which nothing may be appended
        return False

    def _go_on(self, entry: Entry, part: Path) -> None:
        """Download what is missing, check the whole, give it its name."""
        if _size(part) > entry.size:
            part.unlink()
        if _size(part) < entry.size or not part.exists():
            self._receive(entry, part)
        if _size(part) < entry.size:
            raise _Again("the connection ended early")
        if not _is(entry, part):
            part.unlink()
            raise _Again("what came has another hash than the Hub says")
        os.replace(part, self.folder / entry.path)

    def _receive(self, entry: Entry, part: Path) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import get_session

        address = hf_hub_url(self.repo, entry.path, revision=self.revision, endpoint=self.endpoint)
        start = _size(part)
        headers = {**self.headers, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", address, headers=headers, timeout=STALL_S) as response:
            if response.status_code == 416:
                part.unlink(missing_ok=True)
                raise _Again("the Hub has no such part of it")
            self._check_answer(response)
            self._check_commit(response)
            with open(part, "ab" if response.status_code == 206 else "wb") as file:
                for chunk in response.iter_raw():  # as it comes: a cut loses nothing
                    file.write(chunk)
                    self._arrived(len(chunk))
                    self._check_time()

    def _check_answer(self, response: Any) -> None:
        from huggingface_hub.utils import hf_raise_for_status

        if response.status_code in TRANSIENT:
            wait = response.headers.get("Retry-After", "")
            raise _Again(
                f"the Hub answers {response.status_code}", float(wait) if wait.isdigit() else None
            )
        if response.is_error:
            response.read()
        hf_raise_for_status(response)

    def _check_commit(self, response: Any) -> None:
        """The Hub says which commit it answers from."""
        for answer in (*response.history, response):
            commit = answer.headers.get("X-Repo-Commit")
            if commit and commit != self.revision:
                raise self._error(f"the Hub answers from {commit}, {self.revision} was asked for")

    def _arrived(self, size: int) -> None:
        with self.lock:
            self.received += size
            if time.monotonic() - self.said > SAY_S:
                self.said = time.monotonic()
                print(
                    f"{self.repo}: {self.received / 1e9:.2f} GB came", file=sys.stderr, flush=True
                )

    def _check_time(self) -> None:
        if self.stopped.is_set():
            raise _Stopped
        if time.monotonic() > self.deadline:
            raise self._error(
                f"not done after {self.limit_s / 3600:.1f} h; run it again, it goes on from here"
            )

    def _tried(
        self,
        what: str,
        call: Callable[[], Result],
        progress: Callable[[], int] = lambda: 0,
    ) -> Result:
        """Call until it works, TRIES times in a row without progress at most."""
        failures, wait_s = 0, BACKOFF_S
        while True:
            before = progress()
            try:
                return call()
            except Exception as error:
                again = self._judge(error)
            if progress() > before:
                failures, wait_s = 0, BACKOFF_S
            failures += 1
            if failures >= TRIES:
                raise _Unreachable(
                    f"{what}: {again}, {failures} times in a row; check the network (HF_ENDPOINT,"
                    " proxy) and run it again, it goes on from here"
                )
            pause = max(wait_s, again.wait_s or 0.0)
            if time.monotonic() + pause > self.deadline:
                raise self._error(f"{what}: {again}, and no time is left; run it again")
            if self.stopped.wait(pause):
                raise _Stopped
            wait_s = min(2 * wait_s, LONGEST_BACKOFF_S)

    def _judge(self, error: Exception) -> _Again:
        """What may pass, as _Again; raises UserError for what will not."""
        from huggingface_hub import errors as hub

        if isinstance(error, _Again):
            return error
        if isinstance(error, UserError | _Stopped):
            raise error
        page = f"{self.endpoint}/{self.repo}"
        log_in = "set HF_TOKEN, or log in with `hf auth login`"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, hub.RevisionNotFoundError):
            why = (
                f"the revision {self.revision} is not there (any more); look at {page}/commits and"
                " pin another one; no other revision is taken instead"
            )
        elif isinstance(error, hub.GatedRepoError) and self.has_token:
            why = f"the token's account has no access yet; accept the terms at {page}"
        elif isinstance(error, hub.GatedRepoError):
            why = f"it is gated and there is no token; accept the terms at {page} and {log_in}"
        elif isinstance(error, hub.DisabledRepoError):
            why = f"the Hub has disabled it; see {page}"
        elif status == 401 and self.has_token:
            why = "the Hub refuses the token; make a new one and put it into HF_TOKEN"
        elif status == 401:
            why = (
                "there is no token, and without one the Hub does not show it: it is private, or"
                f" does not exist; correct source.repo, or {log_in}"
            )
        elif status == 403:
            why = f"the token does not allow to read it; see its permissions, and {page}"
        elif isinstance(error, hub.RepositoryNotFoundError):
            why = "there is no such repository; correct source.repo"
        elif isinstance(error, hub.EntryNotFoundError):
            why = "a file that it lists is not there; pin another revision"
        elif status is not None:
            why = f"the Hub answers {status}; see {page}"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = f"there is no room left under {self.folder.parent}; make some and run it again"
        elif type(error).__name__ in ("LocalProtocolError", "UnicodeEncodeError"):
            why = "the token has characters that no header can hold; mend HF_TOKEN"
        elif isinstance(error, OSError) and error.filename is not None:
            raise error
        elif isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
            # By name: the library that huggingface_hub asks with is no dependency of ours.
            return _Again(f"no answer ({type(error).__name__})")
        elif isinstance(error, ValueError | KeyError | TypeError):
            return _Again("the answer makes no sense; is HF_ENDPOINT a Hub?")
        else:
            raise error
        raise self._error(why) from None

    def _error(self, message: str) -> UserError:
        return UserError(message, where=self.repo)


class _Stopped(Exception):
    """Another file failed."""


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a file at the top of a repository has one of these names."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


def _weight_names(folder: Path, names: set[str]) -> set[str]:
    """The shards that the index names; without an index, the files that look like weights."""
    if INDEX in names:
        try:
            named = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            raise UserError("no weight_map in it", where=INDEX) from None
        odd = sorted(name for name in named if not _matches(str(name), ("*.safetensors",)))
        if odd:
            raise UserError(f"it names {odd[0]!r}, which is no shard beside it", where=INDEX)
        return named
    for pattern in WEIGHTS:
        found = {name for name in names if _matches(name, (pattern,))}
        if found:
            return found
    return set()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is(entry: Entry, path: Path) -> bool:
    """Whether a whole file has the hash that the Hub says."""
    with open(path, "rb") as file:
        if entry.sha256:
            return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
        if not entry.blob:
            return True
        # Git's hash of a file's content, which is not meant to keep anybody out.
        found = hashlib.sha1(f"blob {entry.size}\0".encode(), usedforsecurity=False)
        for chunk in _chunks(file):
            found.update(chunk)
    return found.hexdigest() == entry.blob


def _chunks(file: Any) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _link(source: Path, target: Path) -> None:
    """Another name of the same bytes, or a copy where that cannot be."""
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        copy = target.with_name(f".{target.name}.copy")
        shutil.copyfile(source, copy)
        os.replace(copy, target)
