"""What a person does at the page, and what is on the screen; waits are for the page, never for a length of time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.waiting import wait_until

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
IS_READY = """
const main = document.querySelector("main");
return document.readyState === "complete" && main && !main.hasAttribute("aria-busy") && !!main.querySelector("h1");
"""


class Chromium:
    """A browser with one page.

    Args:
        program, driver: paths of Chromium and of its driver.
        folder: for its profile, and for what it downloads.
    """

    def __init__(self, program: str, driver: str, folder: Path):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self.downloads, self.base = folder / "downloads", ""
        self.tool("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        self.size(1280, 900)

    def tool(self, command: str, **arguments: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(command, arguments)

    def size(self, width: int, height: int) -> None:
        """Of the page, in pixels."""
        self.tool("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """``dark`` or ``light``."""
        self.tool("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def enter(self, link: str) -> None:
        """Open the link that the server printed, as a browser that was never there, and note where it leads."""
        self.tool("Network.clearBrowserCookies")
        self.driver.get(link)
        self.base = self.driver.current_url.partition("#")[0]
        self.wait()

    def open(self, view: str) -> None:
        """A view by its link, in a page that is loaded once more."""
        self.driver.get("about:blank")
        self.driver.get(self.base + view)
        self.wait()

    def wait(self) -> None:
        """Until the view is there."""
        wait_until(lambda: self.run(IS_READY), lambda: f"{self.driver.current_url}: {self.faults()}")

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        """Elements."""
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str, text: str = "") -> Any:
        """The first element with a text in it, once there is one."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].find((one) => one.textContent.includes(arguments[1]))"
        )
        wait_until(
            lambda: self.run(script, selector, text), lambda: f"no {selector} with {text!r}: {self.shown('body')}"
        )
        return self.run(script, selector, text)

    def shown(self, selector: str) -> str:
        """What is on the screen of the first such element; empty where there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def text(self, element: Any) -> str:
        """All text of an element, hidden parts too."""
        return str(self.run("return arguments[0].textContent", element))

    def rows(self, caption: str) -> list[list[str]]:
        """The cells of a table's rows."""
        script = """
        const table = [...document.querySelectorAll("table")].find((one) => one.caption.textContent === arguments[0]);
        return table && [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent));
        """
        wait_until(lambda: self.run(script, caption) is not None, lambda: f"no table {caption}")
        return list(self.run(script, caption))

    def press(self, *keys: str) -> None:
        """Keys, for the element that has the focus."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def focus(self, element: Any) -> None:
        """Move the focus to an element."""
        self.run("arguments[0].focus()", element)

    def follow(self, element: Any) -> None:
        """Click, and wait for the view to which this leads."""
        before = self.driver.current_url
        # The address changes before the event by which the page marks itself as busy; this listener runs after its own.
        self.run("window.hasMoved = false; addEventListener('hashchange', () => { hasMoved = true }, { once: true })")
        element.click()
        wait_until(lambda: self.run("return window.hasMoved"), lambda: f"no other view than {before}")
        self.wait()

    def heading(self) -> str:
        return self.text(self.one("h1"))

    def picture(self, place: Path) -> None:
        """What is on the screen, as PNG."""
        place.parent.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(place))

    def faults(self) -> list[str]:
        """What the browser reported since the last call: errors of scripts, and what the policy of the page refused."""
        severe = [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        return [json.dumps(entry) for entry in severe]


@contextmanager
def started(folder: Path) -> Iterator[Chromium]:
    """A browser without a window, with its files in a folder; the test skips where there is none."""
    pytest.importorskip("selenium", reason="selenium is not installed: pip install -c constraints.txt -e .[dev]")
    programs = [place for name in ("chromium", "chromedriver") if (place := shutil.which(name))]
    if len(programs) < 2:
        pytest.skip("no Chromium: apt-get install --no-install-recommends chromium chromium-driver")
    browser = Chromium(*programs, folder=folder)
    try:
        yield browser
    finally:
        browser.driver.quit()
