"""Take the README's pictures and its film: drive the real page with the real model in a headless Chromium.

    make screenshots

It starts the app, does what a visitor would (eight prompts, a ninth in mid-decode, one stopped, the modes one
after the other, 32 examples; then time travel, a race, the sandbox, a lesson), and fails if the page says
anything on the browser's console.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

ASSETS = Path(__file__).parent
PORT = int(os.environ.get("PORT", "7879"))
ADDRESS = f"http://127.0.0.1:{PORT}/"
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 360, "height": 780}
FILM = {"width": 1200, "height": 800}
FILM_WIDTH, FRAME = 900, 0.25  # pixels, seconds: sharp enough to read, under 5 MB
PROMPT = "#glass-prompt textarea"


def main() -> None:
    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed.")
    server = subprocess.Popen([sys.executable, "app.py", "--port", str(PORT)], cwd=ASSETS.parent)
    try:
        wait_for_server()
        with sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path=chromium, args=flags)
            errors: list[str] = []
            for visitor, viewport in (
                (visit, DESKTOP),
                (look_back, DESKTOP),
                (visit_by_phone, PHONE),
                (film, FILM),
            ):
                page = browser.new_page(viewport=viewport)
                page.on("console", lambda message: message.type == "error" and errors.append(message.text))
                page.on("pageerror", lambda error: errors.append(str(error)))
                visitor(page)
                page.close()
            browser.close()
            if errors:
                sys.exit("The page complained:\n" + "\n".join(errors))
    finally:
        server.terminate()
        server.wait()


def wait_for_server(timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(ADDRESS, timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"The app did not answer within {timeout:.0f} s.")


def visit(page: Page) -> None:
    """One visit, from the empty page to 32 requests under memory pressure."""
    page.goto(ADDRESS)
    page.wait_for_selector(".glass-pill[data-state=ready]", timeout=60_000)
    page.wait_for_timeout(800)
    shoot(page, "empty")

    page.click("#glass-eight")
    let_steps_pass(page, 40)
    page.fill(PROMPT, "Why is the sky blue?")
    page.press(PROMPT, "Enter")  # the ninth, while eight are decoding
    let_steps_pass(page, 50)
    shoot(page, "injected")
    page.click(".glass-card[data-state=decode] button")  # one stopped
    wait_until_idle(page)

    switch(page, "naive")
    page.click("#glass-eight")
    let_steps_pass(page, 260)
    shoot(page, "naive")
    wait_until_idle(page)

    switch(page, "static")
    page.click("#glass-all")
    let_steps_pass(page, 450)
    shoot(page, "static")
    switch(page, "continuous")  # in the middle of it: requests are requeued with what they have
    let_steps_pass(page, 100)
    shoot(page, "switched")
    wait_until_idle(page)

    page.click("#glass-all")
    let_steps_pass(page, 130)
    shoot_both(page, "continuous", full=True)
    wait_until_idle(page)


def look_back(page: Page) -> None:
    """All that goes beyond the live engine, in the light and in the dark."""
    page.goto(ADDRESS)
    page.wait_for_selector(".glass-pill[data-state=ready]", timeout=60_000)
    page.click("#glass-all")
    let_steps_pass(page, 130)
    page.click("[aria-label^='Previous injection']")
    page.click(".glass-card[data-state=decode]")
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(800)
    shoot_both(page, "time-travel")
    page.click("text=Live")
    wait_until_idle(page)

    page.click("text=Race")
    dialog = page.locator("dialog")
    dialog.locator("label", has_text="Requests").locator("select").select_option("16")
    page.click("text=Start the race")
    page.wait_for_selector(".glass-playback", timeout=300_000)
    slider = dialog.locator("input[type=range]")
    slider.fill(str(int(slider.get_attribute("max") or 0) // 4))
    page.wait_for_timeout(500)
    shoot_both(page, "race")
    page.keyboard.press("Escape")

    page.click("text=Sandbox")
    page.wait_for_selector(".glass-sandbox:not([hidden])", timeout=60_000)
    page.fill(PROMPT, "Tell me about the sea.")
    page.press(PROMPT, "Enter")
    page.wait_for_selector(".glass-card[data-state=waiting]")
    for _ in range(3):
        page.click("text=1 step")
        page.wait_for_timeout(500)
    page.evaluate("scrollTo(0, 0)")
    shoot_both(page, "sandbox")
    page.click(".glass-sandbox >> text=Close")

    page.goto(f"{ADDRESS}?lesson=2")
    page.wait_for_selector(".glass-lesson .glass-big")
    page.keyboard.press("Space")
    page.wait_for_selector(".glass-choices button")
    page.keyboard.press("1")
    page.wait_for_selector(".glass-lesson .glass-verdict")
    page.wait_for_timeout(3000)
    shoot_both(page, "lesson")


def visit_by_phone(page: Page) -> None:
    page.goto(ADDRESS)
    page.wait_for_selector(".glass-pill[data-state=ready]", timeout=60_000)
    page.click("#glass-all")
    let_steps_pass(page, 40)
    for dark in (False, True):
        page.evaluate("(dark) => document.body.classList.toggle('dark', dark)", dark)
        for panel in ("timeline", "blocks", "throughput", "anatomy"):  # drawn when it is in sight
            page.locator(f"#glass-{panel}").scroll_into_view_if_needed()
            page.wait_for_timeout(500)
        page.evaluate("scrollTo(0, 0)")
        shoot(page, "phone-dark" if dark else "phone", full=True)
    wait_until_idle(page)


def film(page: Page) -> None:
    """Naive, then continuous with a prompt that joins, as one moving picture."""
    page.goto(ADDRESS)
    page.wait_for_selector(".glass-pill[data-state=ready]", timeout=60_000)
    switch(page, "naive")
    frames: list[Image.Image] = []
    lasted: list[int] = []  # milliseconds

    def roll(seconds: float) -> None:
        """Take pictures, as many as come out of it; each is shown for as long as it took."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            picture = Image.open(io.BytesIO(page.screenshot(type="png"))).convert("RGB")
            height = round(picture.height * FILM_WIDTH / picture.width)
            frames.append(picture.resize((FILM_WIDTH, height), Image.Resampling.LANCZOS))
            page.wait_for_timeout(max(0.0, 1000 * (began + FRAME - time.monotonic())))
            lasted.append(round(1000 * (time.monotonic() - began)))

    page.click("#glass-eight")
    roll(6)
    switch(page, "continuous")
    roll(3)
    page.fill(PROMPT, "Why is the sky blue?")
    page.press(PROMPT, "Enter")
    roll(3)
    page.click("#glass-all")
    roll(8)
    target = ASSETS / "film.webp"
    frames[0].save(
        target,
        save_all=True,
        append_images=frames[1:],
        duration=lasted,
        loop=0,
        quality=55,
        method=4,
    )
    print(f"assets/{target.name}: {len(frames)} pictures, {target.stat().st_size / 1e6:.1f} MB", flush=True)


def switch(page: Page, mode: str) -> None:
    page.click(f"#glass-mode label:has-text('{mode}')")
    page.wait_for_timeout(600)


def wait_until_idle(page: Page) -> None:
    unfinished = ".glass-card:not([data-state=finished])"
    page.wait_for_function(f"document.querySelectorAll('{unfinished}').length === 0", timeout=300_000)


def let_steps_pass(page: Page, steps: int) -> None:
    """However fast the machine is, the pictures show the same part of the work."""
    end = page.evaluate("window.glassStore.newest.step") + steps
    page.wait_for_function(f"window.glassStore.newest.step >= {end}", timeout=300_000)


def shoot(page: Page, name: str, full: bool = False) -> None:
    page.screenshot(path=ASSETS / f"{name}.png", full_page=full)
    print(f"assets/{name}.png", flush=True)


def shoot_both(page: Page, name: str, full: bool = False) -> None:
    """In the light and in the dark."""
    shoot(page, name, full)
    page.evaluate("document.body.classList.add('dark')")
    page.wait_for_timeout(800)
    shoot(page, f"{name}-dark", full)
    page.evaluate("document.body.classList.remove('dark')")
    page.wait_for_timeout(300)


if __name__ == "__main__":
    main()
