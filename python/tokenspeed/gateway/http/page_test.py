# SPDX-License-Identifier: MIT
"""The page at / in a headless Chromium, in front of a real gateway and a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed.gateway.testing.browser import Browser, installed
from tokenspeed.gateway.testing.fake_engine import Step, replying
from tokenspeed.gateway.testing.running import RunningGateway, ids
from tokenspeed.rpc.lane.wire import TokenizedGenerateReqInput

KEY = "sk-page"
ANSWER = """# Title
Some **bold** `code` and <img src=x onerror="document.title='pwned'"> & [link](https://example.org/a_b).

```python
print("<b>no</b>")
```

- one
- two
  1. deep

| a | b |
|---|---|
| 1 | <script>document.title='pwned'</script> |

[bad](javascript:alert(1)) done 🙂"""
ENTER, ESCAPE, SHIFT = "\ue007", "\ue00c", "\ue008"
DONE = "document.querySelector('#send').textContent === 'Send'"

needs_browser = pytest.mark.skipif(not installed(), reason="chromium and chromium-driver are not installed")


def scripted(request: TokenizedGenerateReqInput) -> Iterator[Step]:
    """The answer above, cached in part; words for ever when the prompt asks for them."""
    if ids("forever")[0:7] == request.input_ids[-len(ids("forever[assistant]")) - 1 :][:7]:
        while True:
            yield Step(ids("word "), delay_s=0.005)
    steps = list(replying(ids(ANSWER), per_step=3)(request))
    for step in steps:
        yield Step(step.tokens, step.finish, cached=8, delay_s=0.001)


@pytest.fixture(scope="module")
def gateway() -> Iterator[RunningGateway]:
    with RunningGateway([scripted], ["--api-key", KEY]) as running:
        yield running


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def page(gateway: RunningGateway, browser: Browser) -> Browser:
    """A new chat with the key typed in."""
    browser.resize(1200, 800)
    browser.open(gateway.url("/"))
    browser.run("localStorage.clear(); sessionStorage.clear()")
    browser.open(gateway.url("/"))
    browser.type("#key", KEY)
    browser.log()
    return browser


def test_the_page_is_one_file_that_loads_nothing_and_may_run_only_its_own_script(gateway: RunningGateway) -> None:
    status, headers, body = gateway.request("GET", "/")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "unsafe" not in policy
    text = body.decode()
    assert " src=" not in text and "innerHTML" not in text and KEY not in text


@needs_browser
def test_a_chat_streams_as_safe_markdown_with_times_and_cached_tokens(page: Browser) -> None:
    page.type("#input", "Hello\nthere")  # Enter sends
    page.until(DONE + " && document.querySelector('.turn.assistant pre')")
    assert page.run("return document.querySelector('.turn.assistant h3').textContent") == "Title"
    assert page.text(".turn.assistant strong") == "bold"
    assert page.text(".turn.assistant pre code") == 'print("<b>no</b>")'
    assert page.text(".turn.assistant ol li") == "deep"
    assert "<script>" in page.text(".turn.assistant td")
    assert page.run("return document.querySelectorAll('.turn img, .turn script').length") == 0
    links = page.run("return [...document.querySelectorAll('.turn a')].map(a => a.href)")
    assert links == ["https://example.org/a_b"]
    assert page.text(".turn.assistant .text").endswith("[bad](javascript:alert(1)) done 🙂")
    assert page.run("return document.title") == "TokenSpeed"
    readout = page.text(".readout")
    assert "first token" in readout and "tokens/s" in readout and "8 cached" in readout
    assert page.log() == []


@needs_browser
def test_sampling_fields_and_the_whole_conversation_are_sent(gateway: RunningGateway, page: Browser) -> None:
    page.type("#temperature", "0")
    page.type("#max_tokens", "40")
    page.type("#seed", "7")
    page.type("#system", "Be brief.")
    for text in ("first", "second"):
        page.type("#input", text + ENTER)
        number = 1 + (text == "second")
        page.until(DONE + " && document.querySelectorAll('.turn.assistant').length === arguments[0]", number)
    assert "ended by length" in page.text(".readout")
    sent = gateway.engines[0].seen.requests[-1]
    sampling = sent.sampling_params
    assert (sampling.max_new_tokens, sampling.top_k, sampling.seed is not None) == (40, 1, True)
    prompt = bytes(token - 3 for token in sent.input_ids if token >= 3).decode()
    assert prompt.startswith("[system]Be brief.[user]first[assistant]# Title")
    assert prompt.endswith("[user]second[assistant]")
    page.open(gateway.url("/"))
    assert page.run("return document.querySelector('#max_tokens').value") == "40"


@needs_browser
def test_shift_enter_breaks_the_line_and_escape_stops_an_answer(gateway: RunningGateway, page: Browser) -> None:
    page.type("#input", "a" + SHIFT + ENTER + SHIFT + "forever")
    assert page.run("return document.querySelector('#input').value") == "a\nforever"
    page.type("#input", ENTER)
    page.until("document.querySelector('.turn.assistant .text').textContent.includes('word word')")
    page.type("#input", ESCAPE)
    page.until(DONE)
    assert page.text(".error") == "stopped"
    assert page.text(".turn.assistant .text").startswith("word word")
    page.run("document.querySelector('#clear').click()")
    assert page.run("return document.querySelectorAll('.turn').length") == 0


@needs_browser
def test_workers_kv_blocks_and_cache_hits_are_shown_live(gateway: RunningGateway, page: Browser) -> None:
    page.type("#input", "hi" + ENTER)
    page.until(DONE)
    page.until("document.querySelector('.worker .state.ready')")
    assert page.text(".worker b") == gateway.urls[0]
    page.until("document.querySelector('#workers').textContent.includes('of 1024 blocks')")
    page.until("/cache hits\\d+ \\(\\d+ %\\)/.test(document.querySelector('#server-facts').textContent)")
    assert "fake-model" in page.text("#model")
    page.until("document.querySelector('#rate polyline')?.getAttribute('points')")


@needs_browser
def test_a_wrong_key_is_said_and_a_right_one_heals(page: Browser) -> None:
    page.type("#key", "x")
    page.type("#input", "hi" + ENTER)
    page.until(DONE)
    assert "API key is required" in page.text(".turn.assistant .error")
    page.until("document.querySelector('#workers').textContent.includes('API key is required')")
    page.run("document.querySelector('#key').value = ''")
    page.type("#key", KEY)
    page.type("#input", "hi" + ENTER)
    page.until(DONE + " && document.querySelector('.turn.assistant pre')")
    page.until("document.querySelector('.worker')")


@needs_browser
def test_narrow_windows_have_the_settings_behind_a_button_and_nothing_runs_over(page: Browser) -> None:
    page.resize(500, 700)
    page.type("#input", "hi" + ENTER)
    page.until(DONE)
    wide = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    shown = "document.querySelector('#side').offsetParent !== null"
    assert not page.run(f"return {wide} || {shown}")
    page.click("#toggle")
    assert page.run(f"return {shown} && !({wide})")


@needs_browser
def test_the_theme_follows_the_system_until_it_is_chosen(page: Browser, tmp_path: Path) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    page.click("#theme")
    dark = page.run(background)
    page.click("#theme")
    light = page.run(background)
    assert dark != light
    page.screenshot(tmp_path / "light.png")
    assert (tmp_path / "light.png").stat().st_size > 1000


@needs_browser
def test_an_error_without_json_is_said_by_its_status(page: Browser) -> None:
    page.run("window.fetch = async () => new Response('<html>', { status: 502, statusText: 'Bad Gateway' })")
    page.type("#input", "hi" + ENTER)
    page.until(DONE + " && document.querySelector('.turn.assistant .error')")
    assert page.text(".turn.assistant .error") == "HTTP 502 Bad Gateway"
