"""What the project reads of a checkout of the RULER repository: by parsing its files and never by running them.

Text constants only: the templates of constants.py, the needle and the noise of niah.py, the lines of a chain in
variable_tracking.py, the heading of a document in qa.py.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

_FOLDER = Path("scripts", "data", "synthetic")
FAMILIES = ("niah", "variable_tracking", "common_words_extraction", "freq_words_extraction", "qa")


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


def read(ruler_dir: str) -> Checkout:
    """The checkout at `ruler_dir`. Raises ValueError, naming the file, if it is missing or has another form."""
    folder = Path(ruler_dir) / _FOLDER
    niah, qa = folder / "niah.py", folder / "qa.py"
    assignment, copy = _chain_lines(folder / "variable_tracking.py")
    return Checkout(
        folder,
        _templates(folder / "constants.py"),
        _fillable(_constant(niah, "needle"), niah, {"type_needle_v": "", "key": "", "value": ""}, "value"),
        _fillable(_constant(niah, "haystack"), niah, {}),
        assignment,
        copy,
        _fillable(_constant(qa, "DOCUMENT_PROMPT"), qa, {"i": 1, "document": ""}, "document"),
    )


def _templates(path: Path) -> dict[str, Template]:
    for node in ast.walk(_tree(path)):
        if _assigns(node, "TASKS"):
            try:
                tasks = ast.literal_eval(node.value)
                return {family: _template(tasks[family], path) for family in FAMILIES}
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise _strange(path, f"TASKS ({type(error).__name__}: {error})") from error
    raise _strange(path, "TASKS")


def _template(task: dict[str, Any], path: Path) -> Template:
    template = Template(str(task["template"]), str(task["answer_prefix"]), int(task["tokens_to_generate"]))
    if template.text.count("{context}") != 1 or template.new_tokens < 1:
        raise ValueError("a template does not have {context} once, or no tokens to generate")
    for text in (template.text, template.answer_prefix):
        _fillable(text, path, dict.fromkeys(("context", "query", "type_needle_v", "num_v", "num_cw"), ""))
    return template


def _fillable(text: str, path: Path, values: dict[str, Any], needed: str = "") -> str:
    """`text`, if nothing but `values` is to be filled in, `needed` among them."""
    try:
        text.format(**values)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise _strange(
            path, f"a text that can be filled in ({type(error).__name__}: {error} in {text!r:.60})"
        ) from error
    if not text.strip() or (needed and f"{{{needed}}}" not in text):
        raise _strange(path, f"{{{needed}}} in {text!r:.60}")
    return text


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
    # The line that gives a name another name says twice what stands before a name.
    lines.sort(key=lambda line: line.partition("{0}")[0].strip() in line.partition("{0}")[2])
    copies = [line.partition("{0}")[0].strip() in line.partition("{0}")[2] for line in lines]
    if copies != [False, True]:
        raise _strange(path, f"the two lines of a chain (found: {lines})")
    return lines[0], lines[1]


def _constant(path: Path, name: str) -> str:
    """The text constant that is assigned to `name`."""
    for node in ast.walk(_tree(path)):
        if _assigns(node, name) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return node.value.value
    raise _strange(path, name)


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig"))
    except OSError:
        raise ValueError(
            f"{path} does not exist; set task.ruler_dir to a checkout of https://github.com/NVIDIA/RULER"
        ) from None
    except (SyntaxError, ValueError, RecursionError) as error:
        raise _strange(path, f"Python code ({error})") from error


def _assigns(node: ast.AST, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def _strange(path: Path, what: str) -> ValueError:
    return ValueError(f"{path} does not hold {what} in the form of RULER; check out a clean copy of it")
