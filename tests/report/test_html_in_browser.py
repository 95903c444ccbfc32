"""The page in a real browser: what a reader gets by pointer, by keyboard and by link."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diff.test_compare import audit, logits, one
from tests.report.chromium import Browser, chromium_binary, running
from tests.report.pages import HOSTILE, hostile_audit, page
from trace_audit.text import display_bytes

BINARY = chromium_binary()
pytestmark = pytest.mark.skipif(BINARY is None, reason="no chromium or google-chrome on the path")
TIP = "document.getElementById('tip')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert BINARY is not None
    with running(BINARY) as started:
        yield started


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(audit(third=logits(0.3))), encoding="ascii")
    return path.as_uri()


def tip(browser: Browser) -> str:
    text: str = browser.evaluate(f"{TIP}.hidden ? '' : {TIP}.textContent")
    return text


def rows(browser: Browser) -> list[list[str]]:
    """Cells of the tip's tables."""
    cells: list[list[str]] = browser.evaluate(
        f"[...{TIP}.querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    return cells


def problems(browser: Browser) -> list[object]:
    """Errors, refused resources and requests of anything but the page itself."""
    bad = ("Runtime.exceptionThrown", "Log.entryAdded")
    found: list[object] = [e for e in browser.events if e.get("method") in bad]
    for event in browser.events:
        if event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                found.append(url)
    return found


def test_a_link_opens_its_token_with_both_sides_best(browser: Browser, address: str) -> None:
    browser.open(f"{address}#t-0-2-7")
    token = one(audit(third=logits(0.3)), "noisy").details.tokens([2 * 32 + 7])[0]
    text = tip(browser)
    assert "position 12, sequence s2, step 7" in text
    assert f"id {token.token_id}" in text
    assert "phase n/a, launch n/a" in text
    assert f"best token: {token.change}" in text
    found = rows(browser)
    for top in (token.baseline_top, token.candidate_top):
        for entry in top:
            cells = next(
                r
                for r in found
                if r[0] == entry.text and float(r[1]) == pytest.approx(entry.logprob, rel=1e-4)
            )
            assert cells[2].endswith("%")
    assert browser.evaluate("document.activeElement.id") == "t-0-2-7"
    assert problems(browser) == []


def test_pointing_at_a_token_shows_it_and_leaving_hides_it(browser: Browser, address: str) -> None:
    browser.open(address)
    assert tip(browser) == ""
    browser.hover("#t-1-3-4")
    assert "sequence s3, step 4" in tip(browser)
    browser.hover("h1")
    browser.wait(f"{TIP}.hidden")


def test_a_token_in_a_table_is_described_too(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.hover(".tokens [data-t]")
    key = browser.evaluate("document.querySelector('.tokens [data-t]').dataset.t")
    _, sequence, step = key.split("-")
    assert f"sequence s{sequence}, step {step}" in tip(browser)


def test_keys_move_through_a_sequence_and_escape_closes(browser: Browser, address: str) -> None:
    browser.open(f"{address}#t-0-2-7")
    browser.press("ArrowRight")
    assert "step 8" in tip(browser)
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    assert "step 6" in tip(browser)
    browser.press("End")
    assert "step 31" in tip(browser)
    browser.press("Home")
    assert "step 0" in tip(browser)
    browser.press("Enter")
    assert browser.evaluate("location.hash") == "#t-0-2-0"
    browser.press("Escape")
    assert tip(browser) == ""


def test_a_sequence_is_one_stop_of_the_tab_key(browser: Browser, address: str) -> None:
    browser.open(f"{address}#t-0-2-7")
    stops = browser.evaluate(
        "[...document.querySelectorAll('div.text')].map("
        "t => t.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert set(stops) == {1}


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (1400, True), (420, False)])
def test_nothing_is_wider_than_the_window(
    browser: Browser, address: str, width: int, dark: bool
) -> None:
    browser.open(f"{address}#t-0-2-7", width=width, dark=dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    box = browser.evaluate(
        f"(() => {{ const r = {TIP}.getBoundingClientRect();"
        "return [r.left, r.top, r.right, r.bottom]; })()"
    )
    assert box[0] >= 0
    assert box[1] >= 0
    assert box[2] <= width
    assert box[3] <= 900
    assert problems(browser) == []


def test_hostile_text_runs_nothing(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(page(hostile_audit()), encoding="ascii")
    browser.open(path.as_uri())
    assert browser.evaluate("document.scripts.length") == 2
    assert browser.evaluate("document.images.length") == 0
    body = browser.evaluate("document.body.innerText")
    browser.hover("[id^='t-']")
    described = tip(browser)
    assert "<script>" in described
    assert all(display_bytes(data) in body for data in HOSTILE)
    assert problems(browser) == []
