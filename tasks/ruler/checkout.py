"""What the project reads of a checkout of the RULER repository: by parsing its files and never by running them.

Text constants only: the templates of constants.py, the needle and the noise of niah.py, the lines of a chain in
variable_tracking.py, the heading of a document in qa.py; and the essays that its download script leaves.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard

_FOLDER = Path("scripts", "data", "synthetic")
FAMILIES = ("niah", "variable_tracking", "common_words_extraction", "freq_words_extraction", "qa")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Template:
    """`text` has {context} once; it and `answer_prefix` hold other names in braces."""

    text: str
    answer_prefix: str
    new_tokens: int


@dataclass(frozen=True)
class Checkout:
    """The texts of one checkout. `assignment` and `copy` take {0} = the new name and {1} = number or old name."""

    folder: Path
    """Where data scripts lie, with the downloads in json/."""
    templates: dict[str, Template]
    needle: str
    noise_line: str
    assignment: str
    copy: str
    document: str

    def fingerprint(self) -> str:
        """Hash of all texts."""
        texts = [self.needle, self.noise_line, self.assignment, self.copy, self.document]
        texts += [repr(self.templates[family]) for family in FAMILIES]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def essays(self) -> tuple[str, ...]:
        """Sentences of the essays, split after full stops (RULER splits with NLTK's punkt)."""
        return _sentences(self.folder / "json" / "PaulGrahamEssays.json")


def read(ruler_dir: str) -> Checkout:
    """The checkout at `ruler_dir`. Raises ValueError, naming the file, if it is missing or has another form."""
    folder = Path(ruler_dir) / _FOLDER
    niah = _tree(folder / "niah.py")
    assignment, copy = _chain_lines(folder / "variable_tracking.py")
    return Checkout(
        folder,
        _templates(folder / "constants.py"),
        _constant(niah, folder / "niah.py", "needle"),
        _constant(niah, folder / "niah.py", "haystack"),
        assignment,
        copy,
        _constant(_tree(folder / "qa.py"), folder / "qa.py", "DOCUMENT_PROMPT"),
    )


def _templates(path: Path) -> dict[str, Template]:
    for node in ast.walk(_tree(path)):
        if _assigns(node, "TASKS"):
            try:
                tasks = ast.literal_eval(node.value)
                return {family: _template(tasks[family]) for family in FAMILIES}
            except (ValueError, KeyError, TypeError) as error:
                raise _strange(path, f"TASKS ({type(error).__name__}: {error})") from error
    raise _strange(path, "TASKS")


def _template(task: dict[str, Any]) -> Template:
    template = Template(str(task["template"]), str(task["answer_prefix"]), int(task["tokens_to_generate"]))
    if template.text.count("{context}") != 1:
        raise ValueError("a template does not have {context} once")
    return template


def _chain_lines(path: Path) -> tuple[str, str]:
    """The two f-strings that make a chain: one gives a name a number, the other a name another name."""
    lines = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.JoinedStr):
            constants = [str(part.value) for part in node.values if isinstance(part, ast.Constant)]
            if "=" in "".join(constants) and len(node.values) - len(constants) == 2:
                number = iter((0, 1))
                parts = [str(p.value) if isinstance(p, ast.Constant) else f"{{{next(number)}}}" for p in node.values]
                lines.append("".join(parts))
    if len(lines) != 2:
        raise _strange(path, f"the two lines of a chain (found: {lines})")
    return lines[0], lines[1]


def _constant(tree: ast.Module, path: Path, name: str) -> str:
    """The text constant that is assigned to `name`."""
    for node in ast.walk(tree):
        if _assigns(node, name) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return node.value.value
    raise _strange(path, name)


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(
            f"{path} does not exist; set task.ruler_dir to a checkout of https://github.com/NVIDIA/RULER"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise _strange(path, f"Python code ({error})") from error


def _assigns(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def _strange(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} does not hold {what} in the form of RULER; check out a clean copy of it")


@lru_cache(maxsize=2)
def _sentences(path: Path) -> tuple[str, ...]:
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["text"].split()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{path} is missing or damaged; run download_paulgraham_essay.py in its folder, or leave out subsets with "
            "essays"
        ) from None
    return tuple(_SENTENCE_END.split(" ".join(text)))
