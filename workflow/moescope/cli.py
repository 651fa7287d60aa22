"""The command line: what the rules call, and the same questions without Snakemake."""

import argparse
import sys
from pathlib import Path

from .errors import UserError
from .faults import told


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a check found something, 2 bad input, 130 interrupted."""
    options = _parser().parse_args(arguments)
    try:
        with told():
            return options.call(options) or 0
    except UserError as error:
        print(f"moescope: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("moescope: interrupted; what was finished is kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moescope", description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the repository (default: here)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, call, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(call=call)
        sub.add_argument("--study", type=Path, help="a study file (default: config.yaml)")
        return sub

    run = command("run", _run, "run one job of the study")
    run.add_argument("stage")
    run.add_argument("subject")
    run.add_argument("--key", help="refuse to run unless this is the job's key")
    run.add_argument("--log", type=Path, help="also write what is printed here")
    conclude = command("conclude", _conclude, "keep an interrupted measurement's rounds")
    conclude.add_argument("subject", metavar="CHECKPOINT")
    command("explain", _explain, "why each stale job is stale, and what the run will cost")
    command("audit", _audit, "render every committed record again and compare")
    command("rerender", _rerender, "analyse and render all committed measurements again")
    command("doctor", _doctor, "is this host ready for the study?")
    command("history", _history, "the study's records over time")
    command("pin", _pin, "resolve the study's branches to revisions and write them into it")
    command("crossover", _crossover, "enter the crossover of the study's record for the kernels")
    return parser


def _plan(options: argparse.Namespace):
    from .study.session import current_plan

    return current_plan(options.root.resolve(), options.study)


def _run(options: argparse.Namespace) -> None:
    from .run import run_job, tee

    plan = _plan(options)
    try:
        job = plan.job(options.stage, options.subject)
    except KeyError:
        raise UserError(f"the study has no job {options.stage}/{options.subject}") from None
    if options.key not in (None, job.key):
        raise UserError(f"{job.name}: {options.key} is not the current key, {job.key} is")
    if job.name in plan.unpinned:
        raise UserError(
            "not pinned; run `snakemake pin`, which resolves it and writes it into the study",
            where=plan.unpinned[job.name],
        )
    with tee(options.log):
        run_job(job, plan.root)


def _conclude(options: argparse.Namespace) -> None:
    from .measure.conclude import conclude

    conclude(options.subject, options.study, options.root.resolve())


def _explain(options: argparse.Namespace) -> None:
    from .study.explain import explain

    print(explain(_plan(options)))


def _audit(options: argparse.Namespace) -> int:
    from .record.audit import audit

    problems = audit(options.root.resolve())
    for problem in problems:
        print(f"audit: {problem}", file=sys.stderr)
    if not problems:
        print("audit: every committed record is what its data say")
    return bool(problems)


def _rerender(options: argparse.Namespace) -> None:
    from .record.rerender import rerender

    line = None
    for line in rerender(options.root.resolve()):
        print(line)
    if line is None:
        print("No record is committed yet, so there is nothing to render.")


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import doctor, render

    findings = doctor(_plan(options))
    print(render(findings))
    return not all(finding.ok for finding in findings)


def _history(options: argparse.Namespace) -> None:
    from .record.history import history

    print(history(options.root.resolve()))


def _pin(options: argparse.Namespace) -> None:
    from .study.pin import pin

    for line in pin(options.root.resolve(), options.study):
        print(line)


def _crossover(options: argparse.Namespace) -> None:
    from .record.known import TABLE, enter

    plan = _plan(options)
    if plan.study.crossover is None:
        raise UserError(
            "the study asks for no crossover; give it one (docs/kernels.md)", "crossover"
        )
    made = enter(plan.root, plan.record.folder)
    print(
        f"{TABLE}: {made['device']}, MLX {made['mlx']}: up to {made['max_width']}; "
        f"{made['about']['source']}"
    )
