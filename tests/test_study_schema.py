"""A bad study ends with one line: the key, what stands there, what is allowed."""

import copy
import subprocess
import sys

import pytest

from moescope.errors import UserError
from moescope.study import patches, session
from moescope.study.load import load, read_yaml
from moescope.study.schema import Machine

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def config(root):
    return copy.deepcopy(read_yaml(root / "config.yaml"))


def complaint(config, root) -> str:
    with pytest.raises(UserError) as error:
        load(config, "config.yaml", root)
    return str(error.value)


def hub(revision):
    return {"role": "subject", "source": {"kind": "hub", "repo": "a/b", "revision": revision}}


def test_the_embedded_study_is_valid(config, root):
    study = load(config, "config.yaml", root)
    assert study.reference == "vlm"
    assert "lm" not in study.arms_on("deepseek-v4")
    assert "lm" in study.arms_on("qwen3-moe")


def test_a_pinned_revision_is_accepted(config, root):
    config["checkpoints"]["deepseek-v4"] = hub(REVISION)
    assert load(config, "config.yaml", root).checkpoints["deepseek-v4"].source.kind == "hub"


@pytest.mark.parametrize("revision", ["main", REVISION[:39], REVISION.upper(), REVISION + "0"])
def test_a_revision_is_forty_hex_digits(config, root, revision):
    config["checkpoints"]["deepseek-v4"] = hub(revision)
    text = complaint(config, root)
    assert text.startswith("config.yaml: checkpoints.deepseek-v4.source.revision: ")
    assert revision in text and "40 hex digits" in text


def test_digits_that_yaml_reads_as_a_number_need_quotes(config, root):
    config["checkpoints"]["deepseek-v4"] = hub(1234567890)
    assert "put it in quotes" in complaint(config, root)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("arms", {}, "has no entry; give 1 or more"),
        ("checkpoints", {}, "has no entry; give 1 or more"),
        ("runtimes", {}, "has no entry; give 1 or more"),
        ("crossover", {"over": "experts", "arms": []}, "has no entry; give 1 or more"),
        ("crossover", {"over": "experts", "checkpoints": ["a"]}, "has 1 entry; give 2 or more"),
    ],
)
def test_what_is_too_short_says_how_much_is_asked(config, root, key, value, said):
    config[key] = value
    part = f".{list(value)[-1]}" if value else ""
    assert f"config.yaml: {key}{part}: {said}" in complaint(config, root).splitlines()


@pytest.mark.parametrize(
    ("path", "key"),
    [((), "shap"), (("shape",), "promt"), (("arms", "lm"), "rolle"), (("guard",), "idle")],
)
def test_an_unknown_key_is_named_with_what_is_allowed(config, root, path, key):
    place = config
    for name in path:
        place = place[name]
    place[key] = 1
    text = complaint(config, root)
    assert f"unknown key {key}" in text and "allowed: " in text
    assert ".".join(path) in text


def test_an_arm_without_its_runtime(config, root):
    config["arms"]["lm"]["runtime"] = "mlx-ml"
    text = complaint(config, root)
    assert "arms.lm.runtime: 'mlx-ml'" in text and "mlx-vlm, mlx-lm" in text


def test_two_references(config, root):
    config["arms"]["lm"] = {"runtime": "mlx-lm", "role": "reference"}
    assert "exactly one arm has the role reference; found vlm, lm" in complaint(config, root)


def test_no_null_arm(config, root):
    del config["arms"]["vlm-null"]
    assert "exactly one arm has the role null" in complaint(config, root)


def test_a_null_arm_that_is_not_the_reference(config, root):
    config["arms"]["vlm-null"]["env"] = {"MLX_DISABLE_COMPILE": "1"}
    assert "arms.vlm-null: the null arm must have" in complaint(config, root)


@pytest.mark.parametrize("role", ["candidate", "intervention"])
def test_the_reference_again_is_no_other_arm(config, root, role):
    config["arms"]["again"] = config["arms"]["vlm-null"] | {"role": role}
    assert "arms.again: has the reference's runtime, env and patches" in complaint(config, root)


def test_a_patch_twice_is_no_patch_more(config, root):
    config["arms"]["skip-experts"]["patches"] = ["top_k=1", "top_k=2"]
    assert "arms.skip-experts.patches: 'top_k' is given twice" in complaint(config, root)


def test_a_claim_of_no_checkpoint_is_none(config, root):
    for checkpoint in config["checkpoints"].values():
        checkpoint["role"] = "control"
    assert "no checkpoint has the role subject" in complaint(config, root)


def test_an_unquoted_null_is_the_null_role(config, root):
    config["arms"]["vlm-null"]["role"] = None
    assert load(config, "config.yaml", root).role("null") == ["vlm-null"]


def test_a_claim_over_a_quantity_that_does_not_exist(config, root):
    config["claims"][0]["all"][0]["quantity"] = "share.gather"
    text = complaint(config, root)
    assert "'share.gather' is no quantity of this study; allowed after 'share.': router, " in text
    assert "gather-dominates" in text


def test_a_claim_over_an_arm_that_does_not_exist(config, root):
    config["claims"][0]["all"][1]["quantity"] = "saved.skip-everything"
    assert "'saved.skip-everything' is no quantity" in complaint(config, root)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        (
            "checkpoints",
            ["deepseek-v5"],
            "'deepseek-v5' is no checkpoint of this study; allowed: ",
        ),
        ("checkpoints", [], "checkpoints: the list is empty; name a checkpoint, or leave the key"),
        ("checkpoints", ["qwen3-moe"] * 2, "checkpoints: 'qwen3-moe' is given twice"),
        ("arm", "fused", "arm: 'fused' is no arm of this study; allowed: vlm, "),
    ],
)
@pytest.mark.parametrize("what", ["claims", "answers"])
def test_a_claim_or_answer_on_what_does_not_exist(config, root, what, key, value, says):
    config.setdefault("answers", [{"asks": "how busy?", "by": ["busy"]}])
    config[what][0][key] = value
    text = complaint(config, root)
    assert says in text and text.startswith(f"config.yaml: {what}.0")


@pytest.mark.parametrize(
    ("value", "says"),
    [([], "the list is empty"), (["qwen3-moe"] * 2, "'qwen3-moe' is given twice")],
)
def test_an_arm_s_checkpoints_are_named_once(config, root, value, says):
    config["arms"]["lm"]["checkpoints"] = value
    assert f"arms.lm.checkpoints: {says}" in complaint(config, root)


def test_a_gain_is_a_candidate_s(config, root):
    config["claims"][0]["all"][0]["quantity"] = "gain.vlm"
    assert "allowed after 'gain.': lm" in complaint(config, root)


def test_an_answer_names_the_claims_that_there_are(config, root):
    config["answers"] = [{"asks": "is it?", "claims": ["none-such"]}]
    assert "'none-such' is no claim of this study; allowed: gather-dominates" in complaint(
        config, root
    )


def test_an_environment_without_its_lock_file(config, root):
    config["runtimes"]["mlx-lm"]["env"] = "mlx-lm-9.9.9"
    text = complaint(config, root)
    assert "no file envs/mlx-lm-9.9.9.txt; allowed: " in text and "mlx-lm-0.32.2" in text


def test_a_checkpoint_may_stand_in_a_file_that_studies_share(config, root, tmp_path):
    import yaml

    (tmp_path / "envs").symlink_to(root / "envs")
    whole = load(config, "config.yaml", root)
    inline = config["checkpoints"]["deepseek-v4"]
    (tmp_path / "v4.yaml").write_text(yaml.safe_dump(inline))
    config["checkpoints"]["deepseek-v4"] = "v4.yaml"
    assert load(config, "config.yaml", tmp_path) == whole


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("gone.yaml", None, "is no file"),
        ("../outside.yaml", "role: subject", "is outside the repository"),
        ("list.yaml", "- 1", "not a mapping"),
        ("open.yaml", "source: {kind: hub, repo: a/b}", "has no revision"),
        ("typo.yaml", "rolle: subject", "rolle"),
    ],
)
def test_a_shared_checkpoint_that_cannot_be_read(config, root, tmp_path, file, text, said):
    here = tmp_path / "here"
    here.mkdir()
    (here / "envs").symlink_to(root / "envs")
    if text is not None:
        (here / file).write_text(text)
    config["checkpoints"]["deepseek-v4"] = file
    assert said in complaint(config, here)


def test_all_that_is_wrong_is_said_at_once(config, root):
    config["shape"]["prompt"] = "many"
    config["rounds"]["count"] = 1
    text = complaint(config, root)
    assert "shape.prompt" in text and "rounds.count" in text


def test_a_study_that_is_no_yaml(tmp_path):
    (tmp_path / "s.yaml").write_text("study: [")
    with pytest.raises(UserError, match=r"s\.yaml: not YAML"):
        read_yaml(tmp_path / "s.yaml")


def test_a_key_that_stands_twice_is_not_silently_the_last(tmp_path):
    """Who appends a page's example to a study has `runtimes:` twice."""
    path = tmp_path / "s.yaml"
    path.write_text("arms:\n  a: {role: reference}\nshape: {prompt: 1}\narms:\n  b: {}\n")
    with pytest.raises(UserError, match=r"s\.yaml: arms: stands twice, in lines 1 and 4; put"):
        read_yaml(path)
    path.write_text("arms:\n  a: {env: {X: 1, X: 2}}\n")
    with pytest.raises(UserError, match="X: stands twice, in lines 2 and 2"):
        read_yaml(path)
    path.write_text("base: &b {x: 1, y: 2}\nc: &c {<<: *b, x: 3}\nd: {<<: *c, x: 4}\ne: *c\n")
    assert read_yaml(path)["d"] == {"x": 4, "y": 2}


def test_a_snakemake_run_refuses_a_key_that_stands_twice(root, tmp_path):
    study = tmp_path / "twice.yaml"
    study.write_text((root / "config.yaml").read_text() + "\nclaims: []\n")
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "record", "--configfile", str(study)],
        cwd=root, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "claims: stands twice" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("of", "quantity"), [("gpu", "share.router"), ("gpu", "ratio.lm"), ("wall", "gpu_share.router")]
)
def test_a_claim_stands_on_the_time_that_it_speaks_of(config, root, of, quantity):
    config["claims"][0] |= {"of": of, "all": [{"quantity": quantity, "is": ">", "than": 0}]}
    assert f"{quantity} speaks of" in complaint(config, root)


def test_pinned_rounds_leave_no_word_unless_asked_and_need_linux(config, root, monkeypatch):
    assert "pinned" not in load(config, "config.yaml", root).rounds.model_dump(mode="json")
    config["rounds"]["pinned"] = True
    assert load(config, "config.yaml", root).rounds.model_dump(mode="json")["pinned"] is True
    metal = Machine(name="m3", backend="metal")
    monkeypatch.setattr(session, "detect", lambda: metal)  # nothing has run then
    with pytest.raises(UserError, match=r"rounds\.pinned: macOS does not bind a process"):
        session.open_plan(config, "config.yaml", root)


def test_whole_runs_leave_no_word_and_slices_have_a_limit(config, root):
    plain = load(config, "config.yaml", root)
    assert "slices" not in plain.rounds.model_dump(mode="json")
    config["rounds"]["slices"] = 1
    assert load(config, "config.yaml", root).rounds.model_dump() == plain.rounds.model_dump()
    config["shape"]["generate"] = 25
    config["rounds"]["slices"] = 12
    assert load(config, "config.yaml", root).rounds.model_dump()["slices"] == 12
    config["rounds"]["slices"] = 13
    assert "rounds.slices: 13 slices of 24 tokens" in complaint(config, root)
    assert "12 are the most" in complaint(config, root)


@pytest.mark.parametrize(
    ("patch", "allowed"),
    [
        ("skip_expert", "skip_experts, skip_router, "),
        ("delay_norm=3ms", "delay_router=Nms"),
        ("top_k", "it is top_k=N"),
        ("top_k=two", "it is top_k=N"),
        ("skip_experts=1", "it is skip_experts"),
        ("delay_step=3", "it is delay_step=Nms"),
    ],
)
def test_a_patch_that_the_worker_would_refuse_is_refused_before(config, root, patch, allowed):
    config["arms"]["skip-experts"]["patches"] = [patch]
    text = complaint(config, root)
    assert text.startswith(f"config.yaml: arms.skip-experts.patches: {patch!r} is n")
    assert allowed in text and "\n" not in text


def test_patches_of_every_kind_are_accepted(config, root):
    patches = ["split_gather=4", "top_k=2", "fused", "delay_step=0.5ms", "spin_attention=30us"]
    config["arms"]["skip-experts"]["patches"] = patches
    assert load(config, "config.yaml", root).arms["skip-experts"].patches == patches


@pytest.mark.parametrize(
    "patch", ["skip_router", "top_k=2", "delay_router=1ms", "spin_expert_gather=9us"]
)
def test_a_change_inside_a_fused_block_is_refused(config, root, patch):
    """The kernels would pass it over, and the arm would be taken for what it is not."""
    config["arms"]["skip-experts"]["patches"] = ["fused", patch]
    assert f"arms.skip-experts.patches: {patch!r} after 'fused' changes nothing" in complaint(
        config, root
    )
    assert set(patches.INSIDE) < set(patches.known())


def test_a_command_has_no_patches(config, root):
    source = {"kind": "python", "package": "mlx-lm", "env": "mlx-lm-0.32.2"}
    config["runtimes"]["tool"] = {
        "kind": "command",
        "preset": "mlx_lm.benchmark",
        "source": source,
    }
    config["arms"]["tool"] = {"runtime": "tool", "role": "intervention", "patches": ["skip_moe"]}
    assert "arms.tool.patches: tool is a command" in complaint(config, root)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("path", "key"),
    [
        (("guard",), "idle_s"),
        (("claims", 0, "all", 0), "than"),
        (("checkpoints", "qwen3-moe", "source", "config"), "rope_theta"),
    ],
)
def test_numbers_are_finite(config, root, path, key, value):
    place = config
    for part in path:
        place = place[part]
    place[key] = value
    text = complaint(config, root)
    assert f"{key}: {value} is not allowed; it must be a finite number" in text


@pytest.mark.parametrize("experts", [3, {"qwen3-moe": 3}, [3]])
def test_experts_of_another_type_are_one_line(config, root, experts):
    config["arms"]["vlm"]["experts"] = experts
    text = complaint(config, root)
    assert text.startswith("config.yaml: arms.vlm.experts: must be a pattern") and "\n" not in text


@pytest.mark.parametrize("key", ["rounds", "machine", "arms"])
def test_a_list_for_a_mapping_is_said_in_words(config, root, key):
    config[key] = ["qwen3-moe"]
    assert complaint(config, root) == (
        f"config.yaml: {key}: list is not allowed; it must be a mapping of keys to values"
    )


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000])
def test_a_name_that_no_file_can_have_is_no_file(config, root, name):
    config["checkpoints"]["qwen3-moe"] = name
    assert "is no file; give a path" in complaint(config, root)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"\xff\xfea\0", "not a text in UTF-8"), (b"a: &a\n  b: *a\n", "nested too deep")],
)
def test_a_file_that_is_no_study_is_one_line(tmp_path, content, says):
    path = tmp_path / "study.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        read_yaml(path)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


@pytest.fixture
def swept(config):
    """The embedded study with a crossover; its candidate is lm."""
    on = ["qwen3-moe", "qwen3-dense"]  # that it knows
    config["crossover"] = {"over": "expert_width", "arms": ["lm"], "checkpoints": on}
    return config


def test_a_crossover_of_candidates_is_valid(swept, root):
    assert load(swept, "config.yaml", root).crossover.over == "expert_width"
    del swept["crossover"]["arms"]
    assert load(swept, "config.yaml", root).crossover.arms is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"over": "width"}, "crossover.over: 'width' is not allowed; allowed: 'expert_width'"),
        ({"arms": ["skip-experts"]}, "crossover.arms: 'skip-experts' is no candidate"),
        ({"arms": ["lmm"]}, "crossover.arms: 'lmm' is no candidate of this study; allowed: lm"),
        ({"arms": []}, "crossover.arms: "),
        ({"arm": "lm"}, "unknown key arm; allowed: over, arms, checkpoints"),
        ({"checkpoints": ["qwen3-moe"]}, "crossover.checkpoints: "),
        ({"checkpoints": ["qwen3-moe"] * 2}, "crossover.checkpoints: 'qwen3-moe' is given twice"),
        ({"checkpoints": ["qwen3-moe", "w1"]}, "crossover.checkpoints: 'w1' is no checkpoint"),
        ({"arms": ["lm", "lm"]}, "crossover.arms: 'lm' is given twice"),
        (
            {"checkpoints": ["qwen3-moe", "deepseek-v4"]},
            "crossover: lm is measured on fewer than two of its checkpoints",
        ),
    ],
)
def test_mistakes_in_a_crossover(swept, root, change, says):
    swept["crossover"] |= change
    text = complaint(swept, root)
    assert text.startswith("config.yaml: crossover") and says in text
    assert "\n" not in text


def test_a_crossover_needs_its_property_and_a_candidate(swept, root):
    del swept["arms"]["lm"], swept["crossover"]["arms"]
    assert "the study has no arm with the role candidate" in complaint(swept, root)
    swept["crossover"] = {}
    assert "crossover.over: missing" in complaint(swept, root)
