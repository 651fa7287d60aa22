"""Pins written into a study: branches become revisions, in place, comments and order kept.

What is pinned already is left alone; to move a pin, set it to null and pin again. A runtime from a
commit also gets the framework's pin that stands in its tree.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import write_text

HUB_LIMIT_S = 30.0
HEX40 = re.compile(r"[0-9a-f]{40}")

Resolve = Callable[[str, str], str]


def pin(root: Path, study_file: Path | None = None) -> list[str]:
    """Resolve what a study leaves open and write it into the file; returns a line for each pin.

    Raises UserError for what could not be resolved, after the rest has been written.
    """
    path = study_file or root / "config.yaml"
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise UserError("the study does not exist", where=str(path)) from None
    document = Document(text, path.name)
    lines: list[str] = []
    failed: list[str] = []
    for name in document.names("checkpoints"):
        try:
            lines += _checkpoint(document, name, hub_revision)
        except UserError as error:
            failed.append(f"{path.name}: checkpoints.{name}.source: {error}")
    for name in document.names("runtimes"):
        try:
            lines += _runtime(document, name, root / "work")
        except UserError as error:
            failed.append(f"{path.name}: runtimes.{name}: {error}")
    if document.edits:
        write_text(path, document.edited())
    if failed:
        raise UserError("\n".join([*lines, *failed]))
    return lines or [f"{path.name}: everything is pinned"]


def hub_revision(repo: str, branch: str) -> str:
    """The 40-hex revision that a branch of a Hub repository stands at. Raises UserError.

    Asks HF_ENDPOINT if that is set; a token is used as huggingface_hub finds it and never shown.
    """
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    try:
        found = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
            repo, revision=branch, timeout=HUB_LIMIT_S
        )
    except hub.GatedRepoError:
        raise UserError(
            f"{repo} is gated: accept its terms on the Hub, and log in (hf auth login)"
        ) from None
    except hub.RevisionNotFoundError:
        raise UserError(f"{repo} has no branch or tag {branch!r}") from None
    except hub.RepositoryNotFoundError:
        raise UserError(f"the Hub has no repository {repo}, or it is private: log in") from None
    except hub.OfflineModeIsEnabled:
        raise UserError("HF_HUB_OFFLINE is set; unset it to pin") from None
    except (hub.HfHubHTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the Hub does not answer for {repo}: {reason}; try again") from None
    except Exception as error:  # httpx raises its own kinds, which is no dependency of ours
        raise UserError(f"the Hub cannot be reached ({type(error).__name__}); try again") from None
    if not HEX40.fullmatch(found.sha or ""):
        raise UserError(f"the Hub says {found.sha!r} for {repo}@{branch}, which is no revision")
    return found.sha


def _checkpoint(document: "Document", name: str, resolve: Resolve) -> list[str]:
    if isinstance(document.find("checkpoints", name).value, str):
        return []  # a shared file, which is pinned already (load says so)
    source = document.at("checkpoints", name, "source")
    values = document.values(source)
    if values.get("kind") != "hub" or values.get("revision"):
        return []
    repo, branch = _text(values, "repo"), _text(values, "branch", "main")
    revision = resolve(repo, branch)
    document.put(source, "revision", revision, after="repo")
    return [f"checkpoints.{name}.source.revision: {branch} -> {revision}"]


def _runtime(document: "Document", name: str, work: Path) -> list[str]:
    node = document.at("runtimes", name)
    values = document.values(node)
    if values.get("kind") != "command":
        return []
    source = document.values(document.at("runtimes", name, "source"))
    if source.get("kind") != "git":
        return []
    from ..runtimes import git, spec

    lines = []
    url, commit = _text(source, "url", key="source.url"), source.get("commit")
    if not commit:
        if not source.get("ref"):
            raise UserError("source.ref: missing; give a branch, a tag or a commit's first digits")
        ref = _text(source, "ref", key="source.ref")
        commit = git.resolve(url, ref, work)
        document.put(document.at("runtimes", name, "source"), "commit", commit, after="url")
        lines.append(f"runtimes.{name}.source.commit: {ref} -> {commit}")
    try:
        runtime = spec.CommandRuntime.model_validate(
            {**values, "source": {**source, "commit": commit}}
        )
    except ValueError as error:
        raise UserError(spec.first(error)) from None
    framework = spec.resolve(runtime, f"runtimes.{name}").get("framework")
    if framework:
        value = git.framework_pin(git.fetch(url, work, commit), commit, framework)
        if framework.get("value") != value:
            below = document.find("runtimes", name, "framework")
            if below is None:
                document.put_mapping(node, "framework", "value", value, after="kind")
            else:
                document.put(below, "value", value)
            old = framework.get("value") or "not given"
            lines.append(f"runtimes.{name}.framework.value: {old} -> {value}")
    return lines


def _text(values: dict[str, Any], name: str, default: str = "", key: str = "") -> str:
    """A text of a mapping. Raises UserError for anything else: of a commit's first digits, which
    may be digits only, YAML makes another number (01234567 is 342391 in it)."""
    value = values.get(name)
    if value is None and not default:
        raise UserError(f"{key or name}: missing; it must be given")
    if value is not None and not isinstance(value, str):
        raise UserError(f"{key or name}: {value!r} is not a text; put it in quotes")
    return value or default


@dataclass(frozen=True)
class Edit:
    """Characters ``start`` to ``end`` become ``text``."""

    start: int
    end: int
    text: str


class Document:
    """A YAML text with the places of its values, so that single ones can be changed.

    Anchors and aliases are followed: a value that stands in an anchored mapping is changed there.
    """

    def __init__(self, text: str, where: str):
        import yaml

        self.text, self.where = text, where
        self.edits: list[Edit] = []
        try:
            self.root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            raise UserError(f"not YAML: {' '.join(str(error).split())}", where) from None
        if not isinstance(self.root, yaml.MappingNode):
            raise UserError("a study is a mapping with the key `study`", where)

    def names(self, key: str) -> list[str]:
        """The keys of a top-level mapping."""
        node = self.find(key)
        return [] if node is None else [name.value for name, _ in _pairs(node)]

    def find(self, *path: str) -> Any:
        """The node at a path, or None."""
        node = self.root
        for key in path:
            node = next((v for k, v in _pairs(node) if k.value == key), None)
            if node is None:
                return None
        return node

    def at(self, *path: str) -> Any:
        """The mapping at a path. Raises UserError if there is none."""
        import yaml

        node = self.find(*path)
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{'.'.join(path)}: a mapping is expected", self.where)
        return node

    def values(self, node: Any) -> dict[str, Any]:
        """A mapping as plain values, merged keys included."""
        import yaml

        loader = yaml.SafeLoader("")
        try:
            # The loader folds merge keys into the nodes it constructs; they must stay as written.
            return loader.construct_document(_copy(node))
        finally:
            loader.dispose()

    def put(self, node: Any, key: str, value: str, after: str | None = None) -> None:
        """Set a key of a mapping to a quoted string; a new key stands behind ``after``, if that is
        there, else behind the first key."""
        for name, old in _pairs(node):
            if name.value == key:
                if old.start_mark.index == old.end_mark.index:  # "key:" and nothing
                    self._edit(name.end_mark.index + 1, name.end_mark.index + 1, f' "{value}"')
                else:
                    self._edit(old.start_mark.index, old.end_mark.index, f'"{value}"')
                return
        self._insert(node, f'{key}: "{value}"', after)

    def put_mapping(self, node: Any, key: str, inner: str, value: str, after: str) -> None:
        """Add ``key: {inner: "value"}`` to a mapping that has no such key."""
        self._insert(node, f'{key}: {{{inner}: "{value}"}}', after)

    def _insert(self, node: Any, text: str, after: str | None) -> None:
        own = node.value
        name, value = next(((k, v) for k, v in own if k.value == after), own[0])
        if node.flow_style:
            end = self._end(name, value)
            self._edit(end, end, f", {text}")
            return
        indent = " " * name.start_mark.column
        end = self._end(name, value)
        newline = self.text.find("\n", end)
        place = len(self.text) if newline < 0 else newline
        self._edit(place, place, f"\n{indent}{text}")

    def _end(self, name: Any, value: Any) -> int:
        """Where a value's own text ends; an alias's node stands elsewhere."""
        if value.start_mark.index < name.end_mark.index or "*" in self._between(name, value):
            line = self.text.find("\n", name.end_mark.index)
            return len(self.text) if line < 0 else line
        return value.end_mark.index

    def _between(self, name: Any, value: Any) -> str:
        return self.text[name.end_mark.index : value.start_mark.index]

    def _edit(self, start: int, end: int, text: str) -> None:
        edit = Edit(start, end, text)
        if edit not in self.edits:  # two checkpoints may share an anchored source
            self.edits.append(edit)

    def edited(self) -> str:
        """The text with all edits."""
        text = self.text
        # Of several insertions at one place the first comes first.
        order = sorted(enumerate(self.edits), key=lambda item: (item[1].start, item[0]))
        for _, edit in reversed(order):
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text


def _pairs(node: Any) -> list[tuple[Any, Any]]:
    """A mapping's own pairs, then those of the mappings it merges ("<<")."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return []
    own = [(k, v) for k, v in node.value if k.tag != "tag:yaml.org,2002:merge"]
    merged = []
    for key, value in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            merged += [pair for part in parts for pair in _pairs(part)]
    known = {key.value for key, _ in own}
    return own + [pair for pair in merged if pair[0].value not in known]


def _copy(node: Any) -> Any:
    import yaml

    if isinstance(node, yaml.MappingNode):
        pairs = [(_copy(k), _copy(v)) for k, v in node.value]
        return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)
    if isinstance(node, yaml.SequenceNode):
        items = [_copy(item) for item in node.value]
        return yaml.SequenceNode(node.tag, items, node.start_mark, node.end_mark)
    return yaml.ScalarNode(node.tag, node.value, node.start_mark, node.end_mark)
