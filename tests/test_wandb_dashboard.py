"""scripts/wandb_dashboard.py: a report's tables and figures, offline, read back by W&B's own tool."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from script_modules import script
from test_tracking import logged, records

dashboard = script("wandb_dashboard")


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """W&B's files nowhere but in tmp_path."""
    for name in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb-home"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_report_becomes_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tables", "figures"):
        (tmp_path / "out" / name).mkdir(parents=True)
    (tmp_path / "out" / "tables" / "ruler.csv").write_text('method,score\nqevict,"50.0, about"\nshort\n')
    Figure(figsize=(1, 1)).savefig(tmp_path / "out" / "figures" / "curve.png")
    assert dashboard.main(["output_dir=out", "dir=there"]) == 0
    assert capsys.readouterr().out.startswith("1 tables and 1 figures in run ")
    [path] = (tmp_path / "there").glob("wandb/offline-run-*/run-*.wandb")
    found = logged(records(path))[0]
    assert (found["tables/ruler._type"], found["figures/curve._type"]) == ("table-file", "image-file")
    assert (found["tables/ruler.nrows"], found["tables/ruler.ncols"]) == (2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["output_dir=nowhere"], "output_dir=nowhere has no tables or figures; run scripts/report.py first"),
        (["report"], "report is no FIELD=VALUE; fields: output_dir, project"),
        (["mode=on"], "mode=on is unknown; choose one of offline, online"),
        (["colour=red"], "colour=red is no field of Arguments"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboard.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
