"""What patches and scopes do inside a model, seen from inside; runs in the arm's interpreter.

Standard input: [{"package", "path"}, ...]; standard output: one object of findings for each. A part
that must not matter any more is poisoned with NaN: if it still took part, the logits would be NaN.
"""

import contextlib
import functools
import importlib
import io
import json
import os
import sys

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from moescope.worker import load, scopes
from moescope.worker import patches as interventions
from moescope.worker.modules import survey
from moescope.worker.patches import applied
from moescope.worker.state import Refusal, State
from moescope.worker.wrap import Changes

PROMPT = [3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


class Model:
    """A loaded checkpoint, stepped by hand."""

    def __init__(self, state):
        self.state = state
        self.sites = survey(state)

    def prefill(self, patches=()):
        root = self.state.root
        if hasattr(root, "make_cache"):
            cache = root.make_cache()
        else:
            package = self.state.package.replace("-", "_")
            cache = importlib.import_module(f"{package}.models.cache").make_prompt_cache(root)
        with applied(self.state, patches):
            mx.eval(self.call([PROMPT], cache))
            mx.eval([c.state for c in cache])
        return cache

    def call(self, ids, cache):
        output = self.state.root(mx.array(ids), cache=cache)
        return getattr(output, "logits", output)[:, -1, :]

    def logits(self, patches=()):
        cache = self.prefill(patches)
        with applied(self.state, patches):
            logits = self.call([[37]], cache)
            mx.eval(logits)
        return logits

    def finite(self, patches=()):
        return bool(mx.all(mx.isfinite(self.logits(patches))).item())

    def gathers(self, patches=()):
        """rhs_indices of the gathers of one step."""
        cache = self.prefill(patches)
        seen = []
        original = mx.gather_qmm

        def gather(*args, **kwargs):
            seen.append(kwargs["rhs_indices"])
            return original(*args, **kwargs)

        with applied(self.state, patches):
            mx.gather_qmm = gather
            try:
                mx.eval(self.call([[37]], cache))
            finally:
                mx.gather_qmm = original
        return seen

    def inputs_stay(self, patches, modules):
        """Whether what these modules are handed is computed, though nothing may come of it."""
        seen = []

        def noted(inner):
            def call(module, x, *args, **kwargs):
                seen.append(x)
                return inner(module, x, *args, **kwargs)

            return call

        with applied(self.state, patches), Changes() as changes:
            cache = self.prefill()
            for module in modules:
                changes.call(module, noted)
            logits = self.call([[37]], cache)
            return bool(seen) and len(labels(logits)) == len(labels(logits, *seen))

    def primitives(self, patches=()):
        cache = self.prefill(patches)
        with applied(self.state, patches):
            return labels(self.call([[37]], cache))


def labels(*arrays):
    """Primitives still to be computed for these arrays."""
    file = io.StringIO()
    mx.export_to_dot(file, *arrays)
    return [part.split('"')[0] for part in file.getvalue().split('label ="')[1:]]


@contextlib.contextmanager
def poisoned(modules, own=()):
    """Every floating parameter of these modules is NaN; of ``own`` only the direct ones."""

    def nan(value):
        return mx.full(value.shape, mx.nan, value.dtype)

    def bad(value):
        return nan(value) if mx.issubdtype(value.dtype, mx.floating) else value

    kept = []
    for module in modules:
        kept.append((module, module.parameters()))
        module.update(tree_map(bad, module.parameters()))
    for module in own:
        direct = {k: v for k, v in module.items() if isinstance(v, mx.array)}
        kept.append((module, direct))
        module.update({k: bad(v) for k, v in direct.items()})
    try:
        yield
    finally:
        for module, parameters in reversed(kept):
            module.update(parameters)


def fingerprint(state):
    """The class and the attributes of every module, and the values of every parameter."""
    facts = []
    for path, module in state.model.named_modules():
        plain = {k: repr(v) for k, v in vars(module).items() if isinstance(v, (int, float, str))}
        config = getattr(module, "config", None)
        plain["config.top_k_experts"] = repr(getattr(config, "top_k_experts", None))
        facts.append((path, id(type(module)), sorted(plain.items())))
    parameters = tree_flatten(state.model.parameters())
    arrays = [(name, value.shape, id(value)) for name, value in parameters]
    return repr(facts) + repr(sorted(arrays))


def restored(state, patches, crash=False):
    before = fingerprint(state)
    try:
        with applied(state, patches):
            changed = fingerprint(state) != before
            if crash:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return changed and fingerprint(state) == before


def half_refused(state):
    """The second patch is refused: is the first one gone?"""
    before = fingerprint(state)
    try:
        with applied(state, ["skip_attention", "top_k=0"]):
            return False
    except Refusal:
        return fingerprint(state) == before


def leaks(model):
    """Arrays left to be computed where a scope hands over: at the experts' entry those of the
    router, after attention those in its cache, after any part its output, and after the step
    what is in any cache."""
    found = {"at_experts": 0, "calls": 0, "in_cache": 0, "caches": 0, "outputs": 0}
    blocks = {id(block.switch.module): block for block in model.sites.blocks}

    def switch(inner):
        def call(module, *args, **kwargs):
            owner = blocks[id(module)].module
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_locals.get("self") is owner:
                    arrays = [v for v in frame.f_locals.values() if isinstance(v, mx.array)]
                    found["at_experts"] += len(labels(*arrays)) if arrays else 0
                    found["calls"] += 1
                frame = frame.f_back
            return inner(module, *args, **kwargs)

        return call

    def after_attention(inner):
        def call(module, *args, **kwargs):
            output = inner(module, *args, **kwargs)
            for array in scopes._caches(args, kwargs):
                found["in_cache"] += len(labels(array))
                found["caches"] += 1
            return output

        return call

    def after_any(inner):
        def call(module, *args, **kwargs):
            output = inner(module, *args, **kwargs)
            found["outputs"] += sum(len(labels(array)) for array in scopes._arrays(output))
            return output

        return call

    cache = model.prefill()
    clock = scopes.Clock()
    sites = model.sites
    parts = [*sites.attention, *sites.norms, *([] if sites.tied else [sites.head])]
    for block in sites.blocks:
        parts += [*block.router, *block.shared, *block.projections, block.switch]
        parts += [part for part in (block.activation, block.shared_gate) if part]
    modules = {id(part.module): part.module for part in parts}
    modules |= {id(block.module): block.module for block in sites.blocks}
    with Changes() as inner, Changes() as middle, Changes() as outer:
        for block in model.sites.blocks:
            inner.call(block.switch.module, switch)
        scopes._instrument(model.state, model.sites, middle, clock)
        for part in model.sites.attention:
            outer.call(part.module, after_attention)
        for module in modules.values():
            outer.call(module, after_any)
        clock.start()
        logits = model.call([[37]], cache)
        clock.stop()
    arrays: list = []
    scopes._collect(cache, arrays, 0)
    found["after_step"] = sum(len(labels(array)) for array in arrays)
    mx.eval(logits)
    return found


def in_force(model):
    """The term that the clock is on, just before and after each kind of call of one step."""
    found = {}
    clock = scopes.Clock()

    def note(kind, inner):
        def call(module, *args, **kwargs):
            if clock.active:
                found.setdefault(f"before {kind}", set()).add(clock.stack[-1].term)
            output = inner(module, *args, **kwargs)
            if clock.active:
                found.setdefault(f"after {kind}", set()).add(clock.stack[-1].term)
            return output

        return call

    cache = model.prefill()
    with Changes() as under, Changes() as over:
        scopes._instrument(model.state, model.sites, under, clock)
        blocks = model.sites.blocks
        kinds = {
            "attention": [part.module for part in model.sites.attention],
            "block": [block.module for block in blocks],
            "switch": [block.switch.module for block in blocks],
            "first projection": [block.projections[0].module for block in blocks],
            "last projection": [block.projections[-1].module for block in blocks],
        }
        if not model.sites.tied:
            kinds["head"] = [model.sites.head.module]
        for kind, modules in kinds.items():
            for module in modules:
                over.call(module, functools.partial(note, kind))
        clock.start()
        mx.eval(model.call([[37]], cache))
        clock.stop()
    return {point: sorted(terms) for point, terms in found.items()}


class VirtualTime:
    """Stands for the module time: only sleeping, and a little each look at the clock, takes any."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1e-7
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def delays(model):
    """By how many delays each term grows when a part is delayed, without the noise of a clock."""
    found = {}
    real = scopes.time
    scopes.time = interventions.time = VirtualTime()
    try:
        plain = scopes.run(model.state, PROMPT, 1)["passes"][0]["terms_s"]
        for term in ("router", "expert_gather", "attention"):
            try:
                slow = scopes.run(model.state, PROMPT, 1, patches=[f"delay_{term}=10ms"])
            except Refusal:
                continue
            terms = slow["passes"][0]["terms_s"]
            growth = {other: (terms[other] - plain[other]) / 0.01 for other in terms}
            found[term] = {other: round(n, 1) for other, n in growth.items() if round(n, 1)}
    finally:
        scopes.time = interventions.time = real
    return found


def same(a, b):
    return bool(mx.allclose(a, b, rtol=1e-4, atol=1e-4).item())


def attention_is_skipped(model):
    """Steps with attention poisoned after the prefill: without the patch, and with it."""
    results = []
    for patches in ([], ["skip_attention"]):
        with contextlib.ExitStack() as stack:
            stack.enter_context(applied(model.state, patches))
            cache = model.prefill()
            modules = [part.module for part in model.sites.attention]
            # The attention of these models is wrapped by now; its parameters are the same ones.
            stack.enter_context(poisoned(modules))
            results.append(bool(mx.all(mx.isfinite(model.call([[37]], cache))).item()))
    return results


def probe(package, path):
    state = State()
    load.run(state, package, path)
    model = Model(state)
    sites = model.sites
    found = {
        "attention": attention_is_skipped(model),
        "restored": {
            name: restored(state, [name], crash)
            for name, crash in (("skip_attention", False), ("delay_step=1ms", True))
        },
        "terms": {
            path: sites.term_of(path)
            for path, _ in state.model.named_modules()
            if path.startswith(sites.root)
        },
        "in_force": in_force(model),
        "inputs_stay": {
            "skip_attention": model.inputs_stay(
                ["skip_attention"], [part.module for part in sites.attention]
            )
        },
        "delays": delays(model),
        "leaks": leaks(model),
    }
    if not sites.blocks:
        return found
    found["restored"] |= {
        name: restored(state, [name], crash)
        for crash in (False, True)
        for name in ("skip_experts", "skip_router", "skip_moe", "top_k=1", "split_gather=1")
    }
    found["half_refused"] = half_refused(state)
    switches = [block.switch.module for block in sites.blocks]
    routers = [part.module for block in sites.blocks for part in block.router]
    own = [block.module for block in sites.blocks]
    found["inputs_stay"] |= {
        "skip_experts": model.inputs_stay(["skip_experts"], switches),
        "skip_router": model.inputs_stay(["skip_router"], interventions._routers(state, sites)),
        "skip_moe": model.inputs_stay(["skip_moe"], own),
    }
    with poisoned(switches):
        found["experts"] = [model.finite(), model.finite(["skip_experts"])]
        found["experts_without_router"] = model.finite(["skip_router"])
    with poisoned(routers, own):
        found["router"] = [model.finite(), model.finite(["skip_router"])]
        found["router_without_experts"] = model.finite(["skip_experts"])
    with poisoned([*own, *routers]):
        found["moe"] = [model.finite(), model.finite(["skip_moe"])]
    plain = model.gathers()
    found["gathers"] = [indices.shape[-1] for indices in plain]
    found["gathers_top_k_1"] = [indices.shape[-1] for indices in model.gathers(["top_k=1"])]
    found["gathers_skip_experts"] = len(model.gathers(["skip_experts"]))
    found["gathers_split"] = [i.shape[-1] for i in model.gathers(["split_gather=1"])]
    found["experts_fixed"] = [i.flatten().tolist() for i in model.gathers(["skip_router"])]
    found["split_is_same"] = same(model.logits(), model.logits(["split_gather=1"]))
    found["top_k_differs"] = not same(model.logits(), model.logits(["top_k=1"]))
    for name in ("", "skip_router", "skip_moe"):
        primitives = model.primitives([name] if name else [])
        found[f"choosing {name}".strip()] = sum(
            label in ("ArgPartition", "ArgSort", "ArgReduce", "GatherAxis", "ScatterAxis")
            for label in primitives
        )
    block = sites.blocks[-1]
    found["inputs"] = {
        "block": sites.term_of(block.path, "input"),
        "switch": sites.term_of(block.switch.path, "input"),
        "projection": sites.term_of(block.projections[-1].path, "input"),
        "root": sites.term_of(sites.root, "input"),
        "root's output": sites.term_of(sites.root),
    }
    return found


def main():
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump([probe(**request) for request in json.load(sys.stdin)], output)


main()
