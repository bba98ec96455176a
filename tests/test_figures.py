"""Figures from data made by hand: what is drawn has the data's values, and files come out the same twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from qevict_bench import figures
from qevict_bench.figures import KINDS, WIDTH, Band, Ledger, Missed, Point, Residency

CAPTION = "method on model, 2 streams of text; small model: not a reproduction."
AT = (0, 8, 16)


def band(*values: float) -> Band:
    return Band(AT, values, [value - 0.01 for value in values], [value + 0.02 for value in values])


def missed(shift: float) -> Missed:
    return Missed(band(0.1 + shift, 0.2, 0.3), band(0.4, 0.5, 0.6), band(0.05, 0.1, 0.15))


def ledger_of(*values: float) -> Ledger:
    return Ledger(band(*(1024 * value for value in values)), band(*values), [(0.1, values[0]), (0.3, values[1])])


RESIDENCY = Residency((0, 5, 13, 21), (0, 8, 16), [[0, 0], [1, 2], [3, -1]], "layer 2")
POINTS = {"R1": Point(0.02, 0.01, 0.04), "R2": Point(0.05, 0.05, 0.05)}


FIGURES: dict[str, Callable[[], Figure]] = {
    "fmm": lambda: figures.missed_mass({"R1": missed(0), "R2": missed(0.1), "R3": missed(0.2)}, CAPTION),
    "mass": lambda: figures.mass_bars(
        {"R1": {"sink": 0.4, "full": 0.1, "evicted": 0.5}}, {"R1": {"full": 1.0}}, CAPTION
    ),
    "residency": lambda: figures.residency({"R1": RESIDENCY}, CAPTION),
    "routing": lambda: figures.routing({"Full": POINTS}, {"deployed": POINTS}, {"R1": {1: POINTS["R1"]}}, CAPTION),
    "ledger": lambda: figures.ledger({"R1": ledger_of(0.1, 0.2, 0.1)}, ledger_of(0.3, 0.4, 0.3), CAPTION),
}


@pytest.mark.parametrize("name", list(FIGURES))
def test_files_with_embedded_fonts(name: str, tmp_path: Path) -> None:
    png, pdf = figures.save(FIGURES[name](), tmp_path, name)
    assert png.read_bytes().startswith(b"\x89PNG")
    data = pdf.read_bytes()
    assert data.startswith(b"%PDF")
    assert b"/FontFile2" in data  # TrueType, embedded
    assert b"/Type3" not in data
    again = figures.save(FIGURES["mass"](), tmp_path, "again") if name == "mass" else []
    assert not again or [path.read_bytes() for path in again] == [png.read_bytes(), data]


@pytest.mark.parametrize("name", list(FIGURES))
def test_nothing_is_cut_off(name: str) -> None:
    """All that is drawn lies on the page, which is one column wide; the caption is on it."""
    figure = FIGURES[name]()
    figure.draw_without_rendering()
    assert figure.get_figwidth() == WIDTH
    page, drawn = figure.bbox, figure.get_tightbbox()
    inches = [page.width / figure.dpi, page.height / figure.dpi]
    assert drawn.x0 >= -0.02
    assert drawn.y0 >= -0.02
    assert drawn.x1 <= inches[0] + 0.02
    assert drawn.y1 <= inches[1] + 0.02
    assert " ".join(figure.texts[0].get_text().split()) == CAPTION


def test_missed_mass_has_a_panel_per_run_and_three_curves_in_percent() -> None:
    figure = FIGURES["fmm"]()
    panels = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title() for ax in panels] == ["R1", "R2", "R3"]
    lines = panels[1].get_lines()
    assert [line.get_linestyle() for line in lines] == ["-", "--", ":"]
    assert list(lines[0].get_xdata()) == list(AT)
    assert list(lines[0].get_ydata()) == pytest.approx([20, 20, 30])
    assert list(lines[1].get_ydata()) == pytest.approx([40, 50, 60])
    assert list(lines[2].get_ydata()) == pytest.approx([5, 10, 15])
    shade = panels[1].collections[0].get_paths()[0].vertices[:, 1]
    assert (shade.min(), shade.max()) == pytest.approx((19, 32))
    same = Missed(missed(0).evicted, missed(0).evicted, missed(0).hindsight)
    two_tiers = figures.missed_mass({"R1": same}, CAPTION).axes[0].get_lines()
    assert [line.get_linestyle() for line in two_tiers] == ["-", ":"]
    assert panels[0].get_ylim() == panels[2].get_ylim()
    assert panels[0].get_ylim()[1] > 62


def test_mass_bars_add_up_to_the_shares() -> None:
    first, second = FIGURES["mass"]().axes[:2]
    wide = {to_hex(bar.get_facecolor()).upper(): bar.get_width() for bar in first.patches}
    assert wide == pytest.approx(
        {KINDS["sink"]: 40, KINDS["full"]: 10, KINDS["quantized"]: 0, KINDS["recent"]: 0, KINDS["evicted"]: 50}
    )
    assert [text.get_text() for text in first.texts] == ["40", "10", "50"]
    assert sum(bar.get_width() for bar in second.patches) == pytest.approx(100)


def test_residency_colours_each_unit_by_its_kind() -> None:
    panel = FIGURES["residency"]().axes[0]
    mesh = panel.collections[0]
    shades = [[to_hex(mesh.cmap(mesh.norm(kind))).upper() for kind in row] for row in mesh.get_array()]
    names = ["sink", "full", "quantized", "recent"]
    sink, full, quantized, recent = (KINDS[name] for name in names)
    assert shades == [[sink, sink], [full, quantized], [recent, "#FFFFFF"]]
    assert mesh.get_coordinates()[:, 0, 1].tolist() == [0, 5, 13, 21]
    assert mesh.get_coordinates()[0, :, 0].tolist() == [0, 8, 16]
    assert panel.get_title() == "R1: layer 2"


def test_routing_draws_points_with_their_intervals() -> None:
    churn, lir, by_span = FIGURES["routing"]().axes[:3]
    for ax, scale in ((churn, 1), (lir, 100)):
        [points, low, high] = [line for line in ax.get_lines() if line.get_marker() in ("o", "_")]
        assert list(points.get_ydata()) == pytest.approx([0.02 * scale, 0.05 * scale])
        assert list(low.get_ydata()) == pytest.approx([0.01 * scale, 0.05 * scale])
        assert list(high.get_ydata()) == pytest.approx([0.04 * scale, 0.05 * scale])
        assert [label.get_text() for label in ax.get_xticklabels()] == ["R1", "R2"]
    assert [label.get_text() for label in by_span.get_xticklabels()] == ["1"]


def test_ledger_draws_bytes_shares_and_streams_beside_the_worst_case() -> None:
    size, share, against = FIGURES["ledger"]().axes[:3]
    lines = {line.get_label(): list(line.get_ydata()) for line in size.get_lines()}
    assert lines["R1"] == pytest.approx([0.1, 0.2, 0.1])  # KiB
    assert lines["oscillation"] == pytest.approx([0.3, 0.4, 0.3])
    lines = {line.get_label(): list(line.get_ydata()) for line in share.get_lines()}
    assert lines["R1"] == pytest.approx([10, 20, 10])
    assert against.collections[0].get_offsets().tolist() == [[0.1, pytest.approx(10)], [0.3, pytest.approx(20)]]
    assert [text.get_text() for text in against.get_legend().get_texts()] == ["R1", "oscillation"]


def test_colours_and_markers_tell_eight_runs_apart() -> None:
    runs = {f"run {number}": {4: Point(0.1, 0.1, 0.1)} for number in range(8)}
    ax = figures.routing({"Full": POINTS}, {"deployed": POINTS}, runs, CAPTION).axes[2]
    drawn = [line for line in ax.get_lines() if line.get_marker() not in ("_", "None")]
    assert len({line.get_color() for line in drawn}) == len({line.get_marker() for line in drawn}) == 8


def test_an_undefined_number_leaves_a_gap() -> None:
    nothing = Point(float("nan"), float("nan"), float("nan"))
    figure = figures.routing({"Full": {"R1": nothing}}, {"deployed": {"R1": nothing}}, {}, CAPTION)
    figure.draw_without_rendering()
