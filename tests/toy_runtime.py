"""A toy runtime in a git repository of its own: C, built by its Makefile, with a framework pin in a
CMake list and the output of a bench tool. It decodes nothing; what it prints it has waited for.
"""

import subprocess
from pathlib import Path

PIN = "b7c3dd6d27f45b5365b08a840310187dc503f1db"
OTHER_PIN = "81ba1c6a00000000000000000000000000000000"

MAKEFILE = """\
FEATURES ?= none
bin/bench: bench.c
\tmkdir -p bin
\t$(CC) -O1 -DFEATURES='"$(FEATURES)"' -o $@ bench.c
"""
CMAKE = """\
FetchContent_Declare(
    mlx
    GIT_REPOSITORY "https://example.invalid/ml-explore/mlx.git"
    GIT_TAG {pin})
"""
SOURCE = r"""
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
static double now(void) {
  struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9;
}
static void rest(double s) {
  struct timespec t = {(time_t)s, (long)((s - (time_t)s) * 1e9)}; nanosleep(&t, 0);
}
int main(int argc, char **argv) {
  long prompt = 0, tokens = 0; const char *model = "";
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--help")) {
      printf("toy bench (%s)\nUsage: bench [OPTIONS]\n  -m, --model DIR\n  @TOKENS@ N\n"
             "      --prompt-tokens N\n", FEATURES);
      return 0;
    }
    if (!strcmp(argv[i], "--model")) model = argv[++i];
    else if (!strcmp(argv[i], "@TOKENS@")) tokens = atol(argv[++i]);
    else if (!strcmp(argv[i], "--prompt-tokens")) prompt = atol(argv[++i]);
    else { fprintf(stderr, "error: unexpected argument '%s'\n", argv[i]); return 2; }
  }
  if (getenv("TOY_CRASH")) { fprintf(stderr, "terminate called\n"); abort(); }
  if (getenv("TOY_MEMORY")) {
    fprintf(stderr, "[metal::malloc] Attempting to allocate 9 bytes\n"); return 1;
  }
  if (getenv("TOY_SLEEP")) rest(60);
  double step = 1e-3 * @FACTOR@;
  const char *slow = getenv("TOY_MS"); if (slow) step = atof(slow) * 1e-3;
  double t0 = now(); rest(1e-5 * prompt); double t1 = now();
  for (long i = 1; i < tokens; i++) rest(step);
  double t2 = now();
  const char *env = getenv("MLX_INHERITED");
  fprintf(stderr, "[toy arch] path: %s; inherited: %s\n",
          getenv("TOY_FUSED") ? "fused" : "gather", env ? env : "nothing");
  printf("[Load] wall: 0.010 s  MLX peak: 0.50 GB\n\033[1m[Profile Results]\033[0m\n");
  printf("Model: %s\nPrompt tokens: %ld\n", model, prompt);
  printf("\033[32mGenerated tokens: %ld\033[0m\n", tokens);
  printf("Prefill: %.4f ms (%.2f tok/s)\n", (t1 - t0) * 1e3, prompt / (t1 - t0));
  printf("Decode: %.4f ms (%.4f tok/s)\n", (t2 - t1) * 1e3, tokens / (t2 - t1));
  printf("MLX peak memory: 0.75 GB\nToken ids: [");
  for (long i = 0; i < tokens; i++) printf("%s%ld", i ? ", " : "", 7 + i % 3);
  printf("]\n");
  return 0;
}
"""

# How the toy is called and read; the text of a preset.
INVOKE = {
    "says": "the toy",
    "argv": ["{binary.bench}", "--model", "{model}", "--prompt-tokens", "{prompt}",
             "--max-tokens", "{generate}"],
    "optional": [{"argv": ["--ignore-eos"], "lacking": "the end of sequence ends a run early"}],
    "help": ["{binary.bench}", "--help"],
    "output": {
        "kind": "patterns",
        "once": [
            r"\[Load\] wall: (?P<load_s>[\d.]+) s",
            r"Prompt tokens: (?P<prompt>\d+)",
            r"Generated tokens: (?P<generated>\d+)",
            r"Prefill: (?P<prefill_ms>[\d.]+) ms",
            r"Decode: (?P<decode_ms>[\d.]+) ms \((?P<rate>[\d.]+) tok/s\)",
            r"MLX peak memory: (?P<gb>[\d.]+) GB",
        ],
        "lists": {"paths": r"(?m)^(\[toy arch\] .*)$", "tokens": r"(?m)^Token ids: \[(.*)\]$"},
    },
    "fields": {
        "prompt_tokens": "prompt",
        "generated_tokens": "generated",
        "prefill_s": "prefill_ms / 1000",
        "decode_s": "decode_ms / 1000",
        "forwards": "generated - 1",
        "tool_rate": "rate",
        "load_s": "load_s",
        "peak_memory": "gb * 1e9",
    },
    "denominator": "N tokens over N - 1 intervals",
}  # fmt: skip
BUILD = {
    "commands": ["make FEATURES={features} bin/bench"],
    "features": ["cuda", "fast"],
    "binaries": {"bench": "bin/bench"},
    "tools": ["make --version", "no-such-tool --version"],
    "timeout_s": 60,
}
FRAMEWORK = {
    "name": "mlx",
    "file": "cpp/CMakeLists.txt",
    "pattern": r"ml-explore/mlx\.git\"\s+GIT_TAG\s+([0-9a-f]{40})",
}


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid",
               "-c", "protocol.file.allow=always", "-C", str(folder), *arguments]  # fmt: skip
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def write(
    folder: Path,
    pin: str = PIN,
    flag: str = "--max-tokens",
    factor: float = 1.0,
    message: str = "change",
) -> str:
    """Write the toy's files and commit them; returns the commit."""
    if not (folder / ".git").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "cpp").mkdir(exist_ok=True)
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "cpp" / "CMakeLists.txt").write_text(CMAKE.format(pin=pin))
    source = SOURCE.replace("@TOKENS@", flag).replace("@FACTOR@", str(factor))
    (folder / "bench.c").write_text(source)
    (folder / "README").write_text(f"{message}\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", message)
    return git(folder, "rev-parse", "HEAD").strip()


def runtime(url: Path | str, commit: str, **over: object) -> dict[str, object]:
    """A resolved runtime, as ``spec.resolve`` makes it, with the build's name."""
    from moescope.runtimes import spec

    invoke = spec.Invoke.model_validate(over.pop("invoke", INVOKE)).model_dump(mode="json")
    build = spec.Build.model_validate({**BUILD, **over.pop("build", {})})
    framework = spec.Framework.model_validate({**FRAMEWORK, **over.pop("framework", {})})
    source = spec.GitSource(kind="git", url=str(url), commit=commit)
    assert not over, over
    return {
        "name": "toy",
        "kind": "command",
        "preset": "toy",
        "source": source.model_dump(mode="json", exclude_none=True),
        "build": build.model_dump(mode="json"),
        "framework": framework.model_dump(mode="json", exclude_none=True),
        "invoke": invoke,
    }
