"""One table in four formats: the same numbers in each, whatever signs its texts hold."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from math import inf

import pytest

from qevict_bench.statistics import Interval
from qevict_bench.tables import FORMATS, Missing, Number, Table, csv_text, grid, html, latex, markdown

TABLE = Table(
    "a_table",
    "fake: 50 % of R&D_1",
    ("method", "score", "− FullKV"),
    (
        ("qe_vict|x", Number(72.46, bold=True), Number(-1.25, 1, -3.04, 0.04, signed=True, mark="*")),
        ("<b>", Number(0.05, 3), Missing("infeasible: needs 0.204")),
        ("none", Missing("not run"), Number(0.2, 3, 0.1, inf)),
    ),
    ("n = 4; a < b",),
    ("a note ~ with ≤ and ≈",),
    "a part",
)
NUMBERS = ["72.5", "-1.2", "-3.0", "+0.0", "0.050", "0.200", "0.100"]
"""As rounded once: half to even on the binary value, and zero without a minus."""


class Page(HTMLParser):
    """Cells of the body, attributes, and whether every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "img", "br", "wbr", "source"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data", "poster"):
                self.links.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def tex_cells(text: str) -> list[list[str]]:
    """Cells of the rows of a tabular, as a reader sees them; fails on what would not compile."""
    assert text.count("{") - text.count("\\{") == text.count("}") - text.count("\\}")
    assert not re.search(r"(?<!\\)[%#]", text.partition("\n")[2].replace("{!}{%", ""))
    body = text.partition("\\midrule\n")[2].partition("\\bottomrule")[0]
    rows = [re.split(r"(?<!\\)&", line.removesuffix("\\\\")) for line in body.splitlines()]
    return [[_shown(cell) for cell in row] for row in rows]


def _shown(cell: str) -> str:
    cell = re.sub(r"\\(textbf|textit)\{((?:[^{}\\]|\\.)*)\}", r"\2", cell).replace("\\scriptsize", "")
    for tex, sign in {
        "$-$": "-",
        "\\textbar{}": "|",
        "\\textless{}": "<",
        "\\textgreater{}": ">",
        "{[}": "[",
        "\\_": "_",
    }.items():
        cell = cell.replace(tex, sign)
    return " ".join(re.sub(r"[{}]", "", cell).split())


def test_numbers_are_the_same_in_every_format() -> None:
    lines = [line for line in csv_text(TABLE).splitlines() if not line.startswith("#")]
    values = list(csv.DictReader(lines))
    from_csv = [v for row in values for k, v in row.items() if v and k != "method" and not k.endswith("note")]
    assert from_csv == [*NUMBERS, "not reached"]
    page = Page(html(TABLE))
    for row, tex, md in zip(page.rows[1:], tex_cells(latex(TABLE)), markdown(TABLE).splitlines()[6:9], strict=True):
        assert row == _marked(tex)
        cells = [cell.strip().replace("**", "") for cell in re.split(r"(?<!\\)\|", md)[1:-1]]
        plain = [re.sub(r"^\*(.*)\*$", r"\1", cell).replace("\\|", "|").replace("&lt;", "<") for cell in cells]
        assert plain == tex
    assert [number for number in NUMBERS if number not in markdown(TABLE)] == []


def _marked(cells: list[str]) -> list[str]:
    """In HTML a mark stands behind the value, before its interval."""
    return [re.sub(r"^(\S+) (\[.*\])(\*)$", r"\1\3 \2", cell) for cell in cells]


def test_what_is_missing_says_why_and_has_no_number() -> None:
    row = next(row for row in csv.DictReader(csv_text(TABLE).splitlines()[3:]) if row["method"] == "none")
    assert row["score"] == ""
    assert row["score note"] == "not run"
    assert Page(html(TABLE)).rows[2][2] == "infeasible: needs 0.204"
    assert "*not run*" in markdown(TABLE)
    assert "\\textit{not run}" in latex(TABLE)


def test_signs_of_the_formats_are_escaped() -> None:
    assert "| qe_vict\\|x |" in markdown(TABLE)
    assert "50 \\% of R\\&D\\_1: a part" in latex(TABLE)
    assert "qe\\_vict\\textbar{}x" in latex(TABLE)
    assert "| &lt;b> |" in markdown(TABLE)
    assert "<b><" not in html(TABLE).replace("<b>72.5</b>", "")
    assert [row[0] for row in Page(html(TABLE)).rows[1:]] == ["qe_vict|x", "<b>", "none"]
    starred = Table("t", "t", ("a", "b"), (("x", "1"), ("[y", "2"), ("*z", "3")))
    assert not re.search(r"\\\\\n[\[*]", latex(starred))


def test_only_finite_numbers_sort_as_numbers() -> None:
    shown = html(Table("t", "t", ("a", "b"), (("x", Number(2.5)), ("y", Number(inf)), ("z", "0.05"), ("w", "w" * 40))))
    assert '<td class="num" data-v="2.5">2.5</td>' in shown
    assert '<td class="none">not reached</td>' in shown
    assert '<td class="text">0.05</td>' in shown
    assert f'<td class="text long">{"w" * 40}</td>' in shown


def test_bold_and_marks_reach_every_format() -> None:
    assert "**72.5**" in markdown(TABLE)
    assert "\\textbf{72.5}" in latex(TABLE)
    assert "<b>72.5</b>" in html(TABLE)
    assert "72.5,best," in csv_text(TABLE)
    assert "+0.0]*" in markdown(TABLE)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (Number(-0.04), "0.0"),
        (Number(-0.04, signed=True), "+0.0"),
        (Number.of(Interval(1, 0.5, 2), 0), "1 [0, 2]"),
        (Number(inf, 3), "not reached"),
        (Number(2.0, 2, 1.0, 3.0, mark="≈"), "2.00 [1.00, 3.00]≈"),
    ],
)
def test_a_number_is_rounded_once(number: Number, shown: str) -> None:
    assert number.shown == shown


def test_wide_tables_are_shrunk_and_empty_ones_are_whole() -> None:
    wide = Table("w", "w", tuple("abcdefghijk"), (tuple("abcdefghijk"),))
    assert "\\resizebox" in latex(wide)
    assert "\\resizebox" not in latex(TABLE)
    empty = Table("e", "e", ("a", "b"), ())
    for written in FORMATS.values():
        assert written(empty)
    assert grid(("a",), [("b",)]) == "| a |\n| --- |\n| b |"
