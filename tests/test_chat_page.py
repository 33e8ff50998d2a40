"""The chat page in a real browser: Chromium without a window, skipped where there is none.

The server is a script (tests/scripted_server.py). Every test also holds that the page asked nobody but its own server,
and that the browser had nothing to complain of.
"""

import json
import shutil
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright
from scripted_server import LOST, UNTIL_LEFT, Reply, ScriptedServer, delta, ending, event, refusal, scripted_server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def only_server() -> Iterator[ScriptedServer]:
    with scripted_server() as server:
        yield server


@pytest.fixture
def server(only_server: ScriptedServer) -> ScriptedServer:
    only_server.begin()
    return only_server


@pytest.fixture(scope="module")
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(locale="en-US", color_scheme="light") as context:
        context.set_default_timeout(5000)
        yield context


@pytest.fixture
def complaints() -> list[str]:
    """What the browser logs as an error; a test that means to cause one empties it."""
    return []


@pytest.fixture
def page(context: BrowserContext, server: ScriptedServer, complaints: list[str]) -> Iterator[Page]:
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(server.url)
    yield page
    page.evaluate("localStorage.clear()")
    page.close()
    assert {url for url in asked if not url.startswith((server.url, "data:"))} == set()
    assert complaints == []


def ask(page: Page, question: str) -> None:
    page.get_by_label("Your message").fill(question)
    page.keyboard.press("Enter")


def answers(page: Page, text: str) -> None:
    """The last answer is whole, and is this."""
    expect(page.locator(".answer").last).to_have_text(text)
    expect(page.locator("#send")).to_be_visible()


# --- Talking ---


def test_an_answer_is_seen_as_it_comes(page: Page, server: ScriptedServer):
    rest = threading.Event()
    server.will(delta(role="assistant", content=""), delta(content="A river "), rest, delta(content="flows."), ending())
    ask(page, "What is a river?")
    expect(page.locator(".answer")).to_have_text("A river")
    rest.set()
    answers(page, "A river flows.")
    expect(page.locator(".foot")).to_contain_text("12 tokens in")
    assert server.bodies == [
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "What is a river?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_a_question_takes_the_conversation_along_until_a_new_one_begins(page: Page, server: ScriptedServer):
    for number in range(3):
        server.will(delta(content=f"Answer {number}."), ending())
    ask(page, "First?")
    answers(page, "Answer 0.")
    ask(page, "Second?")
    answers(page, "Answer 1.")
    page.get_by_role("button", name="New chat").click()
    ask(page, "Third?")
    answers(page, "Answer 2.")
    assert [[message["content"] for message in body["messages"]] for body in server.bodies] == [
        ["First?"],
        ["First?", "Answer 0.", "Second?"],
        ["Third?"],
    ]


@pytest.mark.parametrize("way", ["button", "Escape"])
def test_stopping_keeps_the_text_and_hangs_up(page: Page, server: ScriptedServer, way: str):
    server.will(delta(content="As far as "), UNTIL_LEFT)
    server.will(delta(content="Yes."), ending())
    ask(page, "Tell me everything")
    expect(page.locator(".answer")).to_have_text("As far as")
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    answers(page, "As far as")
    expect(page.locator(".foot")).to_contain_text("You stopped it.")
    assert server.was_left.wait(5)
    ask(page, "Go on?")
    answers(page, "Yes.")
    assert [message["content"] for message in server.bodies[1]["messages"]] == [
        "Tell me everything",
        "As far as ",
        "Go on?",
    ]


def test_another_answer_replaces_the_last(page: Page, server: ScriptedServer):
    server.will(delta(content="Red."), ending())
    server.will(delta(content="Blue."), ending())
    ask(page, "A colour?")
    answers(page, "Red.")
    page.get_by_role("button", name="Answer again").click()
    answers(page, "Blue.")
    assert server.bodies[0] == server.bodies[1]
    assert page.locator(".answer").count() == 1


def test_a_question_can_be_taken_back_and_changed(page: Page, server: ScriptedServer):
    server.will(delta(content="Red."), ending())
    ask(page, "A colour?")
    answers(page, "Red.")
    page.get_by_role("button", name="Edit the question").click()
    expect(page.get_by_label("Your message")).to_have_value("A colour?")
    expect(page.get_by_label("Your message")).to_be_focused()
    assert page.locator(".turn").count() == 0


def test_an_answer_that_was_cut_says_so(page: Page, server: ScriptedServer):
    server.will(delta(content="Once upon"), ending("length"))
    ask(page, "A story")
    expect(page.locator(".foot")).to_contain_text("Cut at the length limit")


# --- What a model writes ---


def test_thinking_is_folded_and_not_sent_back(page: Page, server: ScriptedServer):
    server.will(delta(reasoning_content="Let me see."), delta(content="Four."), ending())
    server.will(delta(content="Five."), ending())
    ask(page, "2 + 2?")
    answers(page, "Four.")
    expect(page.get_by_text("Let me see.")).to_be_hidden()
    page.get_by_text("What it thought").click()
    expect(page.get_by_text("Let me see.")).to_be_visible()
    ask(page, "2 + 3?")
    answers(page, "Five.")
    assert "Let me see." not in json.dumps(server.bodies[1])


def test_what_a_model_or_server_writes_stays_text(page: Page, server: ScriptedServer, complaints: list[str]):
    bad = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
    call = {"index": 0, "id": "1", "function": {"name": bad, "arguments": bad}}
    server.will(
        delta(reasoning_content=bad), delta(content=f"{bad}\n```\n{bad}\n```"), delta(tool_calls=[call]), ending()
    )
    server.replies.append(refusal(400, bad))
    ask(page, bad)
    expect(page.locator(".answer p")).to_have_text(bad)
    expect(page.locator(".answer pre")).to_have_text(bad)
    expect(page.locator(".tool")).to_contain_text(bad)
    ask(page, bad)
    expect(page.get_by_role("alert")).to_contain_text(bad)
    assert page.locator("img").count() == 0
    assert page.title() == "minigpt"
    assert all("400" in complaint for complaint in complaints)
    complaints.clear()


def test_a_tool_call_is_put_together_and_shown(page: Page, server: ScriptedServer):
    server.will(
        delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": "weather", "arguments": '{"city": '}}]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '"Paris"}'}}]),
        ending("tool_calls"),
    )
    ask(page, "Rain in Paris?")
    expect(page.locator(".tool")).to_contain_text("weather")
    expect(page.locator(".turn pre")).to_have_text('{"city": "Paris"}')


def test_code_between_fences_is_a_block_of_its_own(page: Page, server: ScriptedServer):
    server.will(delta(content="Look:\n```py"), delta(content="thon\nif x:\n    y\n```\nDone.\n"), ending())
    ask(page, "Code?")
    expect(page.locator(".answer pre")).to_have_text("if x:\n    y")
    assert page.locator(".answer > *").all_text_contents() == ["Look:", "if x:\n    y", "Done."]
    assert "mono" in page.locator(".answer pre").evaluate("node => getComputedStyle(node).fontFamily")


READ_EVENTS = """async ([bytes, cuts]) => {
    const parts = [0, ...cuts].map((cut, place) => new Uint8Array(bytes.slice(cut, cuts[place])));
    const stream = new ReadableStream({ start(out) { parts.forEach((part) => out.enqueue(part)); out.close(); } });
    const read = [];
    for await (const data of eventsOf(stream)) read.push(data);
    return read;
}"""


def test_a_stream_may_be_cut_at_any_byte(page: Page):
    lines = (": hello", "", "data: 河水 🌊", "", "event: x", "data:one", "data: two", "", "data: [DONE]", "", "")
    for newline in ("\n", "\r\n", "\r"):
        stream = newline.join(lines).encode() + b": end"  # the last event ends where it is sure that its line does
        every_byte = list(range(1, len(stream)))
        for cuts in [*([cut] for cut in every_byte), every_byte]:
            read = page.evaluate(READ_EVENTS, [list(stream), cuts])
            assert read == ["河水 🌊", "one\ntwo", "[DONE]"], (newline, cuts)


def test_an_answer_that_arrives_byte_by_byte_is_whole(page: Page, server: ScriptedServer):
    whole = delta(content="河水从山上流下来 🌊") + ending()
    server.will(*(whole[place : place + 1] for place in range(len(whole))))
    ask(page, "河?")
    answers(page, "河水从山上流下来 🌊")


def test_reading_further_up_is_not_interrupted(page: Page, server: ScriptedServer):
    more, last = threading.Event(), threading.Event()
    server.will(delta(content="line\n" * 100 + "A"), more, delta(content="\nline" * 20 + "B"), last, ending())
    ask(page, "Long")
    expect(page.locator(".answer")).to_contain_text("A")
    to_bottom = "area => area.scrollHeight - area.clientHeight - area.scrollTop"
    area = page.locator("#scroll")
    assert area.evaluate(to_bottom) < 2  # it went along
    area.evaluate("area => { area.scrollTop = 50; }")
    more.set()
    expect(page.locator(".answer")).to_contain_text("B")
    assert area.evaluate("area => area.scrollTop") == 50
    last.set()
    expect(page.locator("#send")).to_be_visible()


# --- What goes wrong ---

REPLIES = {
    "API key": refusal(401, "no key"),
    "busy. Try again in 7 s": refusal(429, "the queue is full", **{"Retry-After": "7"}),
    "did not accept this: the message is too long.": refusal(400, "the message is too long"),
    "The server failed (500): out of memory.": refusal(500, "out of memory"),
    "The server broke off: out of memory.": Reply(
        [delta(content="So"), event({"error": {"message": "out of memory"}})]
    ),
    "The connection broke": Reply([delta(content="So"), LOST]),
    "The connection broke before": Reply([delta(content="So")]),
}


@pytest.mark.parametrize("said", REPLIES)
def test_an_error_says_what_to_do_and_the_question_can_be_asked_again(
    page: Page, server: ScriptedServer, complaints: list[str], said: str
):
    server.replies.append(REPLIES[said])
    server.will(delta(content="Here."), ending())
    ask(page, "Where?")
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_role("alert")).to_contain_text("ry again")
    page.get_by_role("button", name="Try again").click()
    answers(page, "Here.")
    expect(page.get_by_role("alert")).to_be_hidden()
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["Where?"]
    complaints.clear()


def test_a_question_without_an_answer_is_not_sent_with_the_next(
    page: Page, server: ScriptedServer, complaints: list[str]
):
    server.replies.append(refusal(500, "out of memory"))
    server.will(delta(content="Here."), ending())
    ask(page, "Where?")
    expect(page.get_by_role("alert")).to_be_visible()
    ask(page, "And now?")
    answers(page, "Here.")
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["And now?"]
    complaints.clear()


def test_a_server_that_is_gone_is_told_of(browser: Browser):
    with scripted_server() as server, browser.new_context(locale="en-US") as context:
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_function("document.getElementById('model').textContent")
        server.shutdown()
        server.server_close()
        ask(page, "Are you there?")
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        expect(page.locator(".question")).to_contain_text("Are you there?")


# --- Settings ---


def test_settings_reach_the_server_and_survive_a_reload(page: Page, server: ScriptedServer):
    values = {
        "Temperature": "0.7",
        "Top p": "0.9",
        "Top k": "40",
        "Repetition penalty": "1.1",
        "Longest answer": "64",
        "Seed": "0",
        "System message": "Be brief.",
        "API key": "secret",
    }
    page.get_by_role("button", name="Settings").click()
    for label, value in values.items():
        page.get_by_label(label).fill(value)
    page.reload()
    server.will(delta(content="Yes."), ending())
    ask(page, "Well?")
    answers(page, "Yes.")
    sent = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "max_tokens": 64,
        "seed": 0,
    }
    assert {name: value for name, value in server.bodies[0].items() if name in sent} == sent
    assert server.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert server.keys == ["Bearer secret"]


def test_settings_of_another_tab_are_seen_before_they_are_used(
    page: Page, context: BrowserContext, server: ScriptedServer
):
    other = context.new_page()
    other.goto(server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.7")
    other.get_by_role("button", name="Settings").click()
    expect(other.get_by_label("Temperature")).to_have_value("0.7")
    other.close()


def test_a_setting_outside_its_limits_is_brought_inside(page: Page):
    page.get_by_role("button", name="Settings").click()
    for label, typed, kept in (
        ("Temperature", "9", "2"),
        ("Top p", "0", "0.01"),
        ("Top k", "2.4", "2"),
        ("Seed", "-1", "0"),
    ):
        page.get_by_label(label).fill(typed)
        page.keyboard.press("Tab")
        expect(page.get_by_label(label)).to_have_value(kept)
    assert page.evaluate("settings()") == {"temperature": 2, "top_p": 0.01, "top_k": 2, "seed": 0}


def test_a_setting_that_is_emptied_is_the_servers_again(page: Page):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_role("button", name="Empty all of them").click()
    assert page.evaluate("settings()") == {}
    assert page.evaluate("localStorage.length") == 0


# --- Keyboard, languages, colours ---


def test_enter_takes_the_word_of_an_input_method_and_sends_only_after_it(page: Page, server: ScriptedServer):
    server.will(delta(content="好。"), ending())
    page.get_by_label("Your message").focus()
    keyboard = page.context.new_cdp_session(page)
    keyboard.send("Input.imeSetComposition", {"text": "ni hao", "selectionStart": 6, "selectionEnd": 6})
    page.keyboard.press("Enter")
    assert page.locator(".turn").count() == 0
    keyboard.send("Input.insertText", {"text": "你好"})
    page.keyboard.press("Enter")
    answers(page, "好。")
    assert server.bodies[0]["messages"][0]["content"] == "你好"


def test_the_enter_that_ends_a_composition_in_safari_does_not_send(page: Page):
    page.get_by_label("Your message").fill("你好")
    page.get_by_label("Your message").dispatch_event("keydown", {"key": "Enter", "keyCode": 229})
    assert page.locator(".turn").count() == 0


def test_shift_and_enter_start_a_new_line(page: Page):
    page.get_by_label("Your message").fill("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    expect(page.get_by_label("Your message")).to_have_value("one\ntwo")
    assert page.locator(".turn").count() == 0


def test_the_page_speaks_the_browsers_language_until_another_is_chosen(browser: Browser, server: ScriptedServer):
    with browser.new_context(locale="zh-CN") as context:
        page = context.new_page()
        page.goto(server.url)
        expect(page.get_by_role("button", name="发送")).to_be_visible()
        page.get_by_role("button", name="English").click()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.reload()
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        assert page.locator("html").get_attribute("lang") == "en"


def test_both_languages_say_the_same_things(page: Page):
    english, chinese = page.evaluate("Object.values(TEXTS).map((texts) => Object.keys(texts))")
    assert english == chinese


def test_dark_and_light_follow_the_system_until_one_is_chosen(page: Page):
    def is_dark() -> bool:
        return page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 25, 28)"

    assert not is_dark()
    page.emulate_media(color_scheme="dark")
    assert is_dark()
    page.get_by_role("button", name="Light").click()
    assert not is_dark()
    page.reload()
    assert not is_dark()
    page.get_by_role("button", name="Dark").click()
    assert is_dark()
    page.emulate_media(color_scheme="light")  # what was chosen is the system's choice again: the page follows it
    assert not is_dark()


CONTRAST = """([text, back]) => {
    const luminance = (name) => {
        const probe = document.createElement("i");
        document.body.append(probe);
        probe.style.color = `var(--${name})`;
        const rgb = getComputedStyle(probe).color.match(/[0-9.]+/g).map((part) => part / 255);
        probe.remove();
        const [r, g, b] = rgb.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const [low, high] = [luminance(text), luminance(back)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
}"""


def test_every_text_stands_out_from_its_background(page: Page):
    pairs = {
        "text": ("page", "raised", "said"),
        "quiet": ("page", "raised", "said"),
        "on-accent": ("accent",),
        "bad": ("bad-back",),
    }
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for text, backs in pairs.items():
            for back in backs:
                assert page.evaluate(CONTRAST, [text, back]) >= 4.5, (scheme, text, back)


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_nothing_is_wider_than_a_narrow_phone(browser: Browser, server: ScriptedServer, language: str):
    server.will(delta(content="word" * 100 + "\n```\n" + "code " * 100 + "\n```"), ending("length"))
    with browser.new_context(viewport={"width": 320, "height": 560}, locale=language) as context:
        page = context.new_page()
        page.goto(server.url)
        page.locator("#question").fill("question" * 20)
        page.keyboard.press("Enter")
        expect(page.locator("#send")).to_be_visible()
        assert page.evaluate("document.getElementById('scroll').scrollWidth") == 320
        page.locator("#settings").click()
        too_wide = "[...document.querySelectorAll('*')].filter((node) => node.getBoundingClientRect().right > 321)"
        assert page.evaluate(f"{too_wide}.map((node) => node.outerHTML)") == []


def test_every_control_has_a_name_and_answers_are_announced(page: Page, server: ScriptedServer):
    rest = threading.Event()
    server.will(delta(content="A river "), rest, ending())
    ask(page, "What is a river?")
    log = page.get_by_role("log", name="Conversation")
    expect(log).to_have_attribute("aria-live", "polite")
    expect(log).to_have_attribute("aria-busy", "true")  # it is read out once, when it is whole
    rest.set()
    expect(log).to_have_attribute("aria-busy", "false")
    unnamed = "[...document.querySelectorAll('button, input, textarea')].filter((node) => "
    unnamed += "!(node.labels?.[0] ?? node).textContent.trim())"
    assert page.evaluate(f"{unnamed}.map((node) => node.outerHTML)") == []
