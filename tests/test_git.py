"""Runtimes from commits: mirrors, trees of one's own, builds, pins, refused binaries."""

import os
import shutil
from pathlib import Path

import pytest

import toy_runtime as toy
from moescope.errors import UserError
from moescope.files import sha256_file, write_json
from moescope.runtimes import binary, git, spec
from moescope.task import INGREDIENTS, Task

pytestmark = pytest.mark.skipif(
    not (shutil.which("git") and shutil.which("make") and shutil.which("cc")),
    reason="needs git, make and a C compiler",
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """(folder, commits): a first commit, one that changes the source, one that moves the pin."""
    folder = tmp_path_factory.mktemp("upstream") / "toy"
    first = toy.write(folder, message="first")
    second = toy.write(folder, factor=2, message="slower")
    third = toy.write(folder, factor=2, pin=toy.OTHER_PIN, message="move the pin")
    return folder, [first, second, third]


def task(runtime, tmp_path, out="out"):
    (tmp_path / out).mkdir(exist_ok=True)
    return Task("build", "toy", "k" * 12, {"runtime": runtime}, {}, tmp_path / out,
                tmp_path / "work", tmp_path)  # fmt: skip


def built(runtime, tmp_path, out="out"):
    """Run the build stage; returns the manifest's folder as the other stages see it."""
    job = task(runtime, tmp_path, out)
    binary.build(job)
    write_json(
        job.out / "ingredients.json",
        {"schema": INGREDIENTS, "key": job.key, "params": job.params, "upstream": {}, "code": {}},
    )
    return job.out


def test_a_commit_is_built_once_and_its_binary_found_again(repository, tmp_path):
    url, (first, *_) = repository
    runtime = toy.runtime(url, first)
    manifest = spec_manifest(built(runtime, tmp_path))
    folder = binary.build_folder(runtime, tmp_path / "work")
    assert manifest["schema"] == "moescope/binary/1"
    assert manifest["commit"] == first
    assert manifest["framework"] == {"name": "mlx", "value": toy.PIN}
    found = folder / "tree" / "bin" / "bench"
    assert manifest["binaries"]["bench"]["sha256"] == sha256_file(found)
    assert [t["version"] is None for t in manifest["toolchain"]] == [False, True]
    assert manifest["toolchain"][0]["version"].startswith("GNU Make")
    assert "--prompt-tokens" in manifest["flags"]
    assert manifest["lacking"] == [
        {"flags": ["--ignore-eos"], "so": "the end of sequence ends a run early"}
    ]
    assert "$ make FEATURES=cuda,fast bin/bench" in (folder / "build.log").read_text()
    when = found.stat().st_mtime_ns
    tool = binary.ensure(tmp_path / "out", tmp_path / "work", tmp_path)
    assert tool.words["binary.bench"] == str(found.resolve())
    assert tool.sha256 == manifest["binaries"]["bench"]["sha256"]
    assert found.stat().st_mtime_ns == when, "it was built a second time"


def spec_manifest(out: Path):
    from moescope.files import read_json

    return read_json(out / "manifest.json", "moescope/binary/1")


def test_a_missing_build_is_made_again(repository, tmp_path):
    url, (first, *_) = repository
    out = built(toy.runtime(url, first), tmp_path)
    shutil.rmtree(tmp_path / "work")
    tool = binary.ensure(out, tmp_path / "work", tmp_path)
    assert Path(tool.words["binary.bench"]).is_file()


def test_a_binary_swapped_by_hand_is_refused(repository, tmp_path):
    url, (first, *_) = repository
    runtime = toy.runtime(url, first)
    out = built(runtime, tmp_path)
    path = binary.build_folder(runtime, tmp_path / "work") / "tree" / "bin" / "bench"
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match="not the binary that was built here"):
        binary.ensure(out, tmp_path / "work", tmp_path)
    with pytest.raises(UserError, match="not the binary that was built here"):
        binary.build(task(runtime, tmp_path))


def test_the_pin_tells_two_commits_apart_without_a_checkout(repository, tmp_path):
    url, commits = repository
    mirror = git.fetch(str(url), tmp_path, commits[2])
    pins = [git.framework_pin(mirror, commit, toy.FRAMEWORK) for commit in commits]
    assert pins == [toy.PIN, toy.PIN, toy.OTHER_PIN]
    assert not list(tmp_path.rglob("CMakeLists.txt"))


def test_a_pin_that_the_study_gets_wrong_is_refused_before_the_build(repository, tmp_path):
    url, (*_, third) = repository
    runtime = toy.runtime(url, third, framework={"value": toy.PIN})
    with pytest.raises(UserError, match=r"framework\.value: the study says mlx b7c3dd6d") as error:
        binary.build(task(runtime, tmp_path))
    assert toy.OTHER_PIN in str(error.value)
    assert not (binary.build_folder(runtime, tmp_path / "work") / "built.json").exists()


@pytest.mark.parametrize(
    ("framework", "complaint"),
    [
        ({"file": "no/such.txt"}, "has no file no/such.txt"),
        ({"pattern": r"GIT_TAGS ([0-9a-f]{40})"}, "finds nothing in"),
        ({"pattern": r"([a-z]+)"}, "different pins"),
    ],
)
def test_a_pin_that_cannot_be_read_says_why(repository, tmp_path, framework, complaint):
    url, (first, *_) = repository
    mirror = git.fetch(str(url), tmp_path, first)
    with pytest.raises(UserError, match=complaint):
        git.framework_pin(mirror, first, {**toy.FRAMEWORK, **framework})


def test_refs_are_resolved_and_unknown_ones_refused(repository, tmp_path):
    url, (first, _, third) = repository
    assert git.resolve(str(url), "main", tmp_path) == third
    assert git.resolve(str(url), first[:8], tmp_path) == first
    with pytest.raises(UserError, match="no branch, tag or commit 'nothing'"):
        git.resolve(str(url), "nothing", tmp_path)
    with pytest.raises(UserError, match="has no commit"):
        git.fetch(str(url), tmp_path, "0" * 40)


def test_the_users_clone_is_only_read(repository, tmp_path):
    url, (first, *_) = repository
    clone = tmp_path / "clone"
    toy.git(tmp_path, "clone", "--quiet", str(url), str(clone))
    (clone / "bench.c").write_text("my unfinished work\n")
    before = {p: p.read_bytes() for p in sorted(clone.rglob("*")) if p.is_file()}
    built(toy.runtime(clone, first), tmp_path)
    after = {p: p.read_bytes() for p in sorted(clone.rglob("*")) if p.is_file()}
    assert after == before
    assert toy.git(clone, "worktree", "list").count("\n") == 1


def test_the_callers_repository_and_compiler_flags_do_not_leak_in(
    repository, tmp_path, monkeypatch
):
    url, (first, *_) = repository
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    monkeypatch.setenv("MAKEFLAGS", "--question")
    monkeypatch.setenv("CFLAGS", "-DNO")
    monkeypatch.setenv("MLX_METAL_DEBUG", "1")
    built(toy.runtime(url, first), tmp_path)
    assert not [name for name in binary._variables(tmp_path, "x") if name.startswith("MLX_M")]


def test_submodules_are_checked_out_and_recorded(tmp_path):
    part, whole = tmp_path / "part", tmp_path / "whole"
    inner = toy.write(part, message="a part")
    toy.write(whole, message="whole")
    toy.git(whole, "submodule", "--quiet", "add", str(part), "third_party/part")
    toy.git(whole, "commit", "--quiet", "-m", "with a part")
    commit = toy.git(whole, "rev-parse", "HEAD").strip()
    manifest = spec_manifest(built(toy.runtime(whole, commit), tmp_path))
    assert manifest["submodules"] == [{"path": "third_party/part", "commit": inner}]


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        ({"commands": ["make nothing-of-the-kind"]}, "ended with 2: .*No rule to make target"),
        ({"commands": ["sleep 30"], "timeout_s": 0.3}, "did not end within 0.3 s"),
        ({"commands": ["no-such-command"]}, "no-such-command: No such file"),
        ({"binaries": {"bench": "bin/other"}}, "made no file bin/other"),
        ({"commands": ["make bin/bench", "sh -c 'echo dirt >> README'"]}, "changes files of the"),
    ],
)
def test_a_failed_build_says_what_to_do_and_leaves_no_result(
    repository, tmp_path, build, complaint
):
    url, (first, *_) = repository
    runtime = toy.runtime(url, first, build=build)
    with pytest.raises(UserError, match=complaint) as error:
        binary.build(task(runtime, tmp_path))
    assert str(tmp_path) not in str(error.value)
    folder = binary.build_folder(runtime, tmp_path / "work")
    assert not (folder / "built.json").exists()
    assert (folder / "build.log").read_text().startswith("$ ")


def test_a_flag_that_is_gone_is_an_error_of_the_build(tmp_path):
    url = tmp_path / "toy"
    commit = toy.write(url, flag="--tokens")
    with pytest.raises(
        UserError, match="does not know --max-tokens at this pin; it knows"
    ) as error:
        binary.build(task(toy.runtime(url, commit), tmp_path))
    assert "--prompt-tokens, --tokens" in str(error.value)
    assert not list((tmp_path / "out").iterdir())


def test_an_unpinned_source_says_to_pin(repository, tmp_path):
    url, (first, *_) = repository
    runtime = toy.runtime(url, first)
    runtime["source"] = {"kind": "git", "url": str(url), "ref": "main", "submodules": True}
    with pytest.raises(UserError, match=r"source\.commit: not pinned \(ref 'main'\)"):
        binary.build(task(runtime, tmp_path))


def test_the_build_depends_on_commit_and_recipe_only(repository, tmp_path):
    url, (first, second, _) = repository
    one = toy.runtime(url, first)
    reader = toy.runtime(url, first, invoke={**toy.INVOKE, "denominator": "other words"})
    features = toy.runtime(url, first, build={"features": ["metal"]})
    folders = [binary.build_folder(r, tmp_path) for r in
               (one, reader, features, toy.runtime(url, second))]  # fmt: skip
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3
    assert folders[0].name.startswith(f"toy-{first[:12]}-")


def test_presets_resolve_to_json_and_say_what_is_missing():
    runtime = spec.CommandRuntime.model_validate(
        {
            "kind": "command",
            "preset": "mlxcel",
            "source": {"kind": "git", "url": "https://example.invalid/m", "ref": "main"},
            "build": {"features": ["cuda"]},
        }
    )
    resolved = spec.resolve(runtime, "runtimes.m")
    assert resolved["build"]["features"] == ["cuda"]
    assert resolved["build"]["binaries"]["bench"].endswith("mlxcel-bench-decode")
    assert spec.unpinned(resolved) == ["source.commit", "framework.value"]
    with pytest.raises(UserError, match=r"runtimes\.m\.options: wormup: the preset has no such"):
        spec.resolve(runtime.model_copy(update={"options": {"wormup": "1"}}), "runtimes.m")
    with pytest.raises(UserError, match=r"runtimes\.m\.preset: 'mlxcell' is no preset; allowed:"):
        spec.resolve(runtime.model_copy(update={"preset": "mlxcell"}), "runtimes.m")
    with pytest.raises(UserError, match=r"runtimes\.m\.build\.binaries: .*binary\.bench"):
        spec.resolve(
            runtime.model_copy(update={"build": {"binaries": {"other": "x"}}}), "runtimes.m"
        )


def test_the_mlxcel_presets_find_the_pin_of_a_cmake_list():
    import re

    for name in ("mlxcel", "mlxcel-generate"):
        pattern = spec.preset(name).framework["pattern"]
        text = toy.CMAKE.format(pin=toy.PIN).replace("example.invalid", "github.com")
        assert re.findall(pattern, text) == [toy.PIN]


def test_urls_with_passwords_are_refused():
    with pytest.raises(ValueError, match="no password"):
        spec.GitSource(kind="git", url="https://me:secret@example.invalid/x")
