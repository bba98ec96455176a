"""The files of a report: tables, figures, the page, and a list of them, by which the next report knows its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from qevict_bench import figures
from qevict_bench.results import write_atomic
from qevict_bench.tables import FORMATS, Table

_ABOUT = "Written by `scripts/report.py`, which removes what it linked to here before and does not write again."
_LINK = re.compile(r"\]\(([^()/]+|\.\./figures/[^()/]+)\)")


@dataclass
class Made:
    """What has been made, by name: for the files."""

    tables: list[Table] = field(default_factory=list)
    figures: dict[str, Figure] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    """Of figures."""


def folders_in(output_dir: Path) -> dict[str, Path]:
    """tables, figures and report below output_dir, made if they are not there. Raises ValueError if one cannot be."""
    folders = {name: output_dir / name for name in ("tables", "figures", "report")}
    for folder in folders.values():
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"output_dir={output_dir} cannot be written ({error.strerror}); choose another") from None
    return folders


def write(folders: Mapping[str, Path], made: Made, text: str) -> str:
    """Write everything, `text` as the page, remove what only an older report wrote, and say it in a line."""
    contents = folders["tables"] / "README.md"
    old = _linked(contents)
    for table in made.tables:
        for ending, written in FORMATS.items():
            write_atomic(folders["tables"] / f"{table.name}.{ending}", written(table))
    for name, figure in made.figures.items():
        figures.save(figure, folders["figures"], name)
    write_atomic(contents, _contents(made))
    for path in old - _linked(contents):
        path.unlink(missing_ok=True)
    index = folders["report"] / "index.html"
    write_atomic(index, text)
    return (
        f"{len(made.tables)} tables in {folders['tables']} (md, tex, csv), {len(made.figures)} figures in "
        f"{folders['figures']} (png, pdf), and {index}"
    )


def _contents(made: Made) -> str:
    """Markdown that links to all tables and figures."""
    lines = [f"- [{t.heading}]({t.name}.md) ([tex]({t.name}.tex), [csv]({t.name}.csv))" for t in made.tables]
    drawn = [f"- [{made.titles[n]}](../figures/{n}.png) ([pdf](../figures/{n}.pdf))" for n in made.figures]
    return "\n".join(["# Tables and figures", "", _ABOUT, "", *lines, "", *drawn]).rstrip() + "\n"


def _linked(contents: Path) -> set[Path]:
    """Files of tables and figures that an older report's README.md links to. Raises ValueError if it is another's."""
    if not contents.exists():
        return set()
    text = contents.read_text(encoding="utf-8", errors="replace")
    if _ABOUT not in text:
        raise ValueError(f"{contents} is not of a report and would be overwritten; choose another output_dir")
    found = _LINK.findall(text)
    return {contents.parent / name for name in found if Path(name).suffix in (".md", ".tex", ".csv", ".png", ".pdf")}
