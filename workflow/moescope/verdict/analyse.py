"""The analyse stage: from committed results to figures, decisions and verdicts. Needs no GPU.

``analysis.json`` holds, for each checkpoint and arm, every figure that the record prints, with the
files and runs behind it. It depends on the upstream files alone: no clock, no host, no order of
a set.
"""

from typing import Any

from ..errors import UserError
from ..measure.failed import told
from ..task import Task, ingredients
from . import answers, attempts, attribution, claims, compact, lengthening, missing, path, rule
from . import arms as of_arms
from .bound import bound
from .ceiling import bandwidths, ceiling
from .crossover import crossover
from .detection import detection
from .dispatch import dispatch
from .fused import Fused, fused
from .kernels import kernels as of_kernels
from .results import Found, Results
from .statistics import Figure, adopt, figure

SCHEMA = "moescope/analysis/1"
FUSED = {"fused", "fused_reference"}  # patches that leave the bytes of a token as they are


def run(task: Task) -> None:
    """Write analysis.json.

    Raises UserError if no checkpoint has a valid run, or if a runs.jsonl is not what its trailer
    says.
    """
    analysis = analyse(Results(task), task.params)
    compact.write(task.out / "analysis.json", analysis)
    verdicts = ", ".join(f"{claim['name']}: {claim['verdict']}" for claim in analysis["claims"])
    task.say(f"analysed {len(analysis['checkpoints'])} checkpoints; {verdicts or 'no claims'}")


def analyse(results: Results, params: dict[str, Any]) -> dict[str, Any]:
    (reference,) = (name for name, arm in params["arms"].items() if arm["role"] == "reference")
    checkpoints = {
        name: Checkpoint(results, params, name).analysed() for name in params["checkpoints"]
    }
    if not any(entry["runs"]["valid"] for entry in checkpoints.values()):
        raise UserError(
            "no checkpoint has a valid run, so there is nothing to report; see the reasons in "
            "results/measure/*/*/runs.jsonl and measure again",
            where=f"analyse/{params['study']['name']}",
        )
    analysis = {
        "schema": SCHEMA,
        "study": params["study"],
        "machine": params["machine"],
        "shape": params["shape"],
        "rounds": params["rounds"],
        "limits": params["limits"],
        "rule": rule.IN_WORDS,
        "reference": reference,
        "checkpoints": checkpoints,
        "comparability": missing.comparability(checkpoints),
    }
    analysis["claims"] = claims.judge(params["claims"], analysis)
    analysis["answers"] = answers.answer(params.get("answers", []), analysis)
    analysis["crossover"] = crossover(params.get("crossover"), analysis, results)
    analysis["not_measured"] = missing.not_measured(analysis, params)
    return analysis


class Checkpoint:
    """One checkpoint's part of the analysis."""

    def __init__(self, results: Results, params: dict[str, Any], name: str):
        self.results, self.params, self.name = results, params, name
        self.arms: dict[str, Any] = params["arms"]
        runs = results.runs(name)
        self.runs = runs if runs is not None else Found([], "")
        self.parity = results.json("parity", name, "parity.json", "moescope/parity/1")
        self.architecture = results.json(
            "inspect", name, "architecture.json", "moescope/architecture/1"
        )
        self.host = results.json("measure", name, "environment.json", "moescope/host/1")
        # Runs that an arm finished before it failed stay in the file; no figure stands on them.
        self.failed: dict[str, Any] = (self.host.value if self.host else {}).get("failed", {})
        self.absent = {arm: self._absent(arm) for arm in self.arms}
        self.void = {arm: self._void(arm) for arm in self.arms}

    def analysed(self) -> dict[str, Any]:
        facts = self.architecture.value if self.architecture else {}
        null = self._null()
        measured = {arm: self._arm(arm, null) for arm in self.arms}
        for arm, entry in measured.items():
            entry["removes"] = self._removes(arm, measured)
        reference = self._reference()
        return {
            "role": self.params["checkpoints"][self.name]["role"],
            "synthetic": self.params["checkpoints"][self.name]["kind"] == "synthetic",
            "dense": bool(facts.get("dense", False)),
            "family": facts.get("family"),
            "model_type": facts.get("model_type"),
            "recipe": (facts.get("quantization") or {}).get("recipe"),
            "compare": facts.get("compare"),
            "runs": self._counts(),
            "rejected": [
                {"run": run["id"], "arm": run["arm"], "why": run["why"]}
                for run in self.runs.value
                if not run["valid"]
            ],
            "noise": of_arms.noise(null) if null and null.pairs else None,
            "detection": detection(null),
            "drift": of_arms.session_drift(self._valid(reference), self.runs.file),
            "arms": measured,
            "sweep": self._sweep(),
            "dispatch": dispatch(
                self.results.table("trace", f"{self.name}.{reference}", "sweep.csv"),
                self._trace(reference),
            ),
            "bandwidths": bandwidths(self.host, self._trace(reference)),
            "interrupted": (self.host.value if self.host else {}).get("interrupted"),
        }

    def _reference(self) -> str:
        (name,) = (name for name, arm in self.arms.items() if arm["role"] == "reference")
        return name

    def _valid(self, arm: str) -> list[of_arms.Run]:
        return [] if arm in self.failed else of_arms.valid_runs(self.runs, arm)

    def _trace(self, arm: str) -> Found | None:
        return self.results.json("trace", f"{self.name}.{arm}", "trace.json", "moescope/trace/1")

    def _void(self, arm: str) -> str | None:
        if self.absent[arm]:
            return None
        parity = self.parity.value["arms"].get(arm) if self.parity else None
        return of_arms.void(self._valid(arm), self.params["shape"], parity, self._proof(arm))

    def _proof(self, arm: str) -> dict[str, Any]:
        """Of the kernels that the arm's experts ran; the null arm's are the reference's."""
        terms = self.results.json("trace", f"{self.name}.{arm}", "terms.json", "moescope/terms/1")
        table = self.results.table("trace", f"{self.name}.{arm}", "kernels.csv")
        return path.proof(self._claimed(arm), terms and terms.value, table and table.value)

    def _claimed(self, arm: str) -> list[str] | None:
        return (self.arms[arm].get("experts") or {}).get(self.name)

    def _fused(self, arm: str, traced: dict[str, Any] | None) -> Fused:
        return fused(
            self._claimed(arm),
            self.results.json("trace", f"{self.name}.{arm}", "terms.json", "moescope/terms/1"),
            self.results.table("trace", f"{self.name}.{arm}", "kernels.csv"),
            traced and traced["terms"],
        )

    def _null(self) -> of_arms.Pairs | None:
        """The null arm beside the reference; None if either is void."""
        for arm, entry in self.arms.items():
            if entry["role"] == "null" and not (self.void[arm] or self.void[self._reference()]):
                return self._pairs(arm, self._reference())
        return None

    def _pairs(self, arm: str, base: str) -> of_arms.Pairs:
        return of_arms.Pairs(self._valid(arm), self._valid(base), self.runs.file)

    def _arm(self, name: str, null: of_arms.Pairs | None) -> dict[str, Any]:
        arm, runs = self.arms[name], self._valid(name)
        found: dict[str, Any] = {
            "role": arm["role"],
            "runtime": arm["runtime"],
            "env": arm.get("env", {}),
            "patches": arm.get("patches", []),
            "absent": self.absent[name],
            "void": self.void[name],
        }
        if runs:
            found |= of_arms.rates(runs, self.runs.file)
        else:
            found |= dict.fromkeys(of_arms.RATES)
        hashes = {run.get("tokens_sha256") for run in runs}
        # A command may not show its tokens: then nothing is known.
        found["same_tokens_every_round"] = len(hashes) == 1 if hashes - {None} else None
        found["against"] = self._against(name, null)
        found["longer"] = self._longer(name, found["against"])
        found |= self._traced(name)
        parts = found["kernels"] or found["scopes"]
        usable = parts["terms"] if parts and not parts["refused"] and not found["void"] else None
        found["ceiling"] = (
            None
            if found["void"] or set(arm["patches"]) - FUSED
            else ceiling(
                self.architecture,
                found["token_ms"],
                usable,
                bandwidths(self.host, self._trace(name)),
                self._fused(name, found["kernels"]) if arm["patches"] else None,
            )
        )
        found["bound"] = bound(found["kernels"], found["ceiling"])
        found["cold"] = self._cold(name)
        found["unproved"] = bool(self._unproved(name))
        return found

    def _absent(self, name: str) -> str | None:
        """Why an arm has no valid run here, or None."""
        arm = self.arms[name]
        if self.name not in arm.get("checkpoints", [self.name]):
            families = (self.architecture.value if self.architecture else {}).get(
                "package_families", {}
            )
            package = self._package(arm["runtime"])
            if package in families and not families[package]:
                return f"{package} has no family for it"
            return "the study does not measure it there"
        if self._valid(name):
            return None
        if name in self.failed:
            return told(self.failed[name])
        for kind in ("not_applicable", "unsupported"):
            why = (self.host.value if self.host else {}).get(kind, {}).get(name)
            if why:
                return f"{kind.replace('_', ' ')}: {why}"
        reasons = [run["why"] for run in self.runs.value if run["arm"] == name]
        return f"no valid run: {reasons[-1]}" if reasons else "no run of it is recorded"

    def _package(self, runtime: str) -> str | None:
        folder = self.results.upstream.get(f"build/{runtime}")
        if folder is None:
            return None
        return ingredients(folder)["params"]["runtime"].get("package")

    def _against(self, name: str, null: of_arms.Pairs | None) -> dict[str, Any] | None:
        """Paired ratios to the base arm; None for the reference and where either is void."""
        base = of_arms.base_arm(self.arms, name)
        if name == base or self.void[name] or self.void[base]:
            return None
        pairs = self._pairs(name, base)
        if not pairs.pairs:
            return None
        return of_arms.against(base, pairs, null) | self._gain(name, base, pairs, null)

    def _gain(
        self, name: str, base: str, pairs: of_arms.Pairs, null: of_arms.Pairs | None
    ) -> dict[str, Any]:
        """Of a candidate, where its base is also measured without its MoE blocks: see arms.gain;
        beside it that arm, and whether the candidate is faster than it."""
        found = {"gain": None, "gain_of": None, "outdoes": False}
        if self.arms[name]["role"] != "candidate":
            return found
        for skip, arm in self.arms.items():
            usable = not (self.absent[skip] or self.void[skip])
            same = arm.get("patches") == ["skip_moe"] and of_arms.base_arm(self.arms, skip) == base
            if usable and same:
                without = self._valid(skip)
                beyond = of_arms.outdoes(self._valid(name), without, null, self.runs.file)
                gain = of_arms.gain(pairs, without)
                return {"gain": gain, "gain_of": skip, "outdoes": gain is not None and beyond}
        return found

    def _longer(self, name: str, against: dict[str, Any] | None) -> Figure | None:
        """Of an intervention that removes work and makes the token longer all the same."""
        arm, facts = self.arms[name], self.architecture.value if self.architecture else {}
        removing = lengthening.removes_work(arm.get("patches", []), facts.get("top_k"))
        if arm["role"] != "intervention" or not removing:
            return None
        return lengthening.longer(against)

    def _traced(self, name: str) -> dict[str, Any]:
        subject = f"{self.name}.{name}"
        limits = self.params["limits"]
        scopes = self.results.json("trace", subject, "scopes.json", "moescope/scopes/1")
        operations = self.results.table("trace", subject, "operations.csv")
        kernels = self.results.table("trace", subject, "kernels.csv")
        terms = self.results.json("trace", subject, "terms.json", "moescope/terms/1")
        trace = self._trace(name)
        drawn = (trace.value if trace else {}).get("timeline") or {}
        return {
            # Not committed: a file that Perfetto opens, by its place below work/ and its hash.
            "perfetto": {key: drawn[key] for key in ("file", "sha256")} if drawn else None,
            "scopes": attribution.scopes(
                scopes,
                limits["conservation"],
                adopt(terms.value.get("wall_ms"), "ms/token", [terms.file]) if terms else None,
            )
            if scopes and scopes.value["passes"]
            else None,
            "same_tokens": (trace.value if trace else {}).get("same_tokens"),
            "kernels": of_kernels(
                kernels,
                terms,
                limits,
                self.results.table("trace", subject, "calls.csv"),
                self.results.table("trace", subject, "timeline.csv"),
                self.architecture,
                self._proof(name),
                self.results.table("trace", subject, "modules.csv"),
            )
            if kernels and kernels.value
            else None,
            "operations": attribution.operations(operations, trace)
            if operations and operations.value
            else None,
            "trace_not_measured": attempts.told(trace.value if trace else {})
            + self._not_compared(name)
            + self._unproved(name),
        }

    def _not_compared(self, name: str) -> list[str]:
        found = (self.parity.value["arms"] if self.parity else {}).get(name) or {}
        return [f"parity: {found['not_compared']}"] if "not_compared" in found else []

    def _unproved(self, name: str) -> list[str]:
        """What an arm claims of its experts' kernels, where no trace can tell."""
        proof = self._proof(name)
        if not proof["claimed"] or proof["proved"] is not None or self.absent[name]:
            return []
        return [f"the path that the arm claims, {' or '.join(proof['claimed'])}: {proof['why']}"]

    def _removes(self, name: str, measured: dict[str, Any]) -> dict[str, Any] | None:
        """For an intervention: the terms it takes away, by the base arm's other instruments."""
        if self.arms[name]["role"] != "intervention" or measured[name]["against"] is None:
            return None
        base = measured[name]["against"]["base"]
        parts = {
            part: measured[base][part] is not None and not measured[base][part]["refused"]
            for part in ("scopes", "kernels")
        }
        scopes = self.results.json(
            "trace", f"{self.name}.{base}", "scopes.json", "moescope/scopes/1"
        )
        return attribution.removed(
            self.arms[name].get("patches", []),
            scopes if parts["scopes"] else None,
            measured[base]["kernels"] if parts["kernels"] else None,
            self.results.json("trace", f"{self.name}.{base}", "terms.json", "moescope/terms/1"),
        )

    def _cold(self, name: str) -> dict[str, Figure] | None:
        found = self.results.json(
            "warmup", f"{self.name}.{name}", "warmup.json", "moescope/warmup/1"
        )
        if found is None or "load_s" not in found.value:
            return None
        load, before = found.value["load_s"], found.value.get("cache_before")
        kept = figure([before["files"]], "files", [found.file]) if before else None
        return {
            "load": None if load is None else figure([load], "s", [found.file]),
            "kept": kept,
            "first_use": figure([found.value["first_use_s"]], "s", [found.file]),
        }

    def _sweep(self) -> dict[str, Any] | None:
        """The reference's top_k sweep: its own token and its interventions with one top_k."""
        reference = self._reference()
        if self.architecture is None or self.void[reference] or not self._valid(reference):
            return None
        whole = self.architecture.value.get("top_k")
        points = {whole: (reference, self._valid(reference))} if whole else {}
        for name, arm in self.arms.items():
            patches = arm.get("patches", [])
            if (
                arm["role"] == "intervention"
                and arm["runtime"] == self.arms[reference]["runtime"]
                and arm.get("env", {}) == self.arms[reference].get("env", {})
                and len(patches) == 1
                and patches[0].startswith("top_k=")
                and not self.void[name]
                and self._valid(name)
            ):
                points.setdefault(int(patches[0].removeprefix("top_k=")), (name, self._valid(name)))
        return attribution.sweep(points, self._valid(reference), self.runs.file)

    def _counts(self) -> dict[str, Any]:
        rows, file = self.runs.value, self.runs.file
        if not rows:
            return {"valid": None, "rejected": None, "not_quiet": None}
        loud = [
            run["id"] for run in rows if run["valid"] and run.get("guard", {}).get("waited_out")
        ]
        valid = [run["id"] for run in rows if run["valid"]]
        return {
            "valid": figure([len(valid)], "runs", [file], valid) if valid else None,
            "rejected": figure([len(rows) - len(valid)], "runs", [file]),
            "not_quiet": figure([len(loud)], "runs", [file], loud),
        }
