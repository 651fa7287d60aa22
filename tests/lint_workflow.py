"""`snakemake --lint`, less what this workflow does otherwise on purpose.

Runtimes have environments of their own, made and checked by the build stage, so rules carry no
conda or container directive.
"""

import re
import subprocess
import sys
from pathlib import Path

ALLOWED = ("Specify a conda environment or container for each rule",)


def main() -> int:
    result = subprocess.run(
        [sys.executable, "-m", "snakemake", "--lint", "--workflow-profile", "none"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).resolve().parents[1],
    )
    output = result.stdout + result.stderr
    found = [line.strip() for line in output.splitlines() if re.match(r"\s+\* ", line)]
    bad = [line for line in found if not any(allowed in line for allowed in ALLOWED)]
    if bad or (result.returncode and not found):
        print(output)
        return 1
    print(f"snakemake --lint: nothing beyond what is allowed ({len(found)} allowed)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
