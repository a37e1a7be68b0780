"""The page in headless Chromium: charts are drawn without errors or requests, and controls change them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_up import make_density_run, make_run

from cfl.reporting.compare.command import main
from cfl.reporting.line_styles import COLOURS, line_styles

api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

CHARTS = ("seen", "first", "rounds", "uplink", "time", "differences", "space", "clients", "matrices", "partition")
SECONDS = 60_000  # timeout in milliseconds, long enough for a busy machine


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every kind of chart and two benchmarks."""
    folder = tmp_path_factory.mktemp("page")
    for seed in range(3):
        for method, level in (("fedavg", 70.0), ("fot", 85.0), ("apd <b>&", 80.0)):
            personal = 5 if method.startswith("apd") else 0
            options: dict[str, Any] = {"evaluate_every": 2, "nll": True, "personal": personal, "level": level}
            make_run(folder / "runs" / f"{method[:3]}-{seed}", method, seed, **options)
        make_run(folder / "runs" / f"other-{seed}", "fot", seed, benchmark="pmnist", tasks=4)
    (make_run(folder / "runs" / "unfinished", "er") / "summary.json").unlink()
    assert main([str(folder / "runs"), "--out", str(folder / "report")]) == 0
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        # Chromium's sandbox needs privileges that containers rarely have. The page is our own, so it is not needed.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=SECONDS)
        yield started
        started.close()


@pytest.fixture
def tab(browser: Any, report: Path) -> Iterator[Any]:
    """The page with its charts drawn. After the test, no console message, error or request may have occurred."""
    page = browser.new_page(viewport={"width": 1300, "height": 5000}, color_scheme="light")
    page.set_default_timeout(SECONDS)
    said: list[str] = []
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url) if request.url.startswith(("http", "ws")) else None)
    page.goto(report.as_uri())
    drawn(page)
    yield page
    page.close()
    assert said == []


def drawn(page: Any) -> None:
    """Wait until every chart that is shown has its drawing."""
    # The page's policy forbids playwright's own way of waiting for a condition.
    missing = "[...document.querySelectorAll('.plot:not([hidden])')].some((plot) => !plot.querySelector('.main-svg'))"
    end = time.monotonic() + SECONDS / 1000
    while page.evaluate(missing):
        assert time.monotonic() < end, "not all charts were drawn"
        page.wait_for_timeout(50)


def names(page: Any, chart: str) -> list[str]:
    """Return the names of lines and marks in a chart, each once, in order."""
    found = page.eval_on_selector(f"#{chart} .plot", "(plot) => plot.data.map((trace) => trace.name)")
    return list(dict.fromkeys(name for name in found if name))


def data(page: Any) -> dict[str, Any]:
    return json.loads(page.text_content("#data"))


def test_every_chart_is_drawn_with_its_values(tab: Any) -> None:
    for chart in CHARTS:
        assert tab.locator(f"#{chart} .main-svg").count() > 0, chart
    assert names(tab, "seen") == ["apd &lt;b&gt;&amp;", "FedAvg", "FOT"]
    shown = tab.eval_on_selector("#seen .plot", "(plot) => plot.data.filter((t) => t.name).map((t) => t.y)")
    assert shown == [row["measures"]["accuracy"]["seen"] for row in data(tab)["tables"][0]["rows"]]
    assert tab.locator("#matrices .plot").count() == 3
    assert "apd <b>&" in tab.locator("#matrices").text_content()  # taken literally
    assert "runs/unfinished" in tab.locator("#left-out").text_content()
    assert "not finished: 12 rounds done" in tab.locator("#left-out").text_content()


def test_learning_curves_of_densities_are_likelihoods(browser: Any, tmp_path: Path) -> None:
    make_density_run(tmp_path / "runs" / "density", evaluate_every=2)
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    page = browser.new_page(viewport={"width": 1300, "height": 5000})  # charts are drawn where they can be seen
    page.goto((tmp_path / "report" / "report.html").as_uri())
    drawn(page)
    (shown,) = page.eval_on_selector("#rounds .plot", "(plot) => plot.data.filter((t) => t.name).map((t) => t.y)")
    assert shown == data(page)["tables"][0]["rows"][0]["rounds"]["nll"]
    assert page.eval_on_selector("#rounds .plot", "(plot) => plot.layout.yaxis.title.text") == "NLL (nats)"
    page.close()


def test_accuracy_against_epsilon_is_drawn_where_a_run_has_one(browser: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "noisy", "dp_fedavg", epsilon_all_tasks=8.5)
    make_run(tmp_path / "runs" / "plain", "fedavg")
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    page = browser.new_page(viewport={"width": 1300, "height": 5000})
    page.goto((tmp_path / "report" / "report.html").as_uri())
    drawn(page)
    assert names(page, "epsilon") == ["DP-FedAvg"]
    assert page.eval_on_selector("#epsilon .plot", "(plot) => plot.data.map((t) => t.x)") == [[8.5]]
    page.close()


def test_runs_without_common_matrices_or_figures_have_a_page(browser: Any, tmp_path: Path) -> None:
    """Runs of a row differ in their tasks; a run with a matrix per client has stopped before its last task."""
    for seed, tasks in enumerate((3, 4)):
        make_run(tmp_path / "tasks" / f"run{seed}", seed=seed, tasks=tasks)
    table = make_run(tmp_path / "stopped" / "run", personal=5, stopped_early=True, rounds=6) / "rounds.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:5]))
    summary = table.with_name("summary.json")
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"rounds": 4}))
    for runs, words in (("tasks", ["--group-by", "method"]), ("stopped", [])):
        assert main([str(tmp_path / runs), *words, "--out", str(tmp_path / "report")]) == 0
        page = browser.new_page(viewport={"width": 1300, "height": 5000})
        page.goto((tmp_path / "report" / "report.html").as_uri())
        drawn(page)
        assert page.locator("#runs td").count() > 0
        page.close()


def test_charts_are_seen_and_not_blank(tab: Any) -> None:
    """Every method's line and every matrix is visible in its chart."""
    for chart in ("seen", "first", "rounds"):
        boxes = tab.eval_on_selector_all(
            f"#{chart} .scatterlayer .js-line",  # those of the bands have no width
            "(all) => all.map((one) => one.style.strokeWidth === '0px' ? 0 : one.getBoundingClientRect().width)",
        )
        assert sum(width > 200 for width in boxes) == 3, chart
    assert tab.locator("#matrices .heatmaplayer image").count() == 3


def test_hovering_shows_values(tab: Any) -> None:
    row = data(tab)["tables"][0]["rows"][2]  # fot
    expected = row["measures"]["accuracy"]
    tab.eval_on_selector("#seen .plot", "(plot) => plot.scrollIntoView()")
    place = tab.eval_on_selector(
        "#seen .plot",
        """(plot) => {
            const box = plot.getBoundingClientRect(), { xaxis: x, yaxis: y } = plot._fullLayout;
            const fot = plot.data.find((trace) => trace.name === "FOT");
            return [box.x + x._offset + x.d2p(1), box.y + y._offset + y.d2p(fot.y[1])];
        }""",
    )
    tab.mouse.move(place[0] - 3, place[1] - 3)
    tab.mouse.move(*place)
    tab.wait_for_selector("#seen .hoverlayer .hovertext", state="attached")
    text = tab.locator("#seen .hoverlayer").text_content()
    assert f"after task 1: {expected['seen'][1]:.2f} ± {expected['seen_std'][1]:.2f} %" in text
    assert "FOT" in text

    middle = tab.locator("#matrices .plot").nth(2).locator(".nsewdrag").first.bounding_box()
    tab.mouse.move(
        middle["x"] + middle["width"] / 6, middle["y"] + 5 * middle["height"] / 6
    )  # row 2, column 0 of 3 x 3
    tab.wait_for_selector("#matrices .hoverlayer .hovertext", state="attached")
    text = tab.locator("#matrices .plot").nth(2).locator(".hoverlayer").text_content()
    assert f"after task 2, on task 0: {expected['matrix'][2][0]:.2f} %" in text


def test_methods_are_hidden_and_shown_everywhere(tab: Any) -> None:
    chip = tab.locator("#methods button", has_text="FOT")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    for chart in ("seen", "first", "rounds", "uplink", "time"):
        assert names(tab, chart) == ["apd &lt;b&gt;&amp;", "FedAvg"], chart
    assert tab.locator("#matrices .plot:visible").count() == 2
    assert tab.locator("#means tbody tr").count() == 2
    assert tab.locator("#runs tbody tr").count() == 6
    chip.click()
    assert names(tab, "seen") == ["apd &lt;b&gt;&amp;", "FedAvg", "FOT"]
    tab.click("#none")
    assert names(tab, "seen") == []
    tab.locator("#methods button", has_text="FedAvg").dblclick()
    assert names(tab, "seen") == ["FedAvg"]
    tab.click("#all")
    assert tab.locator("#means tbody tr").count() == 3


def test_a_method_has_one_colour_in_all_charts(tab: Any) -> None:
    def colour(chart: str) -> str:
        return tab.eval_on_selector(
            f"#{chart} .plot", "(plot) => plot.data.filter((trace) => trace.name === 'FOT').at(-1).marker.color"
        )

    (found,) = {colour(chart) for chart in ("seen", "first", "rounds", "uplink", "time")}
    assert found == COLOURS[line_styles({"FOT": "fot"})["FOT"].colour], "as in pictures"


def test_tables_are_sorted_by_any_column(tab: Any) -> None:
    def column(place: int) -> list[str]:
        return tab.locator(f"#means tbody td:nth-child({place})").all_text_contents()

    accuracies = {row["label"]: row["figures"]["acc"][0] for row in data(tab)["tables"][0]["rows"]}
    labels = data(tab)["labels"]
    by_accuracy = [labels[k] for k in sorted(accuracies, key=lambda k: accuracies[k])]
    tab.locator("#means th", has_text="ACC %").locator("button").click()
    assert column(1) == by_accuracy
    assert tab.locator("#means th", has_text="ACC %").get_attribute("aria-sort") == "ascending"
    tab.locator("#means th", has_text="ACC %").locator("button").click()
    assert column(1) == by_accuracy[::-1]
    tab.locator("#means th", has_text="method").locator("button").click()
    assert column(1) == sorted(labels, key=str.lower)


def test_cells_show_ranks_and_differences_too(tab: Any) -> None:
    row = tab.locator("#means tbody tr", has_text="FOT")
    difference = data(tab)["tables"][0]["rows"][2]["differences"]["acc"]
    tab.select_option("#means select", "difference")
    low, high = (f"{end:+.2f}" for end in difference[1:3])
    assert row.locator("td").nth(2).text_content() == f"{difference[0]:+.2f} [{low}, {high}]"
    tab.select_option("#means select", "rank")
    assert row.locator("td").nth(2).text_content() == "1"


def test_measure_benchmark_axis_layer_and_task_can_be_chosen(tab: Any) -> None:
    tab.select_option("#measure", label="negative log-likelihood")
    drawn(tab)
    shown = tab.eval_on_selector("#seen .plot", "(plot) => plot.data.filter((t) => t.name).map((t) => t.y)")
    assert shown == [row["measures"]["nll"]["seen"] for row in data(tab)["tables"][0]["rows"]]
    tab.select_option("#rounds select", "uplink_bytes")
    assert tab.eval_on_selector("#rounds .plot", "(plot) => plot.layout.xaxis.title.text").startswith("uplink (MB)")
    tab.select_option("#space select", "fot.layers.1")
    assert tab.eval_on_selector("#space .plot", "(plot) => plot.data.map((t) => t.y)") == [[7.5, 15.0]]
    before = tab.eval_on_selector("#partition .plot", "(plot) => JSON.stringify(plot.data[0].z)")
    tab.select_option("#partition select", label="2")
    assert tab.eval_on_selector("#partition .plot", "(plot) => JSON.stringify(plot.data[0].z)") != before
    tab.select_option("#table", label="pmnist, shards-2, domain-incremental, 4 tasks")
    drawn(tab)
    assert names(tab, "seen") == ["FOT"]
    assert tab.locator("#measure").input_value() == "0", "accuracy: this benchmark has no other"
    assert tab.locator("#clients").count() == 0


def test_it_is_dark_where_the_reader_wants_it_dark(tab: Any) -> None:
    def brightness() -> int:
        colour = tab.eval_on_selector("body", "(body) => getComputedStyle(body).backgroundColor")
        return sum(int(part) for part in colour.strip("rgb()").split(","))

    assert brightness() > 700
    tab.emulate_media(color_scheme="dark")
    # The page is notified one frame later and then redraws all charts. Until then the light ones are shown.
    end = time.monotonic() + SECONDS / 1000
    while (ink := tab.eval_on_selector("#seen .plot", "(plot) => plot.layout?.font.color")) != "#e6edf3":
        assert time.monotonic() < end, f"charts are still drawn in {ink}"
        tab.wait_for_timeout(50)
    drawn(tab)
    assert brightness() < 100


def test_nothing_offers_to_send_data_away(tab: Any) -> None:
    titles = tab.eval_on_selector_all("#seen .modebar-btn", "(all) => all.map((one) => one.getAttribute('data-title'))")
    assert len(titles) == 4
    assert not any("cloud" in title.lower() or "studio" in title.lower() or "link" in title.lower() for title in titles)


def test_a_number_says_of_how_many_seeds_it_is_where_not_of_all(browser: Any, tmp_path: Path) -> None:
    for seed, fgt in enumerate((1.0, None, 3.0)):
        make_run(tmp_path / "runs" / f"fot-{seed}", "fot", seed, fgt=fgt)
        make_run(tmp_path / "runs" / f"er-{seed}", "er", seed, fgt=0.0)
    assert main([str(tmp_path / "runs"), "--baseline", "er", "--out", str(tmp_path / "report")]) == 0
    page = browser.new_page()
    page.goto((tmp_path / "report" / "report.html").as_uri())
    place = page.locator("#means th").all_text_contents().index("FGT") + 1
    cells = page.locator(f"#means tbody tr td:nth-child({place})")
    assert sorted(cells.all_text_contents()) == ["0.00 ± 0.00", "2.00 ± 1.41 (2 of 3)"]
    page.select_option("#means select", "difference")
    assert "+2.00 [\N{MINUS SIGN}10.71, +14.71] (2 of 3)" in cells.all_text_contents()
    page.close()
