"""Our own items with documents: questions on one text or on several, and summaries."""

from __future__ import annotations

from tasks.longbench.world import NUMBERS, Draft, World


def chronicle(world: World) -> Draft:
    """Lives of twelve people, and a question on one fact of one of them."""
    texts, asked = [], []
    for _ in range(12):
        name, town, year, trade = world.person(), world.town(), world.year(), world.trade()
        texts.append(
            f"{name} was born in {town}. {world.filler(1)} In {year} {name} left for good and worked as a {trade}. "
            f"{world.filler(2)}"
        )
        asked += [
            (f"In which town was {name} born?", town),
            (f"In which year did {name} leave for good?", year),
            (f"What did {name} work as?", trade),
        ]
    question, answer = world.rng.choice(asked)
    return Draft("\n\n".join(texts), question, (answer, f"a {answer}") if "work" in question else (answer,))


def study(world: World) -> Draft:
    """A report on experiments; every fourth question is on one that it does not have."""
    sections = []
    answers: dict[str, str] = {}
    for number in NUMBERS:
        site, people = world.town(), world.rng.randint(12, 480)
        sections.append(
            f"Trial {number}. {world.filler(1)} It was carried out in {site} with {people} people. {world.filler(2)}"
        )
        answers |= {
            f"Where was trial {number} carried out?": site,
            f"How many people took part in trial {number}?": str(people),
        }
    answers |= dict.fromkeys(("Who paid for the trials?", "How long did the last trial take?"), "unanswerable")
    kinds = [question for question, answer in answers.items() if answer == "unanswerable"], list(answers)
    question = world.rng.choice(kinds[world.rng.random() > 0.25])
    return Draft("\n\n".join(sections), question, (answers[question],))


def passages(world: World) -> Draft:
    """Five firms and their founders in ten numbered passages; the question needs two of them."""
    texts, asked = [], []
    for _ in range(5):
        founder, seat, home = world.person(), world.town(), world.town()
        firm = f"{seat} {world.rng.choice(('Glassworks', 'Paper Mill', 'Tannery', 'Foundry', 'Brewery', 'Ropery'))}"
        texts.append(f"{firm}\nThe {firm} was founded by {founder} in {world.year()}. {world.filler(3)}")
        texts.append(f"{founder}\n{founder} grew up in {home}. {world.filler(3)}")
        asked.append((f"In which town did the founder of the {firm} grow up?", home))
    world.rng.shuffle(texts)
    question, answer = world.rng.choice(asked)
    return Draft("\n\n".join(f"Passage {i}:\n{text}" for i, text in enumerate(texts, 1)), question, (answer,))


def report(world: World) -> Draft:
    """Sections with one finding each; the findings are the summary."""
    sections, findings = [], []
    for title in ("Roads", "Schools", "Water", "Forests", "Trade", "Housing"):
        finding = (
            f"The office for {title.lower()} in {world.town()} spent {world.rng.randint(2, 90)} million and asks for "
            f"{world.rng.choice(NUMBERS)} more clerks."
        )
        sections.append(f"{title}\n{world.filler(3)} {finding} {world.filler(3)}")
        findings.append(finding)
    return Draft("\n\n".join(sections), "", (" ".join(findings),))


def minutes(world: World) -> Draft:
    """A council talks of six subjects; asked is what it decided on one."""
    speakers = [world.person() for _ in range(4)]
    lines, decided = [], []
    for subject in ("the bridge", "the fair", "the school roof", "the harbour", "the lamps", "the library"):
        cost, town = world.rng.randint(3, 400), world.town()
        decision = f"The council gives {cost} thousand for {subject} and asks a firm in {town} to do the work."
        talk = [f"{speaker}: {world.filler(1)}" for speaker in world.rng.sample(speakers, 3)]
        lines += [f"{speakers[0]}: We come to {subject}.", *talk, f"{speakers[0]}: {decision}"]
        decided.append((f"What was decided on {subject}?", decision))
    question, answer = world.rng.choice(decided)
    return Draft("\n".join(lines), question, (answer,))


def news(world: World) -> Draft:
    """Three reports of one event; their first sentences are the summary."""
    town, event = world.town(), world.rng.choice(("flood", "fire", "strike", "storm"))
    leads = (
        f"A {event} in {town} kept {world.rng.randint(20, 900)} families from their homes on Monday.",
        f"The mayor of {town}, {world.person()}, promised help within {world.rng.choice(NUMBERS)} days.",
        f"Trains to {town} stand still because of the {event}, and people are asked to go by way of {world.town()}.",
    )
    texts = [f"Passage {i}:\n{lead} {world.filler(6)}" for i, lead in enumerate(leads, 1)]
    return Draft("\n\n".join(texts), "", (" ".join(leads),))
