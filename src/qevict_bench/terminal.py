"""Text for a terminal: widths in columns, cells of tables, lines that are not too long."""

from __future__ import annotations

import sys
import unicodedata
from io import TextIOWrapper


def allow_any_sign() -> None:
    """Signs that the terminal lacks show as "?" from now on, where they would end the program."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def plain(text: str) -> str:
    """On one line, without characters that steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def columns(text: str) -> int:
    """Columns that `text` takes: wide characters take two, combining ones none."""
    return sum(map(_columns, text))


def cut(text: str, width: int) -> str:
    """`text` on one line, in at most `width` columns; a cut shows as an ellipsis."""
    text = plain(text[: 10 * width])
    if columns(text) > width:
        while columns(text) > width - 1:
            text = text[:-1]
        text += "…"
    return text


def fitted(text: str, width: int) -> str:
    """`text` on one line, padded or cut to `width` columns."""
    text = cut(text, width)
    return text + " " * (width - columns(text))


def wrapped(text: str, width: int, indent: str = "", hanging: str = "") -> list[str]:
    """`text` in lines of at most `width` columns, broken between words if it can be.

    The first line begins with `indent`, the others with `hanging`.
    """
    lines, line, is_bare = [], indent, True
    for word in plain(text).split():
        if not is_bare and columns(line) + 1 + columns(word) > width:
            lines.append(line)
            line, is_bare = hanging, True
        line += word if is_bare else f" {word}"
        is_bare = False
        while columns(line) > width:
            head = line
            while columns(head) > width:
                head = head[:-1]
            lines.append(head)
            line = hanging + line[len(head) :]
    return [*lines, line]


def _columns(c: str) -> int:
    if unicodedata.category(c) in ("Mn", "Me"):
        return 0
    return 1 + (unicodedata.east_asian_width(c) in "WF")
