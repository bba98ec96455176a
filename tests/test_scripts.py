"""Both scripts on tiny models: what they print, what they write, how they exit; and that gpu_check can fail."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from script_modules import script

ROOT = Path(__file__).parents[1]
BENCH = [
    "--model",
    "tiny",
    "--model-d",
    "tiny",
    "--repeats",
    "2",
    "--prompt-a",
    "48",
    "--new-a",
    "6",
    "--prompt-b",
    "256",
]
BENCH += ["--new-b", "10", "--event-slots", "2048", "--events", "3", "--prompt-d", "600"]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return script("bench_engine")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return script("gpu_check")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are faster on one; the scripts change both settings."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def test_bench_engine_prints_and_writes_every_case(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "new" / "bench.csv"
    assert bench.main([*BENCH, "--csv", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["case"] for row in rows} == set("abcd")
    for row in rows:
        assert float(row["min"]) <= float(row["median"]) <= float(row["max"])
    printed = capsys.readouterr().out.splitlines()
    assert [line[:1] for line in printed[2:]] == [row["case"] for row in rows]
    ratios = [row for row in rows if row["unit"] == "ratio"]
    assert len(ratios) == 1 + 3 * len(bench.COMPARED.split(";"))
    assert all(float(row["median"]) > 0 and row["n"] == "2" for row in ratios)
    by_name = {row["measure"]: float(row["median"]) for row in rows}
    assert by_name["windows, promotions"] >= 8
    assert by_name["windows, demotions"] >= 8
    assert by_name["held per head"] == pytest.approx(2048, rel=0.2)
    assert by_name["steady event, place + apply"] > 0
    assert by_name["full_kv - full_kv"] == 0


def test_pairs_alternate_and_ratios_are_taken_within_a_pair(bench: ModuleType) -> None:
    order: list[str] = []
    times = {"a": iter((2.0, 9.0, 4.0)), "b": iter((1.0, 3.0, 4.0))}

    def runner(side: str) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            order.append(side)
            return {"whole": next(times[side])}

        return run

    [row] = bench.in_turns("x", "a / b", runner("a"), runner("b"), 3)
    assert "".join(order) == "abbaab"
    assert row == ("x", "a / b, whole", 2.0, 1.0, 3.0, "ratio", 3, 4.0, 3.0)


def test_bench_engine_refuses_an_unknown_case(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--only", "a,x"])
    assert "x is no case; choose from a, b, c, d" in capsys.readouterr().err


def test_gpu_check_passes_on_the_cpu(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--device", "cpu", "--speed-seconds", "0", "--layers", "1", "--prompt", "300"]) == 0
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert f"torch {torch.__version__}" in first
    checks = [line for line in lines if not line.startswith("speed ")]
    assert all(line.startswith("pass  ") for line in checks)
    assert last == f"{len(checks)} of {len(checks)} checks pass"
    speed = [line for line in lines if line.startswith("speed ")]
    assert len(speed) == 3
    assert all(re.search(r"decode median +[\d.]+ ms", line) for line in speed)
    moves = [
        re.search(r"(\d+) promoted, (\d+) demoted", line)
        for line in checks
        if re.match(r"pass  \w+: qevict.* 0.2:", line)
    ]
    assert len(moves) == 6
    assert all(found is not None and int(found[2]) > 0 for found in moves)
    assert any(found is not None and int(found[1]) > 0 for found in moves)


def test_gpu_check_fails_where_the_device_computes_something_else(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny, built = check.tiny, []

    def disturbed(family: str, device: str) -> object:
        loaded = tiny(family, device)
        built.append(family)
        if len(built) % 2 == 0:  # the second of each pair is the device's
            loaded.model.model.layers[1].self_attn.k_proj.weight.mul_(1.2)
        return loaded

    monkeypatch.setattr(check, "tiny", disturbed)
    monkeypatch.setitem(check.GROUPS, "models", lambda device: check.check_model("llama", device))
    assert check.main(["--device", "cpu", "--only", "models"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[1:-1] if line.startswith("FAIL  llama: full_kv: logit gap")]
    assert re.fullmatch(r"\d+ of 5 checks pass", lines[-1])


def test_gpu_check_counts_a_crash_as_a_failure(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object, x: torch.Tensor, ref: object) -> object:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(check.PerToken, "encode", broken)
    assert check.main(["--device", "cpu", "--only", "codecs"]) == 1
    assert "FAIL  codec per token int2, float32: RuntimeError: no kernel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("margin", "shift", "good", "said"),
    [
        (1.0, 0.0, True, "tokens equal"),
        (1e-4, 2e-4, True, "near tie from step 1"),
        (1.0, 2.0, False, "tokens differ from step 1"),
    ],
)
def test_a_token_may_differ_only_at_a_near_tie(
    check: ModuleType, margin: float, shift: float, good: bool, said: str
) -> None:
    logits = torch.tensor([[[3.0, 0.0], [margin, 0.0]]])
    other = logits.clone()
    other[0, 1, 1] += shift
    tiers = [[torch.tensor([[0, 1], [0, 0]])]] * 2
    passed, text = check.compare(check.Run(logits, tiers), check.Run(other, tiers), 3.0, True)
    assert said in text
    assert passed is good


def test_different_units_are_found_at_their_step(check: ModuleType) -> None:
    logits = torch.tensor([[[3.0, 0.0], [2.0, 0.0]]])
    same, evicted, demoted = torch.tensor([[0, 1], [0, 0]]), torch.tensor([[0], [0]]), torch.tensor([[0, 1], [0, 1]])
    reference = check.Run(logits, [[same], [same]])
    for other in (evicted, demoted):
        passed, text = check.compare(reference, check.Run(logits, [[same], [other]]), 1e-3, True)
        assert not passed
        assert "kept units differ from step 1" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("arguments", [[], ["--device", "cuda"]])
def test_gpu_check_without_a_gpu_says_so_in_one_line(arguments: list[str]) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "gpu_check: torch sees no CUDA device; --device cpu tests the script itself\n"


def test_gpu_check_needs_neither_hydra_nor_datasets() -> None:
    code = "import sys; sys.path.insert(0, 'scripts'); import gpu_check; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"hydra", "omegaconf", "datasets", "wandb"} & set(done.stdout.split())
