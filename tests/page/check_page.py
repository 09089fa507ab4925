"""The page in a real Chromium: at three widths, light and dark; with traffic, idle, with parked
rows and with the relay stuck. `make page` runs it (it fetches the browser first); the screenshots
stay in ``.page/`` to be looked at."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.harness import CHECKOUT, Harness
from tests.support.load import Load
from tests.support.sql import Database
from tests.support.web import Web

SHOTS = CHECKOUT / ".page"
WIDTHS = (360, 768, 1280)
SETTINGS = {
    **{"HTTP": "127.0.0.1:0", "SAMPLE_INTERVAL": "200ms", "MAX_TRIES": "2"},
    **{"HEARTBEAT": "300ms", "READ_TIMEOUT": "2s", "HEALTH_TIMEOUT": "3s"},
    "KAFKA_MESSAGE_MAX_BYTES": "20000",
}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium: apt-get install chromium, or name one in CHROMIUM"
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def shop(mysql: Database, kafka: str, tmp_path: Path) -> Iterator[Harness]:
    with Harness(mysql, kafka, tmp_path, SETTINGS) as made:
        made.create_topic()
        yield made


class Opened:
    """The page in one window; what it complained of, and what it asked for."""

    def __init__(self, browser: Browser, web: Web, width: int, scheme: Any = "light") -> None:
        self._context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page: Page = self._context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"http://127.0.0.1:{web.port}/")
        self.refreshed()

    def __enter__(self) -> Page:
        return self.page

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def refreshed(self) -> None:
        """Wait for figures newer than those that are shown."""
        before = self.page.evaluate("document.body.dataset.refreshed || ''")
        self.page.wait_for_function(
            "before => (document.body.dataset.refreshed || '') !== before", arg=before
        )


def look(browser: Browser, web: Web, name: str) -> None:
    """Open the page at each width, light and dark; check what must hold everywhere; keep it."""
    SHOTS.mkdir(exist_ok=True)
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            opened = Opened(browser, web, width, scheme)
            with opened as page:
                page.click("[data-range='15m']")
                page.wait_for_timeout(300)  # the charts of the other range
                wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, f"{name} at {width}: {wide} pixels too wide"
                members = "document.querySelector('#members').parentElement"
                assert page.evaluate(f"{members}.scrollWidth <= {members}.clientWidth"), width
                assert page.locator(".uplot canvas").count() == 5
                page.screenshot(path=SHOTS / f"{name}-{scheme}-{width}.png", full_page=True)
                assert not opened.complaints
                own = f"http://127.0.0.1:{web.port}/"
                assert all(url.startswith(own) for url in opened.asked), opened.asked
                assert not _faint(page), f"{name} {scheme}: too little contrast"


def _faint(page: Page) -> list[str]:
    """Texts with less contrast than the 4.5 that WCAG AA asks for."""
    found: list[str] = page.evaluate(
        """() => {
        const light = (text) => {
          const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((part) => {
            const c = part / 255;
            return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
          });
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = (node) => {
          for (let at = node; at; at = at.parentElement) {
            const color = getComputedStyle(at).backgroundColor;
            if (color !== "rgba(0, 0, 0, 0)") return color;
          }
          return "rgb(255, 255, 255)";
        };
        return [...document.querySelectorAll("body *")]
          .filter((node) => [...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim()))
          .filter((node) => {
            const pair = [light(getComputedStyle(node).color), light(ground(node))].sort();
            return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05) < 4.5;
          })
          .map((node) => node.textContent.trim());
        }"""
    )
    return found


def figure(page: Page, name: str) -> float:
    return float(page.locator(f"data[data-figure='{name}']").first.get_attribute("value") or "nan")


def test_with_traffic_the_page_follows_table_and_topic(shop: Harness, browser: Browser) -> None:
    relay = shop.relay()
    web = Web(shop, relay)
    with Load(shop, [f"k{number}" for number in range(20)], pause=0.01, threads=2):
        shop.wait_sent(300)
        look(browser, web, "traffic")
    shop.wait_all_sent()
    in_topic = len(shop.messages())
    opened = Opened(browser, web, 1280)
    with opened as page:
        # The table is counted by a thread of its own, so its figures may be one look behind.
        shop.until(
            lambda: (
                (figure(page, "marked"), figure(page, "pending")) == (in_topic, 0)
                or opened.refreshed()
            )
        )
        assert figure(page, "sent") == in_topic == shop.count(1)
        assert figure(page, "pending") == shop.count(0) == 0
        assert figure(page, "dead") == shop.count(2) == 0
        # What was refreshed by the script is what the server would send now.
        assert web.figures()["sent"] == figure(page, "sent")
        label = page.locator("[data-chart='throughput']").get_attribute("aria-label") or ""
        assert re.search(r"sent last [\d.]+, highest [1-9]", label), label


def test_idle_and_with_parked_rows(shop: Harness, browser: Browser) -> None:
    web = Web(shop, shop.relay())
    shop.until(web.ready)
    look(browser, web, "idle")
    for key in ("big-1", "<img src=x onerror=alert(1)>"):
        shop.ins(key, {"text": "x" * 30_000})
    shop.until(lambda: shop.count(0) + shop.count(2) == 2)
    shop.until(lambda: len(web.ask("/data.json").json["troubled"]) == 2)
    look(browser, web, "parked")
    with Opened(browser, web, 768) as page:
        cells = page.locator("#troubled tbody td:nth-child(2)").all_inner_texts()
        assert sorted(cells) == ["order / <img src=x onerror=alert(1)>", "order / big-1"]
        assert "max.message.bytes" in page.locator("#advice").inner_text()


def test_with_the_relay_stuck(shop: Harness, browser: Browser) -> None:
    web = Web(shop, shop.relay())
    shop.until(web.ready)
    with closing(shop.database.connect(autocommit=True)) as blocker:
        with blocker.cursor() as cursor:
            cursor.execute(f"LOCK TABLES {shop.table} WRITE")
        shop.until(lambda: not web.healthy())
        look(browser, web, "stuck")
        with Opened(browser, web, 360) as page:
            assert "Stuck" in page.locator(".say").inner_text()
            assert "loop has not turned" in page.locator("#reasons").inner_text()
    shop.until(web.ready)


def test_by_keyboard(shop: Harness, browser: Browser) -> None:
    web = Web(shop, shop.relay())
    opened = Opened(browser, web, 1280)
    with opened as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.dataset.range") == "15m"
        page.keyboard.press("Enter")
        assert page.locator("[data-range='15m']").get_attribute("aria-pressed") == "true"
        opened.refreshed()
        assert page.evaluate("document.activeElement.dataset.range") == "15m"  # the place is kept
        seen = set()
        for _ in range(12):
            page.keyboard.press("Tab")
            seen.add(page.evaluate("document.activeElement.textContent.trim()"))
        assert {"GTIDs", "metrics", "healthz", "readyz"} <= seen


def test_without_the_relay_it_says_so(shop: Harness, browser: Browser) -> None:
    relay = shop.relay()
    with Opened(browser, Web(shop, relay), 1280) as page:
        assert relay.terminate() == 0
        page.locator("#lost").wait_for(state="visible")


def test_the_token_is_asked_for(shop: Harness, browser: Browser) -> None:
    token = "a-token-of-twenty-six-chars"
    web = Web(shop, shop.relay(HTTP="0.0.0.0:0", HTTP_TOKEN=token))
    context = browser.new_context(http_credentials={"username": "me", "password": token})
    page = context.new_page()
    page.goto(f"http://127.0.0.1:{web.port}/")
    page.wait_for_function("document.body.dataset.refreshed")
    assert page.locator(".uplot canvas").count() == 5
    context.close()


def test_promtool_takes_the_rules(tmp_path: Path) -> None:
    """The rules are read by Prometheus's own tool, and fire for what they should."""
    tool = os.environ.get("PROMTOOL") or shutil.which("promtool")
    assert tool, "no promtool: apt-get install prometheus, or name it in PROMTOOL"
    rules = CHECKOUT / "deploy" / "prometheus-alerts.yml"

    def run(*arguments: str) -> None:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    run("check", "rules", str(rules))
    instance = '{job="shop",instance="a"}'
    steady = {
        f"cdc_relay_build_info{instance}": "1x40",
        'cdc_relay_role{job="shop",instance="a",role="owner"}': "1x40",
        f"cdc_relay_alive{instance}": "1x40",
        f"cdc_relay_ready{instance}": "1x40",
        f"cdc_relay_database_up{instance}": "1x40",
        f"cdc_relay_broker_up{instance}": "1x40",
        f"cdc_relay_dead_rows{instance}": "0x40",
        f"cdc_relay_failing_rows{instance}": "0x40",
        f"cdc_relay_oldest_pending_age_seconds{instance}": "0x40",
        f"cdc_relay_purge_horizon_seconds{instance}": "2592000x40",
        f"cdc_relay_owed_marks{instance}": "0x40",
        f"cdc_relay_reconnects_total{instance}": "0x40",
        f"cdc_relay_anchors_total{instance}": "0x40",
        f"cdc_relay_sample_age_seconds{instance}": "1x40",
    }
    faults = {
        "CdcRelayAbsent": {'cdc_relay_build_info{job="other",instance="b"}': "1x10 _x30"},
        "CdcRelayStuck": {f"cdc_relay_alive{instance}": "0x40"},
        "CdcRelayDeadRows": {f"cdc_relay_dead_rows{instance}": "3x40"},
        "CdcRelayRowsFailing": {f"cdc_relay_failing_rows{instance}": "1x40"},
        "CdcRelayPendingOld": {f"cdc_relay_oldest_pending_age_seconds{instance}": "0+60x40"},
        "CdcRelayPurgeNear": {f"cdc_relay_purge_horizon_seconds{instance}": "3600x40"},
        "CdcRelayMarksOwed": {f"cdc_relay_owed_marks{instance}": "5000x40"},
        "CdcRelayReconnecting": {f"cdc_relay_reconnects_total{instance}": "0+2x40"},
        "CdcRelayAnchored": {f"cdc_relay_anchors_total{instance}": "0x25 1x15"},
        "CdcRelayDatabaseDown": {f"cdc_relay_database_up{instance}": "0x40"},
        "CdcRelayBrokerDown": {f"cdc_relay_broker_up{instance}": "0x40"},
        "CdcRelayNotReady": {f"cdc_relay_ready{instance}": "0x40"},
        "CdcRelayBlind": {f"cdc_relay_sample_age_seconds{instance}": "400x40"},
        "CdcRelayNoOwner": {'cdc_relay_role{job="shop",instance="a",role="owner"}': "0x40"},
    }
    names = [
        rule["alert"]
        for group in yaml.safe_load(rules.read_text())["groups"]
        for rule in group["rules"]
    ]
    steps = []
    for fault, changes in [("", {}), *faults.items()]:
        series = [{"series": k, "values": v} for k, v in {**steady, **changes}.items()]
        steps.append(
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
                        " or vector(0)",
                        "eval_time": "38m",
                        "exp_samples": [{"labels": "{}", "value": int(name == fault)}],
                    }
                    for name in names
                ],
            }
        )
    file = tmp_path / "test.yml"
    file.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": steps})
    )
    run("test", "rules", str(file))
