"""One document, two forms: the template says what stands in it, a writer how it is written.

Text given to a writer may hold `code`, **strong**, ~~struck out~~ and [text](#section); nothing
else is markup, and what comes from data is escaped.
"""

import html
import re
from dataclasses import dataclass, field
from typing import Any

SPECIAL = re.compile(r"[\\`*~\[\]|<]")


@dataclass
class Table:
    """Head and rows of inline text; ``numbers`` are the columns that are set to the right.

    empty: what is written in the place of a table without rows.
    """

    head: list[str]
    rows: list[list[str]]
    numbers: set[int] = field(default_factory=set)
    empty: str = "no figure of it in this record."

    def instead(self, caption: str) -> str:
        return f"{caption}: {self.empty}" if caption else self.empty[0].upper() + self.empty[1:]


def plain(text: object) -> str:
    """Text from data: none of its characters is markup."""
    return SPECIAL.sub(lambda match: "\\" + match.group(), str(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


class Markdown:
    """GitHub's Markdown."""

    html = False

    def inline(self, text: str) -> str:
        # Only a "<" that could open a tag needs an escape; "< 5" reads better as it is.
        text = re.sub(r"\\<(?=[A-Za-z/!?])", "&lt;", _one_line(text))
        return text.replace("\\<", "<")

    def h(self, level: int, text: str, anchor: str = "") -> str:
        # GitHub makes a heading's own anchor of its whole text.
        own = re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-")
        place = f'<a id="{anchor}"></a>\n\n' if anchor and anchor != own else ""
        return f"\n\n{place}{'#' * level} {self.inline(text)}\n\n"

    def p(self, text: str) -> str:
        return f"\n\n{self.inline(text)}\n\n"

    def para(self, caller) -> str:
        """A paragraph whose text stands between {% call %} and {% endcall %}."""
        return self.p(caller())

    def items(self, texts: list[str]) -> str:
        return "\n\n" + "\n".join(f"- {self.inline(text)}" for text in texts) + "\n\n"

    def verdict(self, verdict: str, says: str, texts: list[str]) -> str:
        return f"\n\n**{verdict.capitalize()}:** {self.inline(says)}\n" + self.items(texts)

    def table(self, table: Table, caption: str = "") -> str:
        if not table.rows:
            return self.p(table.instead(caption))

        def row(cells: list[str]) -> str:
            return "| " + " | ".join(self.inline(cell) for cell in cells) + " |"

        rule = ["--:" if i in table.numbers else "---" for i in range(len(table.head))]
        lines = [row(table.head), "|" + "|".join(rule) + "|", *map(row, table.rows)]
        title = f"**{self.inline(caption)}**\n\n" if caption else ""
        return f"\n\n{title}" + "\n".join(lines) + "\n\n"

    def code(self, text: str) -> str:
        return f"\n\n```sh\n{text.strip()}\n```\n\n"

    def chart(self, name: str, caption: str) -> str:
        return ""

    def fold(self, title: str, block: str) -> str:
        """A long block; a page shows it on demand."""
        return block

    def finish(self, text: str) -> str:
        """Blocks with one blank line between them."""
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


class Html:
    """The body of an HTML page, with its charts by name."""

    html = True

    def __init__(self, charts: dict[str, Any]):
        self.charts = charts
        self.sections: list[tuple[str, str]] = []

    def inline(self, text: str) -> str:
        kept: list[str] = []

        def keep(match: re.Match[str]) -> str:
            kept.append(html.escape(match.group(1)))
            return f"\0{len(kept) - 1}\0"

        text = re.sub(r"\\(.)", keep, _one_line(text))
        text = html.escape(text, quote=False)
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
        text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
        text = re.sub(r"~~(.+?)~~", r"<del>\1</del>", text)
        text = re.sub(r"\[([^\]]+)\]\((#[\w-]+)\)", r'<a href="\2">\1</a>', text)
        return re.sub(r"\0(\d+)\0", lambda match: kept[int(match.group(1))], text)

    def h(self, level: int, text: str, anchor: str = "") -> str:
        if level == 2:
            self.sections.append((anchor, self.inline(text)))
        name = f' id="{anchor}"' if anchor else ""
        return f"<h{level}{name}>{self.inline(text)}</h{level}>\n"

    def p(self, text: str) -> str:
        return f"<p>{self.inline(text)}</p>\n"

    def para(self, caller) -> str:
        """A paragraph whose text stands between {% call %} and {% endcall %}."""
        return self.p(caller())

    def items(self, texts: list[str]) -> str:
        return "<ul>" + "".join(f"<li>{self.inline(text)}</li>\n" for text in texts) + "</ul>\n"

    def verdict(self, verdict: str, says: str, texts: list[str]) -> str:
        return (
            f'<div class="verdict {verdict}"><p><span class="badge">{verdict}</span> '
            f"{self.inline(says)}</p>{self.items(texts)}</div>\n"
        )

    def table(self, table: Table, caption: str = "") -> str:
        if not table.rows:
            return self.p(table.instead(caption))

        def cells(row: list[str], tag: str) -> str:
            parts = []
            for i, text in enumerate(row):
                kind = ' class="n"' if i in table.numbers else ""
                scope = ' scope="col"' if tag == "th" else ""
                parts.append(f"<{tag}{scope}{kind}>{self.inline(text)}</{tag}>")
            return f"<tr>{''.join(parts)}</tr>\n"

        title = f"<caption>{self.inline(caption)}</caption>" if caption else ""
        body = "".join(cells(row, "td") for row in table.rows)
        return (
            f'<div class="scroll" tabindex="0"><table>{title}'
            f"<thead>{cells(table.head, 'th')}</thead><tbody>{body}</tbody></table></div>\n"
        )

    def code(self, text: str) -> str:
        return f"<pre><code>{html.escape(text.strip(), quote=False)}</code></pre>\n"

    def chart(self, name: str, caption: str) -> str:
        chart = self.charts.get(name)
        if chart is None:
            return ""
        parts = []
        for title, svg in chart.drawings:
            heading = f'<div class="drawing">{html.escape(title)}</div>' if title else ""
            parts.append(f'{heading}<div class="scroll" tabindex="0">{svg}</div>')
        keys = "".join(
            f'<li><span style="background:var({variable})"></span>{html.escape(label)}</li>'
            for variable, label in chart.legend
        )
        legend = f'<ul class="legend">{keys}</ul>' if keys else ""
        return (
            f"<figure>{legend}{''.join(parts)}"
            f"<figcaption>{self.inline(caption)}</figcaption></figure>\n"
        )

    def fold(self, title: str, block: str) -> str:
        """A long block that is shown on demand."""
        return f"<details><summary>{self.inline(title)}</summary>\n{block}</details>\n"

    def finish(self, text: str) -> str:
        return re.sub(r"\n{2,}", "\n", text).strip() + "\n"
