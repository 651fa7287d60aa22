"""From record.json to record.md and record.html: the same record, the same bytes.

Both come from templates/body.j2; record.md.j2 and record.html.j2 say what stands around it.
"""

from pathlib import Path
from typing import Any

from ..errors import UserError
from . import charts, crossover, numbers, reservations, tables, trace_tables
from .writers import Html, Markdown, plain

COMMANDS = """
make record                 # set up, then make the study of config.yaml; nothing runs that is there
. .venv/bin/activate
{own}snakemake audit             # compute and render this record again from its data, and compare
snakemake explain           # what is stale here, why, and what it would cost
# To measure again without another change, raise study.session in the study's file.
"""


EMBEDDED = "embedded"  # config.yaml's study; the others stand in studies/ by their names


def commands(study: str) -> str:
    """What makes and checks this record again."""
    file = f" --configfile studies/{study}.yaml"
    own = "" if study == EMBEDDED else f"snakemake --cores 1 record{file}  # this study, anew\n"
    text = COMMANDS.replace("{own}", own)
    return text if not own else text.replace("snakemake explain  ", f"snakemake explain{file}  ")


def render(record: dict[str, Any], templates: Path) -> dict[str, str]:
    """File name -> text of the Markdown and the HTML.

    Raises UserError if a template asks for something that the record does not hold.
    """
    drawn = charts.draw(record)
    return {
        "record.md": _fill(record, Markdown(), templates, "record.md.j2"),
        "record.html": _fill(record, Html(drawn), templates, "record.html.j2"),
    }


def _fill(record: dict[str, Any], writer: Markdown | Html, templates: Path, name: str) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # the writer escapes: it alone knows what is markup
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"show": numbers.show, "plain": plain, "code": tables.code}
    try:
        body = writer.finish(
            environment.get_template("body.j2").render(
                w=writer,
                record=record,
                t=tables,
                k=trace_tables,
                r=reservations,
                x=crossover,
                commands=commands(record["study"]["name"]),
            )
        )
        return environment.get_template(name).render(w=writer, record=record, body=body)
    except jinja2.TemplateError as error:
        raise UserError(f"cannot be rendered: {error}", where=f"templates/{name}") from error
