"""A worker without MLX that speaks the protocol; FAKE_* variables make it misbehave.

``install(root)`` puts it where ``python -m moescope.worker`` finds it. Run as a program it is that
worker; it needs the standard library only (and numpy for ``forced``).
"""

import hashlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path


def install(root: Path) -> Path:
    """A repository root whose workflow/moescope/worker is this fake."""
    package = root / "workflow" / "moescope" / "worker"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    shutil.copy(__file__, package / "__main__.py")
    return root


def setting(name: str, default: str = "") -> str:
    return os.environ.get(f"FAKE_{name}", default)


def until(there, limit_s: float = 60) -> None:
    """Wait for others."""
    deadline = time.monotonic() + limit_s
    while not there():
        if select.select([sys.stdin], [], [], 0.01)[0]:
            sys.exit()  # nothing is asked meanwhile: the controller has gone
        if time.monotonic() > deadline:
            raise Refused("failed", "nobody came")


def meet(place: str) -> None:
    """Go on when as many processes are there as ``place`` ("folder:number") says."""
    folder, _, number = place.rpartition(":")
    (Path(folder) / str(os.getpid())).touch()
    until(lambda: len(list(Path(folder).iterdir())) >= int(number))


class Refused(Exception):
    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


class Fake:
    """Decodes after a fixed rule: token i of a prompt is a hash of the prompt and i."""

    def __init__(self):
        self.runs = 0
        self.path = None

    def load(self, package, path, seed=None):
        if kind := setting("REFUSE_LOAD"):
            raise Refused(kind, f"{package} does not load it")
        self.path = path
        if meeting := setting("MEET_LOADING"):
            meet(meeting)
        return {
            "seconds": 0.01,
            "import_s": 0.01,
            "parameters_bytes": 1000,
            "model_type": "fake",
            "layers": 2,
            "moe_layers": ["layers.0.mlp", "layers.1.mlp"],
            "peak_memory": 2000,
        }

    def decode(self, prompt, tokens, patches=()):
        run = self.begin(patches)
        made = tokens - 1 if str(run) in setting("SHORT_AT").split(",") else tokens
        steps = [self.step(run, patches) for _ in range(made - 1)]
        return self.result(run, prompt, made, steps)

    def sliced(self, step, prompt=None, tokens=0, slices=None, patches=()):
        if step == "start":
            self.held = (self.begin(patches), prompt, tokens, patches)
            self.left, self.steps, self.count = list(slices), [], len(slices)
            return {"tokens": 1}
        run, prompt, tokens, patches = self.held
        if step == "more":
            die = setting("DIE_IN_SLICE")
            if die and (run, self.count - len(self.left)) == tuple(map(int, die.split("."))):
                os.kill(os.getpid(), signal.SIGKILL)
            steps = [self.step(run, patches) for _ in range(self.left.pop(0))]
            self.steps += steps[1:]
            return {"tokens": 1}
        assert step == "end" and not self.left
        result = self.result(run, prompt, tokens, self.steps)
        return result | {"slices": self.count}

    def begin(self, patches):
        self.check(patches)
        run, self.runs = self.runs, self.runs + 1
        die = setting("DIE_AT")
        if die and run == int(die):
            print(setting("LAST_WORDS"), file=sys.stderr, flush=True)
            os.kill(os.getpid(), getattr(signal, setting("DIE_OF", "SIGKILL")))
        refuse = setting("REFUSE_AT")
        if refuse and run == int(refuse):
            raise Refused("failed", "a library gave up in /home/ada/lib/model.py")
        if (meeting := setting("MEET")) and run == 0:
            meet(meeting)
        if run == int(setting("HOLD_AT", "-1")):
            until(Path(setting("HOLD")).exists)
        return run

    def step(self, run, patches):
        each = float(setting("TOKEN_S", "0.002")) * (2 if "slow" in patches else 1)
        each *= 1 + float(setting("DRIFT", "0")) * run
        if clock := setting("CLOCK"):
            # A host of its own: a clock that only decoding moves, and a speed that flips with it.
            now = float(Path(clock).read_text())
            flip = now // float(setting("FLIP_S"))
            each *= 1 + (hashlib.sha256(str(flip).encode()).digest()[0] & 1)
            Path(clock).write_text(str(now + each))
            return each
        begin = time.perf_counter()
        while time.perf_counter() < begin + each:
            time.sleep(each / 4)
        return time.perf_counter() - begin

    def result(self, run, prompt, made, steps):
        decode_s = sum(steps)  # as the worker has it
        ids = [self.token(prompt, i, run) for i in range(made)]
        if setting("LOOP"):
            ids = [7, 8] * made
            ids = ids[:made]
        return {
            "prompt_tokens": len(prompt),
            "generated_tokens": made,
            "prefill_s": 0.01,
            "decode_s": decode_s,
            "forwards": len(steps),
            "token_s": steps,
            "build_s": decode_s / 10,
            "cpu_s": decode_s / 2,
            "tokens": ids,
            "tokens_sha256": hashlib.sha256(json.dumps(ids).encode()).hexdigest(),
            "finite": str(run) not in setting("NAN_AT").split(","),
            "peak_memory": 3000,
            "tool_rate": made / decode_s,
            **({"same_prompt": False} if setting("OWN_PROMPT") else {}),
        }

    def token(self, prompt, index, run):
        salt = setting("DIVERGE_AT")
        changed = salt and index >= int(salt)
        if str(run) in setting("FLAKY_AT").split(","):
            changed = True
        text = f"{sum(prompt)} {index} {'other' if changed else ''}"
        return int(hashlib.sha256(text.encode()).hexdigest(), 16) % 50

    def scopes(self, prompt, tokens, passes, patches=()):
        self.check(patches)
        each = {"router": 0.001, "expert_gather": 0.004, "attention": 0.003, "other": 0.001}
        terms = {term: seconds * tokens for term, seconds in each.items()}
        wall = sum(terms.values()) * float(setting("LEAK", "1"))
        one = {"wall_s": wall, "tokens": tokens, "terms_s": terms}
        return {"passes": [one] * passes}

    def graph(self, prompt, patches=()):
        self.check(patches)
        if kind := setting("NO_GRAPH"):
            raise Refused(kind, "export_to_dot is missing")
        rows = [("Matmul", "router", 2), ("GatherMM", "expert_gather", 6), ("AsType", "other", 3)]
        return {
            "operations": [{"primitive": p, "term": t, "count": n} for p, t, n in rows],
            "total": 11,
            "astype": 3,
            "dot_sha256": "0" * 64,
        }

    def forced(self, prompt, continuation, save, patches=()):
        if setting("NO_FORCED"):
            raise Refused("not_applicable", "a command has no forced")
        import numpy

        vocab = 50
        generator = numpy.random.default_rng(5)
        logits = generator.normal(size=(len(continuation), vocab)).astype("float32")
        for i in range(len(continuation)):
            logits[i, self.token(prompt, i, -1)] = 6 + float(setting("GAP", "0"))
        if setting("NOISE"):
            logits += generator.normal(scale=float(setting("NOISE")), size=logits.shape)
        if setting("NAN_LOGITS"):
            logits[-1, 0] = numpy.nan
        numpy.save(save, logits.astype("float32"))
        return {"finite": bool(numpy.isfinite(logits).all()), "vocab": vocab}

    def environment(self):
        return {"environ": dict(os.environ), "cwd": os.getcwd(), "path": sys.path}

    def print_noise(self, size):
        print("x" * size, file=sys.stderr, flush=True)
        return {"size": size}

    def echo(self, value):
        return {"length": len(value)}

    def sleep(self, seconds):
        time.sleep(seconds)
        return {}

    def spawn(self):
        import subprocess

        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return {"pid": child.pid}

    def crash(self, message, status):
        print(message, file=sys.stderr, flush=True)
        os._exit(status)

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def garble(self):
        sys.stdout.write("not json\n")
        sys.stdout.flush()
        return {}

    def check(self, patches):
        for patch in patches:
            if patch in setting("NOT_APPLICABLE").split(","):
                raise Refused("not_applicable", f"{patch}: there are no experts")


def main():
    if setting("NEVER_READY"):
        time.sleep(60)
    if setting("DIE_EARLY"):
        sys.exit("no module named mlx")
    print("a library says hello", flush=True)
    versions = {"mlx": "0.0.1", "mlx-lm": None, "mlx-vlm": "0.0.2", "python": "3.11"}
    ready = {"ready": True, "pid": os.getpid(), "versions": versions, "device": "cpu"}
    print(json.dumps({**ready, "library_sha256": "ab" * 32}), flush=True)
    fake = Fake()
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            reply = {"ok": True, "result": getattr(fake, do)(**request)}
        except Refused as error:
            reply = {"ok": False, "error": {"kind": error.kind, "message": str(error)}}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
