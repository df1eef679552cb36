"""The pages in a real browser: nothing is fetched, nothing overflows a phone, dark mode is dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import matplotlib.image
import numpy as np
import pytest
import sample_runs as samples

from assay.bench import report
from assay.bench.verdict import decide

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.xdist_group("browser"),
]
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)
WIDTHS = (360, 1200)

# Tells the page around it how wide it is, and what sticks out of it.
MEASURE = """<script>
addEventListener("load", () => {
  const root = document.documentElement, wide = root.clientWidth;
  const free = e => !e.closest(".scroll") && !e.closest("pre") && !e.closest(".skip");
  const out = [...document.querySelectorAll("body *")].filter(free).filter(e => {
    const r = e.getBoundingClientRect();
    return r.width && (r.right > wide + 1 || r.left < -1);
  }).map(e => e.tagName + "." + (e.getAttribute("class") || "") + ": " + e.textContent.slice(0, 40));
  const texts = [...document.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height);
  parent.postMessage({page: location.pathname.split("/").pop(), wide, scroll: root.scrollWidth, out,
    boxes: [...document.querySelectorAll(".scroll")].map(e => e.scrollWidth > e.clientWidth),
    small: Math.min(16, ...texts), background: getComputedStyle(document.body).backgroundColor}, "*");
});
</script></body>"""
HARNESS = """<!DOCTYPE html><title>x</title><body><pre id="out"></pre><script>
const seen = [];
addEventListener("message", e => {
  seen.push(e.data);
  document.getElementById("out").textContent = JSON.stringify(seen);
});
</script>
"""


def chromium(url, profile, *flags):
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pages")
    runs = [samples.cache_run(), samples.interval_run(), samples.empty_run(), samples.hostile_run()]
    curves = samples.curves_run()
    runs.append((curves, decide(curves)))
    report.write_report(runs, made)
    return made


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory):
    """Every page at every width, as the browser lays it out."""
    copies = tmp_path_factory.mktemp("copies")
    frames = []
    for path in sorted(folder.glob("*.html")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", MEASURE)
        (copies / path.name).write_text(text, encoding="utf-8")
        frames += [f'<iframe src="{path.name}" width="{w}" height="900" style="border:0"></iframe>' for w in WIDTHS]
    harness = copies / "harness.htm"
    harness.write_text(HARNESS + "\n".join(frames), encoding="utf-8")
    done = chromium(harness.as_uri(), tmp_path_factory.mktemp("profile"), "--virtual-time-budget=5000", "--dump-dom")
    seen = json.loads(unescape(re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S).group(1)))
    assert len(seen) == len(frames)
    return seen


def test_no_page_scrolls_sideways_on_a_phone_or_a_desk(measured):
    assert {m["wide"] for m in measured} == set(WIDTHS)
    for m in measured:
        assert m["scroll"] <= m["wide"], m
        assert m["out"] == [], m
    # The measuring works: on a phone some tables are wider than their box, and scroll in it.
    assert any(any(m["boxes"]) for m in measured if m["wide"] == 360)


def test_text_in_pictures_keeps_its_size_on_a_phone(measured):
    for m in measured:
        assert m["small"] >= 12, m


def test_pages_open_from_a_file_without_a_request_or_a_word_on_the_console(folder, tmp_path):
    for name in ("cache.html", "index.html"):
        log = tmp_path / f"{name}.json"
        done = chromium((folder / name).as_uri(), tmp_path / name[:3], f"--log-net-log={log}", "--dump-dom")
        assert "How to read a verdict" in done.stdout
        assert ":CONSOLE" not in done.stderr
        # The file's own load is logged; whatever the page asked for besides would be, too.
        urls = set(re.findall(r'"url":"((?:file|https?|data):[^"]*)"', log.read_text(errors="replace")))
        from_page = {u for u in urls if not re.match(r"https?://[^/]*(google|gstatic|googleapis)\.com", u)}
        assert from_page <= {(folder / name).as_uri(), "data:,"}, from_page


def test_a_page_that_did_fetch_would_be_noticed(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><title>x</title><img src="http://127.0.0.1:9/x.png"><script>console.error("no")</script>'
    )
    log = tmp_path / "log.json"
    done = chromium(page.as_uri(), tmp_path / "p", f"--log-net-log={log}", "--dump-dom")
    assert "CONSOLE" in done.stderr
    assert "http://127.0.0.1:9/x.png" in log.read_text(errors="replace")


def test_dark_mode_is_dark_and_both_schemes_have_something_to_see(folder, tmp_path):
    levels = {}
    for scheme, value in (("dark", 0), ("light", 1)):
        shot = tmp_path / f"{scheme}.png"
        flags = (f"--screenshot={shot}", "--window-size=1000,1400", f"--blink-settings=preferredColorScheme={value}")
        chromium((folder / "cache.html").as_uri(), tmp_path / scheme, *flags)
        pixels = matplotlib.image.imread(shot)[..., :3]
        levels[scheme] = float(np.median(pixels))
        assert pixels.std() > 0.03
    assert levels["dark"] < 0.2 < 0.9 < levels["light"]
