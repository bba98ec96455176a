"""vt: a number, a name for it, and names for names, scattered over noise. All names of the number are the answer."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from string import ascii_uppercase

from tasks.ruler.fit import Body, Draft
from tasks.ruler.structure import chain
from tasks.ruler.wording import Wording


def draft(name: str, context_length: int, rng: Random, wording: Wording) -> Draft:
    """Draw names, number and depths of one example and of the solved one before it."""
    spec = chain(context_length)
    shot = _chain("", spec.hops, spec.shot_letters, rng, wording)
    solved = shot.build(spec.shot_lines)
    prompt = f"{solved.context}{solved.question}{solved.answer_prefix}"
    return _chain(name, spec.hops, spec.name_letters, rng, wording, f"{prompt} {' '.join(solved.answers)}\n\n")


def _chain(name: str, hops: int, letters: int, rng: Random, wording: Wording, shot: str = "") -> Draft:
    variables: list[str] = []
    while len(variables) <= hops:
        drawn = "".join(rng.choices(ascii_uppercase, k=letters))
        if drawn not in variables:
            variables.append(drawn)
    value = str(rng.randint(10_000, 99_998))
    lines = [wording.assignment(variables[0], value)]
    lines += [wording.copy(new, old) for old, new in pairwise(variables)]
    depths = sorted(rng.random() for _ in lines)

    def body(num_units: int) -> Body:
        pieces = [wording.noise_line] * num_units
        spans = []
        for i, (depth, line, variable) in enumerate(zip(depths, lines, variables, strict=True)):
            position = round(depth * num_units) + i
            start = sum(len(piece) + 1 for piece in pieces[:position]) + line.index(variable)
            pieces.insert(position, line)
            spans.append((start, start + len(variable)))
        return Body("\n".join(pieces), tuple(spans))

    return Draft(
        id=name,
        subset="vt",
        frame=wording.vt(value, len(variables)),
        answers=tuple(variables),
        max_new_tokens=wording.new_tokens("vt"),
        body=body,
        shot=shot,
    )
