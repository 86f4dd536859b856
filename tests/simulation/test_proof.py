"""The proof: its cells, its page, and that the first tuner fails the scenarios that are named after its faults."""

from pathlib import Path

import pytest
from msgspec import structs

from flyball_simulation import oracle
from flyball_simulation.proof import cells, contenders, matrix, scenarios, search
from flyball_simulation.proof.__main__ import main
from flyball_simulation.proof.cells import Cell
from flyball_simulation.result import Bounds
from flyball_simulation.workload import Phase

SCENARIOS = scenarios.scenarios()


def test_the_smoke_runs_every_contender_and_writes_the_page(tmp_path: Path) -> None:
    words = ["--smoke", "--seeds", "1", "--development", "--output", str(tmp_path), "--cache", str(tmp_path / "cache")]
    assert main([*words, "--processes", "1"]) == 0
    page = (tmp_path / "tuning-proof.md").read_text()
    assert "| smoke | 1.000 (256, 384) |" in page
    for name in ("oracle", "auto", "best single", "tuned on phase 1", "rules", "aimd", "vllm-default"):
        assert name in page
    assert "| 1 | goodput against the oracle of the cell" in page
    assert page.count("not run") > 1  # what was not run is not claimed
    assert str(tmp_path) not in page
    assert "<svg" in (tmp_path / "tuning-proof-matrix.svg").read_text()
    runs = sorted((tmp_path / "cache").iterdir())
    assert main([*words, "--processes", "1"]) == 0
    assert sorted((tmp_path / "cache").iterdir()) == runs
    next(one for one in runs if b'"cell":"smoke, shift","contender":"auto"' in one.read_bytes()).unlink()
    assert main([*words, "--cached"]) == 0  # an unfinished proof says what is missing
    assert "Not run: smoke, shift." in (tmp_path / "tuning-proof.md").read_text()


def test_other_tuners_are_compared_without_an_oracle(tmp_path: Path) -> None:
    words = ["--tuners", "--smoke", "--seeds", "2", "--development", "--output", str(tmp_path)]
    words += ["--cache", str(tmp_path / "cache"), "--processes", "1"]
    assert main(words) == 0
    page = (tmp_path / "tuning-proof-tuners.md").read_text()
    assert "| cell | auto | vllm-default | rules | aimd |" in page
    assert page.count(" ± ") == 2 * 4
    for name in ("vllm-default", "rules", "aimd"):
        assert f"- Against *{name}*: +" in page
    assert "worse in: none." in page
    assert not (tmp_path / "tuning-proof.md").exists()
    for run in (tmp_path / "cache").iterdir():
        if b'"cell":"smoke, shift"' in run.read_bytes():
            run.unlink()
    assert main([*words, "--cached"]) == 0
    assert "Not run: smoke, shift." in (tmp_path / "tuning-proof-tuners.md").read_text()


def test_runs_are_of_the_code_that_is_there_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "proof" / "package"  # as in a clone that is called so
    (folder / "proof").mkdir(parents=True)
    monkeypatch.setattr(contenders, "SERVING", (folder,))
    versions = []
    for name, text in (("code.py", "1"), ("code.py", "2"), ("proof/page.py", "3")):
        (folder / name).write_text(text)
        versions.append(contenders.code_version.__wrapped__(fixed=True))
    assert versions[0] != versions[1] == versions[2]  # how pages are written changes no run


def test_every_cell_has_a_load_and_a_name_of_its_own() -> None:
    names = [cell.name for cell in cells.matrix()]
    assert len(set(names)) == len(names)
    for cell in cells.matrix():
        drawn = cell.workload(1)
        assert drawn
        assert drawn[-1].at_s < cell.seconds
        assert all(one.input_len + one.output_len <= cell.setup.max_model_len for one in drawn)
        assert cell.workload(1) == drawn
        assert cell.workload(2) != drawn


def test_what_is_held_out_was_named_before() -> None:
    assert not set(cells.SEEDS) & set(cells.HELD_OUT_SEEDS)
    assert len(cells.HELD_OUT_SEEDS) == 5
    assert cells.held_out(Path("/no/such/folder")) == []


def test_the_first_phase_of_a_shift_is_as_long_as_it_was() -> None:
    shift = cells.shift()
    first = matrix.first_phase(shift)
    assert first.seconds == pytest.approx(shift.shift_times_s()[1])


def test_a_run_is_known_again_by_all_that_it_depends_on() -> None:
    one, other = cells.smoke()
    known = contenders.key(one, "auto", 1, None)
    assert known == contenders.key(one, "auto", 1, None)
    assert len({known, contenders.key(other, "auto", 1, None), contenders.key(one, "auto", 2, None)}) == 3


def test_under_fixed_limits_cells_that_differ_by_name_or_prior_are_one(tmp_path: Path) -> None:
    plain = structs.replace(cells.smoke()[0], minutes=0.1)
    other = structs.replace(
        plain, name="other", setup=structs.replace(plain.setup, prior=cells.wrong_prior(2.0).setup.prior)
    )
    run = contenders.cached(plain, contenders.FIXED, 1, (64, 256), tmp_path)
    assert contenders.known(other, contenders.FIXED, 1, (64, 256), tmp_path) == structs.replace(run, cell="other")
    assert contenders.known(other, "auto", 1, None, tmp_path) is None
    assert contenders.key(plain, "vllm-default", 1, None) == contenders.key(other, "vllm-default", 1, None)
    assert contenders.key(plain, "auto", 1, None) != contenders.key(other, "auto", 1, None)


@pytest.mark.parametrize("near", [None, (8, 64), (32, 256)])
def test_a_search_leaves_nothing_out_that_is_better(near: oracle.Limits | None, tmp_path: Path) -> None:
    grid = tuple((seqs, tokens) for tokens in (64, 256, 1024) for seqs in (64, 32, 8))
    setup = structs.replace(cells.CHAT_43, max_num_seqs=64, objectives=Bounds(ttft_s=0.5, itl_s=0.03))
    cell = Cell(name="small", setup=setup, phases=(Phase(mix="chat", rate=8.0, seconds=1.0),), minutes=0.1, grid=grid)
    work = cell.workload(1)
    whole = [oracle.run_static(setup, work, one, 1, cell.seconds).share_good for one in (*grid, *search.SINGLES)]
    found = search.find(cell, 1, tmp_path, near)
    assert found.shares[found.best] == max(whole)
    assert len(set(whole)) > 3


def test_there_and_back_is_counted_within_its_time() -> None:
    assert cells.turns_back([469, 800, 469], [0, 100, 200]) == 1
    assert cells.turns_back([469, 800, 469], [0, 100, 900]) == 0
    assert cells.turns_back([469, 469, 800, 700, 469], [0, 1, 2, 3, 4]) == 0


RULES_PASS = frozenset(
    {
        "a start with far too few sequences",
        "metrics are lost for 10 minutes",
        "the operator is down for 10 minutes",
        "evidence that is not a number",
    }
)
"""What the first tuner did right; a new one must not do worse there."""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.name for one in SCENARIOS])
def test_the_first_tuner_fails_the_scenarios_of_its_faults(scenario: scenarios.Scenario) -> None:
    verdict = scenarios.judge(scenario, "rules")
    assert verdict.passed == (scenario.name in RULES_PASS), verdict.figures


AUTO_PASSES = (
    "an objective between two histogram edges",
    "too little KV memory",
    "a start with far too few sequences",
    "a cold start",
)
"""A few that are soon run; `make proof` judges all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", AUTO_PASSES)
def test_the_tuner_passes(name: str) -> None:
    verdict = scenarios.judge(next(one for one in SCENARIOS if one.name == name), "auto")
    assert verdict.passed, verdict.figures
