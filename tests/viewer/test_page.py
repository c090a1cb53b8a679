"""The page of the viewer in a real browser, on runs that this library's writers left behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.waiting import wait_until
from tests.viewer.chromium import started
from tests.viewer.recorded_runs import EACH, GROUPS, HOSTILE, WORDS, RecordedRun
from tests.viewer.served import TOKEN, served
from verl.journal.ending import recorded_end
from verl.observability.samples import dump_generations

VIEWS = {
    "curves": "#/overview?run=0&run=1", "steps": "#/steps?run=0", "groups": "#/step?run=0&step=2",
    "samples": "#/samples?run=0", "sample": "#/sample?run=0&id={}", "compare": "#/compare?run=0&id={}&with={}",
    "prompt": "#/prompt?run=0&id={}", "configuration": "#/config?run=0&against=1", "system": "#/system?run=0",
}  # fmt: skip
ACCESSIBLE = (Path(__file__).parent / "accessible.js").read_text(encoding="utf-8")
"""The checks that matter most; it returns the faults."""
COUNTS_REQUESTS = """
window.requests = 0;
const { fetch } = window;
window.fetch = (...all) => { window.requests += 1; return fetch(...all); };
"""
LOOKS_AGAIN = """
const before = window.requests;
document.dispatchEvent(new Event("visibilitychange"));
return window.requests - before;
"""
"""Requests that the page sends at once when a person comes back to it."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory) -> list[Path]:
    """One of four steps, and one of three steps with another learning rate and better scores."""
    folder = tmp_path_factory.mktemp("runs")
    base = RecordedRun(folder / "base", 4, algorithm={"adv_estimator": "grpo", "kl": 0.1})
    other = RecordedRun(folder / "other", 3, bonus=0.25, algorithm={"adv_estimator": "grpo", "kl": 0.2})
    return [base.folder, other.folder]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with started(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@contextmanager
def linked(*runs: Path) -> Iterator[str]:
    """The link to the page of some runs, as the command prints it."""
    with served(*runs) as site:
        yield f"http://127.0.0.1:{site.port}/?token={TOKEN}"


@pytest.fixture(scope="module")
def link(two_runs):
    with linked(*two_runs) as link:
        yield link


@pytest.fixture
def page(chromium, link):
    """The page of the two runs; a test leaves no fault in the browser behind."""
    chromium.size(1280, 900)
    chromium.scheme("light")
    chromium.enter(link)
    yield chromium
    assert chromium.faults() == []


def sample_ids(page, step: int = 2, group: int = 1) -> list[str]:
    """Ids of the samples of a group, the best score first."""
    page.open(f"#/samples?run=0&step={step}&uid={step}-{group}&sort=score&descending=1")
    page.rows("Samples")
    links = [element.get_attribute("href") for element in page.all("td a.excerpt")]
    return [re.search(r"id=([^&]+)", link)[1] for link in links]


def every_view(page) -> dict[str, str]:
    ids = sample_ids(page)
    return {name: link.format(*ids) for name, link in VIEWS.items()}


def facts(element) -> dict[str, str]:
    """Names and values of a list of facts."""
    lines = element.text.splitlines()
    return dict(zip(lines[::2], lines[1::2]))


def test_the_way_leads_from_a_curve_to_the_token(page):
    """Step, group, sample and the numbers of the token are those of the writer."""
    from selenium.webdriver.common.keys import Keys

    page.open("#/overview?run=0&metric=critic/score/mean")
    plot = page.one(".plot")
    page.focus(plot)
    page.press(Keys.HOME, Keys.ARROW_RIGHT)
    mean = sum(min(group, EACH) for group in range(GROUPS)) / (GROUPS * EACH)
    assert plot.get_attribute("aria-valuetext") == f"step 2: {mean:.4g}"
    plot.click()  # the middle of steps 1 to 4
    wait_until(lambda: page.heading() in ("Groups of step 2", "Groups of step 3"))
    page.wait()
    step = int(page.heading()[-1])
    rows = page.rows(f"Groups of step {step}")
    assert [row[2] for row in rows] == ["1 (0 to 1)", "1 (0 to 1)", "0 (0 to 0)"], "the widest spread comes first"
    assert rows[-1][-1] == "dropped filtered_group"
    page.follow(page.one("a.excerpt", "(2)"))
    assert page.heading() == f"Samples of a group, step {step}"
    page.follow(page.one("th a", "Score"))
    scores = [row[2] for row in page.rows("Samples")]
    assert scores == ["1", "1", "0"] and page.shown("th[aria-sort=descending]").startswith("Score")
    page.follow(page.all("td a.excerpt")[0])
    page.focus(page.one(".tokens"))
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    shown = facts(page.one(".token-view .readout"))
    number, sample = int(shown["Id"]), int(facts(page.one("section[aria-label^=Ledger] dl"))["sample"])
    assert (number, shown["Text"], shown["Token"]) == (2, json.dumps(WORDS[2]), "3 of 5")
    assert float(shown["Advantage"]) == 0.5 - 2 and float(shown["Entropy"]) == pytest.approx(0.2)
    assert float(shown["Trainer log-prob"]) == pytest.approx(-0.2 - sample / 10, abs=1e-6)
    assert float(shown["Sampler log-prob"]) == pytest.approx(0.05 - sample / 10, abs=1e-6)
    assert float(shown["Sampler − trainer"]) == pytest.approx(0.25, abs=1e-6)
    assert float(shown["Ratio"]) == pytest.approx(0.77880078, abs=1e-6), "exp(-0.25)"
    assert shown["Version"] == str(step) and shown["Mask"] == "1"
    assert page.text(page.one(".tokens .current")) == WORDS[2] and "token=2" in page.driver.current_url
    assert "trained" in page.text(page.one("section[aria-label^=Ledger]"))


def test_tokens_are_colored_by_the_chosen_number_and_the_link_keeps_it(page):
    (best, *_) = sample_ids(page)
    page.open(f"#/sample?run=0&id={best}")
    page.one("button[aria-pressed]", "Advantage").click()
    script = "return [...document.querySelectorAll('.tokens .token')].map((one) => [one.className, %s])"
    share = "parseInt(one.style.getPropertyValue('--share'))"
    painted = page.run(script % share)
    assert [name.split()[1] for name, _ in painted] == ["high", "low", "low", "low", "low"], "0.5, -0.5, -1.5 …"
    assert [amount for _, amount in painted] == [14, 14, 43, 71, 100], "shares of 3.5"
    assert "3.5" in page.shown(".legend")
    assert "color=advantage" in page.driver.current_url
    page.driver.refresh()
    page.wait()
    assert page.shown("button[aria-pressed=true]") == "Advantage"
    page.one("button[aria-pressed]", "Version").click()
    hues = [hue for _, hue in page.run(script % "one.style.getPropertyValue('--hue')")]
    assert len(set(hues[:2])) == len(set(hues[2:])) == 1 and hues[0] != hues[-1], "sampled by two versions"
    assert [chip.text for chip in page.all(".legend span")] == ["version 1", "version 2"]


def test_filters_are_a_link_that_shows_the_same_rows(page):
    page.open("#/samples?run=0")
    assert len(page.rows("Samples")) == 4 * GROUPS * EACH
    select = page.one("select[data-key=state]")
    select.send_keys("dropped")
    wait_until(lambda: "state=dropped" in page.driver.current_url)
    page.wait()
    page.one("input[data-key=step]").send_keys("3\n")
    wait_until(lambda: "step=3" in page.driver.current_url)
    page.wait()
    rows = page.rows("Samples")
    assert len(rows) == EACH and {row[7] for row in rows} == {"dropped filtered_group"}
    assert page.run("return document.activeElement.dataset.key") == "step", "the focus stays in the form"
    link = page.driver.current_url
    page.open(link.removeprefix(page.base))
    assert page.rows("Samples") == rows
    page.follow(page.one("a", "Clear the filters"))
    assert len(page.rows("Samples")) == 4 * GROUPS * EACH
    page.open("#/samples?run=0&min_score=2")
    assert "Widen or clear them" in page.shown(".empty")


def test_two_runs_lie_over_each_other_and_show_where_their_settings_differ(page):
    page.open("#/overview?run=0&run=1&metric=critic/score/mean&x=samples")
    shown = page.shown(".chart .readout").splitlines()
    assert shown[:2] == ["base step 4: 0.3333", "other step 3: 0.5833"]
    assert shown[2:] == ["notice"], "the other run stopped here"
    page.one("summary", "Events").click()
    assert ["other", "3", "–", "notice", "stopped: it ended after step 3 of 4"] in page.rows("Events")
    page.one("details.values summary").click()
    rows = page.rows("Values of critic/score/mean")
    assert [row[2] for row in rows if row[0] == "other"] == ["9", "18", "27"], "9 samples per step"
    page.follow(page.one("a", "Compare configurations"))
    assert ["algorithm.kl", "0.1", "0.2"] in page.rows("Settings")
    assert not any(row[0] == "algorithm.adv_estimator" for row in page.rows("Settings"))
    page.open("#/overview?run=1")
    assert page.one("main h3", "openai/gsm8k"), "validation curves stand under their data source"
    box = page.one("input[data-key=run-0]")
    box.click()
    wait_until(lambda: "run=0" in page.driver.current_url)
    page.wait()
    assert page.run("return document.activeElement.dataset.key") == "run-0"


def test_smoothing_and_the_search_of_metrics_are_kept_by_the_link(page):
    from selenium.webdriver.common.keys import Keys

    page.open("#/overview?run=0&metric=response_length/mean&smooth=0.49")
    page.focus(page.one("#smooth"))
    page.press(Keys.ARROW_RIGHT)
    assert "smooth=0.5" in page.driver.current_url
    expected = (0.5 * 20 + 0.25 * 15 + 0.125 * 10 + 0.0625 * 5) / (1 - 0.5**4)
    assert page.shown(".chart .key") == f"step 4: {expected:.4g} (20)"
    page.one("#find").send_keys("weights sent")
    wait_until(lambda: page.shown("aside [role=status]").startswith("1 of "))
    shown = [label.text for label in page.all(".metrics label") if label.is_displayed()]
    assert shown == ["perf/weights_sent_mb"]
    page.driver.refresh()
    page.wait()
    assert page.one("#find").get_attribute("value") == "weights sent"
    page.one("button", "Chart the matches").click()
    wait_until(lambda: "metric=perf" in page.driver.current_url)
    page.wait()
    assert page.shown(".chart strong") == "perf/weights_sent_mb"


def test_a_run_that_is_running_updates_by_itself(chromium, tmp_path):
    run = RecordedRun(tmp_path / "live", 1)
    with linked(run.folder) as link:
        with recorded_end(run.folder, total_steps=4):
            chromium.enter(link)
            chromium.open("#/overview?run=0&metric=response_length/mean")
            assert chromium.shown(".chart .key") == "step 1: 5"
            chromium.run("window.isSame = true; window.first = document.querySelector('nav a')")
            run.add_step()
            wait_until(lambda: chromium.shown(".chart .key") == "step 2: 10", lambda: chromium.shown("main"))
            wait_until(lambda: "live is running at step 2" in chromium.text(chromium.one("#news")))
            assert chromium.run("return window.isSame"), "without loading the page"
            assert chromium.run("return window.first.isConnected"), "a click that has begun is not lost"
            chromium.one("main h3", "openai/gsm8k")  # the first validation was logged: a new curve
            chromium.open("#/steps?run=0")
            assert [row[0] for row in chromium.rows("Steps")] == ["2", "1"]
            chromium.run(COUNTS_REQUESTS)
            assert chromium.run(LOOKS_AGAIN) > 0
            chromium.one("#pause").click()
            assert chromium.one("#pause").get_attribute("aria-pressed") == "true"
            run.add_step()
            assert chromium.run(LOOKS_AGAIN) == 0
            chromium.one("#pause").click()
            assert chromium.run(LOOKS_AGAIN) > 0
            wait_until(lambda: [row[0] for row in chromium.rows("Steps")] == ["3", "2", "1"])
            run.add_step()
        wait_until(lambda: chromium.shown("#state") == "complete", lambda: chromium.shown("header"))
        wait_until(lambda: chromium.rows("Steps")[0][0] == "4")
        assert chromium.faults() == []


def test_a_run_without_log_probs_of_the_sampler_shows_those_of_the_trainer(page):
    page.open("#/samples?run=0")
    script = """
    const { tokenView } = await import("/page/tokens.js");
    const tokens = { text: ["a"], ids: [7], log_prob: [-1.5], trainer_log_prob: [-1.5], difference: null };
    const view = tokenView(tokens, { measure: "log_prob", place: 0, remember: () => {} });
    const [pressed, readout] = ["[aria-pressed=true]", ".readout"].map((name) => view.querySelector(name).textContent);
    return [pressed, readout, view.querySelector("[data-key=by-log_prob]").disabled];
    """
    pressed, readout, is_off = page.run(f"return (async () => {{{script}}})()")
    assert pressed == "Trainer log-prob" and is_off, "no number of the sampler is made up"
    assert "Trainer log-prob-1.5" in readout and "Sampler log-prob" not in readout


def test_an_event_stands_at_the_next_point_of_a_thinned_curve(page):
    page.open("#/samples?run=0")
    script = """
    const { Chart } = await import("/page/chart.js");
    const series = [{ name: "a", run: 0, x: [0, 10, 20], y: [1, 2, 3], steps: [1, 5, 9] }];
    const chart = new Chart({ title: "t", axis: "time", series });
    const events = [0, 1, 4, 6, 8, 9, 10, null].map((step) => ({ run: 0, step }));
    return [...events, { run: 1, step: 5 }].map((event) => chart.xOf(event));
    """
    places = page.run(f"return (async () => {{{script}}})()")
    assert places == [None, 0, 10, 10, 20, 20, None, None, None]


def test_a_group_of_more_samples_than_are_listed_says_how_many(chromium, tmp_path):
    run = tmp_path / "large"
    outputs = [f"answer {number}" for number in range(60)]
    dump_generations(run / "samples", 1, ["q"] * 60, outputs, ["x"] * 60, list(map(float, range(60))))
    with linked(run) as link:
        chromium.enter(link)
        chromium.open("#/sample?run=0&id=1-59")
        assert len(chromium.rows("Other samples of the group")) == 49
        assert "Of its 60 samples the 50 best" in chromium.text(chromium.one("section[aria-label='The group']"))
        chromium.follow(chromium.one("a", "All of them"))
        assert "60" in chromium.shown("main")
        assert chromium.faults() == []


def test_hostile_answers_are_text_and_run_nothing(page):
    page.open("#/samples?run=0&state=dropped&step=1")
    assert page.rows("Samples")[0][0].startswith("<script>document.title")
    page.follow(page.all("td a.excerpt")[0])
    seen = HOSTILE.replace("\u202e", "U+202E").replace("\u202c", "U+202C").replace("\u200b", "U+200B")
    assert page.text(page.one(".tokens")) == seen
    assert {mark.text for mark in page.all(".tokens .code-point")} == {"U+202E", "U+202C", "U+200B"}
    assert page.text(page.one("[aria-label=Response].text")) == seen
    assert not page.all("main img, main script, main svg[onload]")
    assert not page.all("a[href^=javascript]") and "taken" not in page.driver.title


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_fits_the_screen_and_is_accessible(page, width, scheme, tmp_path):
    page.size(width, 900)
    page.scheme(scheme)
    for name, view in every_view(page).items():
        page.open(view)
        page.run("for (const one of document.querySelectorAll('details')) one.open = true")
        assert page.run("return document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than {width}"
        assert page.run(ACCESSIBLE) == [], f"{name}, {scheme}"
        assert axe(page) == [], f"{name}, {scheme}"
        page.picture(tmp_path / f"{name}_{width}_{scheme}.png")
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]


def axe(page) -> list[str]:
    """What axe-core finds, where $AXE_SCRIPT names its file (npm pack axe-core)."""
    if "AXE_SCRIPT" not in os.environ:
        return []
    page.tool("Runtime.evaluate", expression=Path(os.environ["AXE_SCRIPT"]).read_text(encoding="utf-8"))
    script = "axe.run({resultTypes: ['violations']}).then(arguments[0])"
    violations = page.driver.execute_async_script(script)["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in violations]


def test_keys_alone_lead_from_the_curve_to_the_token(page):
    """Tab and Enter; the element with the focus has a visible outline at each place."""
    from selenium.webdriver.common.keys import Keys

    def tab_to(condition: str) -> None:
        for _ in range(200):
            page.press(Keys.TAB)
            outline, is_it = page.run(
                "const one = document.activeElement, style = getComputedStyle(one);"
                f"return [style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1, {condition}]"
            )
            assert outline, f"no visible focus: {page.run('return document.activeElement.outerHTML')[:200]}"
            if is_it:
                return
        raise AssertionError(f"no key leads to {condition}")

    def has_focus(value: str, expected: str) -> None:
        """The browser and the page act on a key after it was sent."""
        wait_until(lambda: page.run(f"return document.activeElement.{value}") == expected, lambda: f"no {expected}")

    def enter(heading: str) -> None:
        page.press(Keys.ENTER)
        wait_until(lambda: page.heading().startswith(heading), page.heading)
        page.wait()

    page.open("#/overview?run=0&metric=critic/score/mean")
    page.press(Keys.TAB)
    has_focus("className", "skip")
    page.press(Keys.ENTER)
    has_focus("id", "main")
    assert page.heading() == "Curves"
    tab_to("one.classList.contains('plot')")
    page.press(Keys.HOME, Keys.PAGE_DOWN)
    enter("Groups of step 4")
    tab_to("one.dataset.key === 'sort-length_mean'")
    page.press(Keys.ENTER)
    wait_until(lambda: "sort=length_mean" in page.driver.current_url)
    page.wait()
    has_focus("dataset.key", "sort-length_mean")
    tab_to("one.dataset.key?.startsWith('group-')")
    enter("Samples of a group")
    tab_to("one.dataset.key?.startsWith('sample-')")
    enter("Sample with score")
    tab_to("one.dataset.key === 'by-entropy'")
    page.press(Keys.ENTER)
    has_focus("dataset.key", "by-entropy")
    tab_to("one.classList.contains('tokens')")
    page.press(Keys.END)
    last = facts(page.one(".token-view .readout"))["Token"]
    number, count = map(int, last.split(" of "))
    assert number == count > 1


def test_two_samples_and_a_prompt_over_training(page):
    best, _, worst = sample_ids(page, group=2)
    page.open(f"#/sample?run=0&id={worst}")
    page.follow(page.one(f"a[data-key='with-{best}']"))
    assert [heading.text for heading in page.all(".pair h2")] == ["Score 0", "Score 1"]
    page.all("button[data-key=by-entropy]")[1].click()
    wait_until(lambda: "color=entropy" in page.driver.current_url)
    page.wait()
    assert len(page.all("button[data-key=by-entropy][aria-pressed=true]")) == 2, "both by the same number"
    page.open(f"#/sample?run=0&id={worst}")
    page.follow(page.one("a", "This prompt over training"))
    assert [row[1] for row in page.rows("Its samples")] == [str(step) for step in range(1, 5) for _ in range(EACH)]
    assert page.shown(".chart .key") == "step 4: 0.6667"


def test_a_chart_is_saved_as_picture_and_its_values_as_files(page):
    page.open("#/overview?run=0&metric=response_length/mean")
    page.one("button", "PNG").click()
    page.one(".chart a", "CSV").click()
    page.one(".chart a", "Parquet").click()

    def saved() -> dict[str, Path]:
        return {place.suffix: place for place in page.downloads.glob("*")}

    wait_until(lambda: saved().keys() >= {".png", ".csv", ".parquet"}, saved)
    assert saved()[".png"].read_bytes().startswith(b"\x89PNG") and saved()[".parquet"].read_bytes()[:4] == b"PAR1"
    values = [line.split(",")[-1] for line in saved()[".csv"].read_text().splitlines()[1:]]
    assert [float(value) for value in values] == [5, 10, 15, 20]


def test_every_view_has_its_files_for_other_programs(page):
    saved = {
        "curves": {"curves", "runs", "events"}, "steps": {"steps"}, "groups": {"groups"}, "samples": {"samples"},
        "sample": {"tokens"}, "compare": {"tokens"}, "prompt": {"samples"}, "configuration": {"config"},
        "system": {"curves", "gantt", "system"},
    }  # fmt: skip
    script = """
    const links = [...document.querySelectorAll("a[download]")].map((one) => one.href);
    const answers = links.map(async (link) => [new URL(link).searchParams.get("what"), (await fetch(link)).status]);
    return Promise.all(answers);
    """
    for name, view in every_view(page).items():
        page.open(view)
        page.run("for (const one of document.querySelectorAll('details')) one.open = true")
        if name == "curves":
            page.rows("Events")
        answers = page.run(f"return (async () => {{{script}}})()")
        assert {what for what, _ in answers} == saved[name] and {status for _, status in answers} == {200}, name


def test_long_texts_are_cut_with_a_button_and_many_tokens_come_in_pages(chromium, tmp_path):
    from selenium.webdriver.common.keys import Keys

    line = "a line of an answer that does not end\n"
    text = line * (1_300_000 // len(line))
    run = RecordedRun(tmp_path / "long", 1, texts=(text, "x" * 7 * 4100))
    with linked(run.folder) as link:
        chromium.enter(link)
        chromium.open("#/samples?run=0&uid=1-0&sort=length&descending=1")
        long, paged, _ = [element.get_attribute("href") for element in chromium.all("td a.excerpt")]
        chromium.open(long.removeprefix(chromium.base))
        chromium.one("summary", "Text without tokens").click()
        chromium.one("button", "Show all").click()
        response = "[aria-label=Response].text"
        wait_until(lambda: len(chromium.text(chromium.one(response))) == 1 << 20)
        chromium.follow(chromium.one("a", "Load all of its text"))
        chromium.one("summary", "Text without tokens").click()
        chromium.one("button", "Show all").click()
        wait_until(lambda: chromium.text(chromium.one(response)) == text)
        chromium.open(paged.removeprefix(chromium.base))
        assert len(chromium.all(".tokens .token")) == 4000
        chromium.one("button", "Tokens after").click()
        assert len(chromium.all(".tokens .token")) == 100
        chromium.focus(chromium.one(".tokens"))
        chromium.press(Keys.END)
        assert facts(chromium.one(".token-view .readout"))["Token"] == "4100 of 4100"
        assert chromium.faults() == []


def test_what_is_missing_says_which_setting_writes_it(chromium, tmp_path):
    (tmp_path / "empty").mkdir()
    with linked(tmp_path / "empty") as link:
        chromium.enter(link)
        assert "trainer.logger=[console,file]" in chromium.shown(".empty")
        for view, setting in (("samples", "trainer.rollout_data_dir"), ("steps", "trainer.rollout_data_dir")):
            chromium.open(f"#/{view}?run=0")
            assert setting in chromium.shown(".empty")
        assert chromium.faults() == []
        chromium.open("#/sample?run=0&id=none")
        assert chromium.one("#problem").is_displayed()
        chromium.open("#/nothing")
        assert "Choose one above" in chromium.shown("#problem")


def test_a_lost_server_and_a_lost_secret_say_what_to_do(chromium, two_runs):
    with linked(two_runs[0]) as link:
        chromium.enter(link)
        chromium.open("#/steps?run=0")
        chromium.tool("Network.clearBrowserCookies")
        chromium.one("nav a", "Samples").click()
        wait_until(lambda: "it has the secret of this server" in chromium.shown("#problem"))
        chromium.enter(link)
        chromium.open("#/steps?run=0")
    chromium.one("nav a", "System").click()
    wait_until(lambda: "does not answer" in chromium.shown("#problem"))
    assert "verl view RUN" in chromium.shown("#problem")
    chromium.faults()  # the refused requests are some
