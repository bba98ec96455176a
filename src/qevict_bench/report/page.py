"""One self-contained HTML file: nothing in it is fetched from anywhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from qevict_bench.tables import Table, html

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Drawn:
    """A figure as SVG or PNG, and what it shows, for those who cannot see it; `narrow`: the same for a phone."""

    data: bytes
    kind: str
    alt: str
    narrow: bytes = b""


@dataclass(frozen=True)
class Fold:
    """Details: shut at first. `aside` stands beside the title."""

    title: str
    content: Sequence[Table | Drawn]
    aside: str = ""


@dataclass(frozen=True)
class Section:
    """A table's runs: what stands open, what makes its scores doubtful (line -> who has it), and details."""

    name: str
    title: str
    setting: Sequence[str]
    shown: Sequence[Table | Drawn]
    alarms: Mapping[str, Sequence[str]]
    folds: Sequence[Fold]
    aside: str = ""
    """Stands beside its name in the list of contents."""


def page(title: str, about: Sequence[str], sections: Sequence[Section], notes: Mapping[str, Sequence[str]]) -> str:
    """The whole file. `notes`: lines by heading, folded at the end."""
    links = "".join(map(_link, sections))
    paragraphs = "".join(f"<p>{_text(line)}</p>" for line in about)
    body = "\n".join(map(_section, sections))
    rest = "".join(
        _fold(head, _list([_text(line) for line in lines]), str(len(lines))) for head, lines in notes.items()
    )
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_text(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n'
        f"<header><h1>{_text(title)}</h1>{paragraphs}</header>\n<nav><ol>{links}</ol></nav>\n<main>\n{body}\n"
        + (f"<section><h2>Notes</h2>{rest}</section>\n" * bool(notes))
        + f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _link(section: Section) -> str:
    aside = f" <small>{_text(section.aside)}</small>" if section.aside else ""
    return f'<li><a href="#at_{_text(section.name)}">{_text(section.title)}</a>{aside}</li>'


def _section(section: Section) -> str:
    setting = "".join(f"<p>{_text(line)}</p>" for line in section.setting)
    shown = "".join(_content(each) for each in section.shown)
    said = [f"{_text(line)} <span>{_text(_who(runs))}</span>" for line, runs in section.alarms.items()]
    alarms = _fold("Before you believe the scores", _list(said), f"{len(said)} warnings") if said else ""
    folds = "".join(_fold(f.title, "".join(map(_content, f.content)), f.aside) for f in section.folds)
    return (
        f'<section id="at_{_text(section.name)}"><header><h2>{_text(section.title)}</h2>{setting}</header>\n'
        f"{shown}{alarms}{folds}</section>"
    )


def _content(each: Table | Drawn) -> str:
    if isinstance(each, Table):
        return html(each, each.part[:1].upper() + each.part[1:] or "Summary", setting=False)
    wide, narrow = (f"data:image/{each.kind};base64,{b64encode(data).decode()}" for data in (each.data, each.narrow))
    source = f'<source media="(max-width: 40rem)" srcset="{narrow}">' * bool(each.narrow)
    picture = f'<picture>{source}<img alt="{_text(each.alt)}" src="{wide}"></picture>'
    return f'<figure class="drawn">{picture}</figure>\n'


def _fold(title: str, content: str, aside: str) -> str:
    small = f"<small>{_text(aside)}</small>" if aside else ""
    return f"<details><summary>{_text(title)}{small}</summary>\n{content}</details>\n"


def _list(items: Sequence[str]) -> str:
    return f'<ul class="alarms">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def _who(runs: Sequence[str]) -> str:
    return "; ".join(runs) if len(runs) <= 8 else f"{'; '.join(runs[:7])}; and {len(runs) - 7} more runs"


def _text(text: str) -> str:
    return escape(" ".join(text.split()))
