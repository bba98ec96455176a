"""One table, written as Markdown, LaTeX, CSV or HTML.

A number is rounded once, in `Number`; the formats only arrange its texts, so they cannot disagree.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from math import isfinite

from qevict_bench.statistics import Interval

NOT_REACHED = "not reached"
"""What stands for an end of an interval that is infinite."""


@dataclass(frozen=True)
class Number:
    """A cell with a value, in the unit of its column. `low` and `high`: ends of its interval, if it has one.

    `signed` shows a plus too. `mark` stands behind it (the table's notes say what it means). `bold`: better than all it
    is compared with, beyond noise.
    """

    value: float
    decimals: int = 1
    low: float | None = None
    high: float | None = None
    signed: bool = False
    mark: str = ""
    bold: bool = False

    @classmethod
    def of(cls, found: Interval, decimals: int = 1, *, signed: bool = False, mark: str = "") -> Number:
        return cls(found.value, decimals, found.low, found.high, signed, mark)

    @property
    def text(self) -> str:
        return self._rounded(self.value)

    @property
    def ends(self) -> tuple[str, str] | None:
        """Texts of the interval's ends."""
        if self.low is None or self.high is None:
            return None
        return self._rounded(self.low), self._rounded(self.high)

    @property
    def interval(self) -> str:
        """ "[low, high]", or nothing."""
        return f"[{', '.join(self.ends)}]" if self.ends else ""

    @property
    def shown(self) -> str:
        return " ".join(filter(None, (self.text, self.interval))) + self.mark

    def _rounded(self, value: float) -> str:
        if not isfinite(value):
            return NOT_REACHED
        sign = "+" if self.signed else ""
        return f"{round(value, self.decimals) + 0.0:{sign}.{self.decimals}f}"


@dataclass(frozen=True)
class Missing:
    """A cell without a value, and why."""

    reason: str


Cell = Number | Missing | str


@dataclass(frozen=True)
class Table:
    """`name` is its file's; `title` one line; `setting` says what was run, `notes` how to read it: a line each.

    `part`: which of several tables of one title it is. `columns` are heads; a unit stands in its head. Every row has a
    cell per column.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    setting: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    part: str = ""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)

    @property
    def heading(self) -> str:
        """Title and part."""
        return f"{self.title}: {self.part}" if self.part else self.title

    def column(self, name: str) -> list[Cell]:
        return [row[self.columns.index(name)] for row in self.rows]


def plain(cell: Cell) -> str:
    """A cell as text, without emphasis."""
    return cell.shown if isinstance(cell, Number) else cell.reason if isinstance(cell, Missing) else cell


# ---- Markdown ----


def markdown(table: Table) -> str:
    """With title, setting and notes."""
    parts = [f"### {table.heading}", "  \n".join(table.setting), grid(table.columns, table.rows), *table.notes]
    return "\n\n".join(filter(None, parts)) + "\n"


def grid(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """The lines of a Markdown table."""
    lines = [
        [_md(text) for text in columns],
        ["---"] * len(columns),
        *([_md_cell(cell) for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _md_cell(cell: Cell) -> str:
    if isinstance(cell, Number) and cell.bold:
        return " ".join(filter(None, (f"**{cell.text}**", cell.interval))) + cell.mark
    return f"*{_md(cell.reason)}*" if isinstance(cell, Missing) and cell.reason else _md(plain(cell))


def _md(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


# ---- LaTeX ----

_TEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "−": "$-$",
    "–": "--",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≈": r"$\approx$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "†": r"\dag{}",
    "Ω": r"$\Omega$",
    "|": r"\textbar{}",
    "…": r"\ldots{}",
}
_LATIN = "ÀÁÂÄÇÈÉÊËÌÍÎÏÑÒÓÔÖÙÚÛÜàáâäçèéêëìíîïñòóôöùúûü"
"""Other signs that pdflatex sets with its default encoding."""
_WIDE = 9
"""More columns than this are shrunk to the width of the text."""


def latex(table: Table) -> str:
    """A floating table that needs booktabs and graphicx."""
    numeric = [any(isinstance(cell, Number) for cell in column) for column in zip(*table.rows, strict=True)]
    layout = "".join("r" if number else "l" for number in numeric) or "l" * len(table.columns)
    lines = [" & ".join(map(_tex, table.columns)), *(" & ".join(map(_tex_cell, row)) for row in table.rows)]
    body = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", f"{lines[0]} \\\\", r"\midrule"]
    body += [*(f"{line} \\\\" for line in lines[1:]), r"\bottomrule", r"\end{tabular}"]
    if len(table.columns) > _WIDE:
        body = [r"\resizebox{\linewidth}{!}{%", *body, "}"]
    about = [_tex(line) for line in (*table.setting, *table.notes)]
    below = [r"\par\smallskip\raggedright\footnotesize", " ".join(about)] if about else []
    caption = [
        rf"\caption{{{_tex(table.heading)}}}",
        rf"\label{{tab:{re.sub(r'[^a-z0-9-]+', '-', table.name.lower())}}}",
    ]
    whole = [
        "% needs booktabs and graphicx",
        r"\begin{table}",
        r"\centering\small",
        *caption,
        *body,
        *below,
        r"\end{table}",
    ]
    return "\n".join(whole) + "\n"


def _tex_cell(cell: Cell) -> str:
    if isinstance(cell, Missing):
        return rf"\textit{{{_tex(cell.reason)}}}" if cell.reason else ""
    if isinstance(cell, str):
        return _tex(cell)
    value = rf"\textbf{{{_tex(cell.text)}}}" if cell.bold else _tex(cell.text)
    interval = rf" {{\scriptsize {_tex(cell.interval)}}}" if cell.interval else ""
    return value + interval + _tex(cell.mark)


def _tex(text: str) -> str:
    """With a minus before numbers. Signs that TeX would read are escaped, those that its fonts lack named by their code
    point; [ and * could follow a line's end."""
    escaped = "".join(_TEX.get(sign) or _tex_sign(sign) for sign in " ".join(text.split()))
    return re.sub(r"^([\[*])", r"{\1}", re.sub(r"(?<![\w.])-(?=\d)", "$-$", escaped))


def _tex_sign(sign: str) -> str:
    return sign if (sign.isascii() and sign.isprintable()) or sign in _LATIN else f"[U+{ord(sign):04X}]"


# ---- CSV ----


def csv_text(table: Table) -> str:
    """Title, setting and notes are lines that begin with #; intervals and notes have columns of their own.

    A number's mark, a missing cell's reason, and that a number is bold ("best") stand in the column of notes.
    """
    stream = StringIO()
    for line in (table.heading, *table.setting, *table.notes):
        stream.write(f"# {' '.join(line.split())}\n")
    columns = [_csv_column(name, table.column(name)) for name in table.columns]
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([head for heads, _ in columns for head in heads])
    for cells in zip(*(column for _, column in columns), strict=True):
        writer.writerow([text for texts in cells for text in texts])
    return stream.getvalue()


def _csv_column(name: str, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    numbers = [cell for cell in cells if isinstance(cell, Number)]
    ends = any(cell.ends for cell in numbers)
    notes = any(map(_csv_note, cells))
    heads = [name] + [f"{name} low", f"{name} high"] * ends + [f"{name} note"] * notes
    lines = []
    for cell in cells:
        value = cell.text if isinstance(cell, Number) else cell if isinstance(cell, str) else ""
        both = list((cell.ends if isinstance(cell, Number) else None) or ("", ""))
        lines.append([value, *both * ends, *[_csv_note(cell)] * notes])
    return heads, lines


def _csv_note(cell: Cell) -> str:
    if isinstance(cell, Number):
        return " ".join(filter(None, (cell.mark, "best" if cell.bold else "")))
    return cell.reason if isinstance(cell, Missing) else ""


# ---- HTML ----

_LONG = 32
"""A text of more signs than this goes over several lines."""


def html(table: Table, title: str = "", setting: bool = True) -> str:
    """A <figure> with caption, a table in a box of its own that scrolls, and notes. Heads are buttons that sort.

    On a page that has said so before, `title` stands for the table's own, and its setting is left out.
    """
    title = _html(title or table.heading)
    heads = "".join(f'<th scope="col"><button type="button">{_html(name)}</button></th>' for name in table.columns)
    lines = "\n".join(f"<tr>{_html_row(row)}</tr>" for row in table.rows)
    about = "".join(f"<p>{_html(line)}</p>" for line in table.setting * setting)
    notes = "".join(f"<li>{_html(line)}</li>" for line in table.notes)
    name = max([len(plain(row[0])) for row in table.rows], default=0)
    return (
        f'<figure class="table" id="{_html(table.name)}"><figcaption><h3>{title}</h3>{about}</figcaption>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}">'
        f'<table style="--name:{name}ch"><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody></table></div>\n" + f'<ul class="notes">{notes}</ul>' * bool(notes) + "</figure>\n"
    )


def _html_row(row: Sequence[Cell]) -> str:
    first, *others = row
    name = re.sub(r"([_,=])", r"\1<wbr>", _html(first)) if isinstance(first, str) else _html_text(first)
    return f'<th scope="row">{name}</th>' + "".join(map(_html_cell, others))


def _html_cell(cell: Cell) -> str:
    if isinstance(cell, Number) and isfinite(cell.value):
        return f'<td class="num" data-v="{cell.value!r}">{_html_text(cell)}</td>'
    kind = "text" if isinstance(cell, str) else "none"
    kind += " long" * (len(plain(cell)) > _LONG) + " longer" * (len(plain(cell)) > 3 * _LONG)
    return f'<td class="{kind}">{_html_text(cell)}</td>'


def _html_text(cell: Cell) -> str:
    if not isinstance(cell, Number):
        return _html(plain(cell))
    value = f"<b>{_html(cell.text)}</b>" if cell.bold else _html(cell.text)
    mark = f"<sup>{_html(cell.mark)}</sup>" if cell.mark else ""
    return value + mark + (f' <span class="ci">{_html(cell.interval)}</span>' if cell.interval else "")


def _html(text: str) -> str:
    return escape(" ".join(text.split()))


FORMATS: dict[str, Callable[[Table], str]] = {"md": markdown, "tex": latex, "csv": csv_text}
"""What a table is written as, by the ending of its file."""
