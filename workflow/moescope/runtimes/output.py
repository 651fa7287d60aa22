"""What a tool printed, as runs: values by the preset's patterns, JSON lines or CSV, then its fields
by the preset's arithmetic, so that every rate has the same denominator (forwards timed).
"""

import csv
import json
import math
import re
from typing import Any

from ..errors import UserError
from . import expression
from .spec import OPTIONAL

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\-_]")
COUNTS = ("prompt_tokens", "generated_tokens", "forwards", "peak_memory")


def plain(text: str) -> str:
    """Text without terminal sequences; a line that was overwritten by carriage returns counts as
    what was left standing."""
    lines = ANSI.sub("", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines)


def runs(text: str, invoke: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured runs of one process, in order.

    text: stdout, then stderr. invoke: a resolved preset's. Returns for each run its fields
    (seconds, bytes, counts) and the lists "tokens" (ids), "paths", "phases" as far as the preset
    has them. Raises UserError, which says what was looked for, if the output is not as the preset
    expects.
    """
    text = plain(text)
    output = invoke["output"]
    lists = {name: re.findall(pattern, text) for name, pattern in output["lists"].items()}
    if "tokens" in lists:
        lists["tokens"] = [int(n) for part in lists["tokens"] for n in re.findall(r"\d+", part)]
    found = []
    for values in _values(text, output):
        run: dict[str, Any] = {}
        for name, formula in invoke["fields"].items():
            try:
                number = expression.value(formula, values)
            except KeyError as error:
                if name in OPTIONAL:
                    continue  # older tools print less
                raise UserError(
                    f"the output has no value {error.args[0]} (for {name}); looked for "
                    f"{_looked_for(output, error.args[0])} in: {_excerpt(text)}"
                ) from None
            except ValueError as error:
                raise UserError(f"{name}: {error}; the values are {values}") from None
            run[name] = round(number) if name in COUNTS else number
        if run["forwards"] < 1 or run["decode_s"] <= 0 or run["prefill_s"] <= 0:
            raise UserError(f"the output says {run}, which is no measurement: {_excerpt(text)}")
        found.append({**run, **lists})
    if not found:
        raise UserError(f"the output holds no run; looked for {_sign(output)} in: {_excerpt(text)}")
    return found


def _sign(output: dict[str, Any]) -> str:
    """What shows that there is a run."""
    if output["kind"] == "patterns":
        return repr(output["each"]) if output["each"] else " or ".join(map(repr, output["once"]))
    if output["kind"] == "csv":
        return f"a line like {output['header']!r} and rows below it"
    after = f" after {output['prefix']!r}" if output["prefix"] else ""
    having = f" with {output['where']}" if output["where"] else ""
    return f"a JSON object{after}{having}"


def _values(text: str, output: dict[str, Any]) -> list[dict[str, float]]:
    """The values of each run, as numbers."""
    if output["kind"] == "patterns":
        common: dict[str, str] = {}
        for pattern in output["once"]:
            for match in re.finditer(pattern, text):
                common |= _groups(match)
        if output["each"] is None:
            return [_numbers(common)] if common else []
        return [_numbers(common | _groups(match)) for match in re.finditer(output["each"], text)]
    if output["kind"] == "json_lines":
        return [_numbers(_pick(row, output["columns"])) for row in _json_rows(text, output)]
    return [_numbers(_pick(row, output["columns"])) for row in _csv_rows(text, output["header"])]


def _groups(match: re.Match[str]) -> dict[str, str]:
    return {name: value for name, value in match.groupdict().items() if value is not None}


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            raise UserError(f"the output's {name} is {value!r}, which is no number") from None
        if not math.isfinite(numbers[name]):
            raise UserError(f"the output's {name} is {value!r}; the tool measured nothing there")
    return numbers


def _json_rows(text: str, output: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for line in text.splitlines():
        line = line.strip()
        if not line.startswith(output["prefix"]):
            continue
        try:
            row = json.loads(line[len(output["prefix"]) :])
        except ValueError:
            if output["prefix"]:
                raise UserError(f"no JSON after {output['prefix']!r}: {line[:200]!r}") from None
            continue
        if isinstance(row, dict) and all(row.get(k) == v for k, v in output["where"].items()):
            rows.append(row)
    return rows


def _csv_rows(text: str, header: str) -> list[dict[str, str]]:
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if re.search(header, line)), None)
    if start is None:
        return []
    end = next((i for i in range(start, len(lines)) if not lines[i].strip()), len(lines))
    return list(csv.DictReader(lines[start:end]))


def _pick(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name, path in columns.items():
        value: Any = row
        for key in [path] if path in row else path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found


def _looked_for(output: dict[str, Any], name: str) -> str:
    if name in output["columns"]:
        return f"{output['columns'][name]!r}"
    for pattern in (*output["once"], *([output["each"]] if output["each"] else [])):
        if f"(?P<{name}>" in pattern:
            return repr(pattern)
    return repr(name)


def _excerpt(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return repr("\n".join(lines[-6:])[-400:]) if lines else "nothing was printed"
