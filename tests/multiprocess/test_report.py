"""The report of a real run with a kill, a worker that computes wrongly and joins, looked at in a headless browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elaswave_spmd.report.history import history_of
from elaswave_spmd.report.page import page_of
from elaswave_spmd.report.recorded import RunReader
from elaswave_spmd.run_dir import read_events, read_summary
from tests.browser import Browser, browser
from tests.multiprocess.real_runs import SMALL, train, write_text

CHARTS = ("loss", "speed", "workers", "lost", "moved", "timeline")
SETTLED = "[...document.querySelectorAll('.chart')].every(chart => chart.firstElementChild)"
ROOT = Path(__file__).parents[2]
EVIL = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_text(folder)
    # The wrong one first: it is found by others of its stage, of which there may be none between a kill and a join.
    wrong, kill = "{step: 4, kind: miscompute, rank: 2, point: forward}", "{step: 9, kind: kill, rank: 1}"
    chaos = f"chaos.events=[{wrong},{kill},{{step: 12, kind: join}}]"
    words = ["mesh=dp2_pp2", "train.steps=40", "verify.rate=1", "run.trace=true", "elastic.replace=true", chaos]
    done = train(folder, *SMALL, *words)
    assert done.code == 0, done.err
    return folder / "run"


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "elaswave_spmd", "report", str(run)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{run / 'report.html'}\n"
    return (run / "report.html").as_uri()


def opened(found: Browser, address: str, *, width: int = 1200, dark: bool = False) -> None:
    found.open(address, width=width, dark=dark)
    found.wait_for(SETTLED)


def test_the_history_of_a_real_run_is_known(run: Path) -> None:
    history = history_of(RunReader(run).read())
    kinds = [incident.kind for incident in history.incidents]
    assert {"fail", "corrupt"} <= {*kinds} and history.state == "finished"
    assert history.first_plan is not None and history.first_plan.stages == ((0, 1), (2, 3))
    assert next(found for found in history.incidents if found.kind == "fail").before == history.first_plan
    assert {placed.rank for placed in history.placed} >= {0, 1, 2, 3}


def test_the_summary_counts_the_faults(run: Path) -> None:
    events, faults = read_events(run), read_summary(run)["faults"]
    for kind in ("fail", "corrupt", "join"):
        assert faults[kind] == sum(len(event["ranks"]) for event in events if event["event"] == kind)
    assert faults["fail"] == 2 and faults["corrupt"] == 1
    # A step with a fault may be shorter than the usual one, on a machine with other work: that is no gain.
    penalties = [event["penalty_ms"] for event in events if event["event"] == "recovered" and "penalty_ms" in event]
    assert penalties and faults["penalty_seconds"] == pytest.approx(sum(max(0.0, ms) for ms in penalties) / 1e3)


def test_the_page_has_all_charts_and_loads_nothing(page: str) -> None:
    with browser() as found:
        for width, dark in ((1200, False), (1200, True), (390, False)):
            opened(found, page, width=width, dark=dark)
            assert found.evaluate(f"{json.dumps(CHARTS)}.every(name => document.getElementById('chart-' + name))")
            assert found.evaluate("Bokeh.documents.length") == len(CHARTS)
            found.wait_for("document.documentElement.scrollWidth <= window.innerWidth")  # charts follow the window
            paper = found.evaluate("getComputedStyle(document.body).backgroundColor")
            assert paper == ("rgb(20, 20, 20)" if dark else "rgb(255, 255, 255)")
        assert found.problems == []
        assert {address.partition(":")[0] for address in found.requests} == {"file", "data"}
        assert {address for address in found.requests if address.startswith("file:")} == {page}


def test_the_keyboard_reaches_the_charts_and_the_tables(page: str) -> None:
    with browser() as found:
        opened(found, page)
        found.press("Tab")
        found.wait_for("document.activeElement.textContent === 'Skip to the summary'")
        found.press("Enter")
        found.wait_for("location.hash === '#summary'")
        for selector in (".chart", ".scroll"):
            assert found.evaluate(f"[...document.querySelectorAll('{selector}')].every(e => e.tabIndex === 0)")
            assert found.evaluate(
                f"[...document.querySelectorAll('{selector}')].every(e => e.getAttribute('aria-label'))"
            )
        found.evaluate("document.querySelector('summary').focus()")
        found.press("Enter")
        found.wait_for("document.querySelector('details').open")


def test_what_is_folded_is_printed(page: str) -> None:
    with browser() as found:
        opened(found, page)
        found.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        assert found.evaluate("[...document.querySelectorAll('details')].every(part => part.open)")
        found.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert found.evaluate("[...document.querySelectorAll('details')].every(part => !part.open)")
        assert found.pdf().startswith(b"%PDF")


@pytest.mark.mends("corrupt", "mismatch")  # the events of `run`, copied
def test_texts_of_a_run_are_never_run(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "config.yaml").write_text(f"model: {EVIL}\n")
    (copy / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    texts = {"message": EVIL, "mesh": EVIL, "model": EVIL, "reason": EVIL}
    (copy / "events.jsonl").write_text("".join(json.dumps(event | texts) + "\n" for event in events))
    text = page_of(RunReader(copy).read())
    assert "<img" not in text
    (tmp_path / "page.html").write_text(text)
    with browser() as found:
        opened(found, (tmp_path / "page.html").as_uri())
        # Beyond the escapes: the browser refuses a script that is not one of the page's own.
        found.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit = 1\">')")
        found.evaluate("new Promise(resolve => setTimeout(resolve, 200))")
        assert found.evaluate("window.hit === undefined")


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: m\n")
    (tmp_path / "page.html").write_text(page_of(RunReader(tmp_path).read()))
    with browser() as found:
        opened(found, (tmp_path / "page.html").as_uri())
        assert found.problems == []


def report(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elaswave_spmd", "report", *words], cwd=ROOT, capture_output=True, text=True
    )


def test_bad_input_is_refused_with_the_reason(run: Path, tmp_path: Path) -> None:
    done = report(str(tmp_path))
    assert done.returncode == 2 and "is no run directory" in done.stderr
    done = report(str(run), "--out", str(tmp_path))
    assert done.returncode == 2 and "is a directory" in done.stderr
    done = report(str(run), "--out", str(tmp_path / "none" / "a.html"))
    assert done.returncode == 2 and "cannot be written" in done.stderr


def test_without_bokeh_the_extra_is_named(run: Path) -> None:
    code = "import sys; sys.modules['bokeh'] = None; sys.argv = ['x/__main__.py', 'report', sys.argv[1]]\n"
    code += "from elaswave_spmd.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, str(run)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'elaswave-spmd[report]'" in done.stderr
