"""The HTML page of a report: what is on it, that it is safe and needs nothing else; and a look at it in a browser."""

import functools
import html.parser
import json
import os
import re

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.errors import StrategyError

EVIL = "<script>alert('x')</script>\"&"


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, "float32")


def mlp(params, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w["up"]) @ w["down"]  # a <comment> & more
    return x


def train(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(mlp(p, x) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def total(arrays):
    return sum(jnp.sum(a) for a in arrays.values())


PARAMS = {"layers": [{"up": shape(256, 1024), "down": shape(1024, 256)} for _ in range(3)]}
CASES = {
    "training": (train, (PARAMS, shape(512, 256)), {"parameter_plan": {"*/up": (1, 4), "*/down": (4, 1)}, "in_strategy": (shardfn.AUTO, (2, 1))}, "tpu-v5e:2x4"),
    "searched": (mlp, (PARAMS, shape(512, 256)), {"level": "time"}, "h100:8"),
    "evil names": (total, ({EVIL: shape(64, 64), "a_very_long_name/" * 12: shape(8, 4)},), {"parameter_plan": {"*": (8, 1)}}, "tpu-v5e:2x4"),
    "40 arguments": (total, ({f"array{i}x": shape(8, 16 + i) for i in range(40)},), {"parameter_plan": {"*": (8, 1)}}, "tpu-v5e:2x4"),
    "over the limit": (jnp.matmul, (shape(65536, 65536),) * 2, {"in_strategy": ((1, 1), (1, 2))}, "tpu-v5e:2"),
    "no collectives": (jnp.tanh, (shape(64, 64),), {"in_strategy": ((4, 1),)}, "tpu-v5e:4"),
    "one device": (jnp.matmul, (shape(16, 32), shape(32, 64)), {}, "tpu-v5e:1"),
    "no arguments": (lambda: jnp.zeros((8, 8)), (), {}, "tpu-v5e:4"),
}  # fmt: skip


@functools.cache
def report(case):
    function, args, options, device = CASES[case]
    return shardfn.explain(function, *args, device=device, **options)


@functools.cache
def parsed(case):
    return Page(report(case).to_html())


class Page(html.parser.HTMLParser):
    """Fails on a tag that is not closed. Keeps the tags with their attributes, the texts, and the cells of each table."""

    VOID = frozenset({"meta", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.links, self.ids = [], [], [], [], []
        self.rows, self.section, self.sections = [], "", {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "h2":
            self.section = ""
        if tag == "a":
            self.links.append(dict(attrs)["href"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr":
            self.sections.setdefault(self.section, []).append(self.rows.pop())

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)
        if "h2" in self.open:
            self.section += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    @property
    def text(self):
        return "".join(self.texts)


@pytest.mark.parametrize("case", CASES)
def test_page_is_well_formed_complete_and_alone(case):
    page, data = parsed(case), report(case).to_dict()
    text = page.text
    assert all(array["path"] in text for array in (*data["arguments"], *data["results"]))
    rows = page.sections.get("Collectives, per device and call", [[]])
    heads = {name: i for i, name in enumerate(rows[0])}
    counted = sum(int(row[heads["count"]] or 1) if "count" in heads else 1 for row in rows[1:])
    assert counted == len(data["collectives"])
    assert data["collectives"] or "none predicted" in text
    assert ("Does not fit" in text) is (case == "over the limit")
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert all(link.startswith("#") for link in page.links)
    # Nothing loads: no such element, and a policy that forbids it. (xmlns names a format.)
    assert not {"link", "img", "image", "iframe", "object", "use"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") or name == "src" for _, attributes in page.tags for name in attributes)
    assert "default-src 'none'" in report(case).to_html()
    assert set(re.findall(r"https?://[^\"' ]+", report(case).to_html())) <= {"http://www.w3.org/2000/svg"}
    assert "url(" not in report(case).to_html() and "@import" not in report(case).to_html()


@pytest.mark.parametrize("case", CASES)
def test_page_shows_three_pictures_at_two_widths(case):
    drawn = [attributes["aria-label"] for tag, attributes in parsed(case).tags if tag == "svg"]
    assert [label.split()[0] for label in drawn[:6]] == ["Arrays", "Arrays", "Memory", "Memory", "Modelled", "Modelled"]
    assert len(drawn) == (8 if report(case).to_dict()["candidates"] else 6)


def test_page_escapes_names_and_code():
    scripts = [tag for tag, _ in parsed("evil names").tags if tag == "script"]
    assert scripts == ["script"]
    assert EVIL in parsed("evil names").text
    assert "# a <comment> & more" in parsed("training").text


def test_page_links_each_collective_to_its_code():
    page, found = parsed("training"), report("training").to_dict()["collectives"]
    rows = page.sections["Collectives, per device and call"]
    column = rows[0].index("line")
    assert len(page.links) >= len(rows) - 1  # the ops of these lines link there too
    for row in rows[1:]:
        assert re.match(r"test_page\.py:\d+ \S", row[column])
    lines = {int(c["where"].rpartition(":")[2]) for c in found}
    shown = {int(row[0]): row for row in page.sections["Code that communicates"]}
    assert lines <= set(shown)
    assert all("all-reduce" in shown[line][2] for line in lines)


def test_page_shows_all_rows_and_what_they_stand_for():
    assert len(parsed("40 arguments").sections["Arguments"]) == 41
    assert "params/layers/0/up, params/layers/1/up, params/layers/2/up" in parsed("training").text


def test_page_folds_all_but_arguments_collectives_and_their_code():
    states = re.findall(r"<details( open)?><summary><h2>(\w+)", report("training").to_html())
    is_open = {title: bool(state) for state, title in states}
    assert {title for title in is_open if is_open[title]} == {"Arguments", "Collectives", "Code"}
    assert {"Results", "Mesh", "Shards", "Memory", "Dimension", "Op"} <= set(is_open)
    titles = re.findall(r"<details><summary><h2>(\w+)", report("searched").to_html())
    assert titles[0] == "Search"
    assert "Candidates" in titles


def test_page_is_the_same_each_time():
    function, args, options, device = CASES["training"]
    again = shardfn.explain(function, *args, device=device, **options)
    assert again.to_html() == report("training").to_html()


def test_page_compares_with_the_compiled_program():
    x = jnp.ones((16, 32))
    text = Page(shardfn.shard(jnp.matmul, ((2, 4), (4, 1))).explain(x, x.T, compiled=True).to_html()).text
    assert "compare them with the compiled program" in text
    assert "They agree." in text


# ---- files


def test_report_is_saved_as_its_ending_says(tmp_path):
    made = report("no collectives")
    for name in ("report.html", "report.json", "report.txt"):
        made.save(tmp_path / name)
    assert (tmp_path / "report.html").read_text("utf-8") == made.to_html() + "\n"
    assert json.loads((tmp_path / "report.json").read_text("utf-8")) == made.to_dict()
    assert (tmp_path / "report.txt").read_text("utf-8") == made.to_text() + "\n"


@pytest.mark.parametrize(
    ("path", "why", "fix"),
    [
        ("report.pdf", "ends in .html, .json or .txt", "save it as 'report.html'"),
        ("report", "ends in .html, .json or .txt", "save it as 'report.html'"),
        ("/nowhere/at/all/report.html", "No such file", "a directory that exists"),
    ],
)
def test_report_that_cannot_be_saved_is_an_error_with_a_fix(path, why, fix):
    with pytest.raises(StrategyError) as error:
        report("no collectives").save(path)
    assert why in error.value.problems[0].why
    assert fix in error.value.problems[0].fix


# ---- in a browser


@pytest.fixture(scope="module")
def browser():
    """Chromium through Playwright; `SHARDFN_CHROMIUM` names another one than Playwright's own."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(executable_path=os.environ.get("SHARDFN_CHROMIUM"), args=["--no-sandbox", "--headless=shell"])  # fmt: skip
        except playwright.Error as error:
            pytest.skip(f"no browser: {str(error).splitlines()[0]}")
        yield found
        found.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a case; console messages and requests for anything else fail the test."""
    pages, wrong = [], []

    def load(case, width=1200, scheme="light"):
        path = tmp_path / f"{len(pages)}.html"
        report(case).save(path)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: None if request.url == path.as_uri() else wrong.append(request.url))
        page.goto(path.as_uri())
        return page

    yield load
    for page in pages:
        page.close()
    assert wrong == []


OVERFLOW = """() => [document.documentElement.scrollWidth - innerWidth, ...[...document.querySelectorAll('main *')].filter(
  e => !e.closest('[role=region]') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))]"""
BRIGHTNESS = (
    "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_browser_shows_the_page_at_two_widths_light_and_dark(opened, case):
    for width in (380, 1200):
        for scheme in ("light", "dark"):
            page = opened(case, width, scheme)
            assert page.evaluate(OVERFLOW) == [0]
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert page.evaluate(OVERFLOW) == [0]
            assert (page.evaluate(BRIGHTNESS) > 600) is (scheme == "light")
            assert page.locator("svg:visible").count() == (4 if report(case).to_dict()["candidates"] else 3)


@pytest.mark.slow
def test_browser_filters_and_sorts(opened):
    page = opened("training")
    arguments = page.locator("main>details", has=page.locator("h2", has_text="Arguments"))
    page.fill("input[type=search]", "layers/1/up")
    assert arguments.locator("tbody tr:visible").count() == 1
    assert "1 of 3 rows" in arguments.inner_text()
    page.fill("input[type=search]", "")
    assert arguments.locator("tbody tr:visible").count() == 3
    for names in (["x", "params"], ["params", "x"]):  # x is smaller than a weight: 256 and 768 KiB
        arguments.get_by_role("button", name="array" if names[0] == "params" else "per device").click()
    assert arguments.locator("tbody tr").last.inner_text().startswith("x")
    arguments.get_by_role("button", name="array").click()
    assert arguments.locator("tbody tr").first.inner_text().startswith("x")
    assert arguments.locator("[aria-sort=descending]").inner_text() == "array"


@pytest.mark.slow
def test_browser_follows_a_collective_to_its_code(opened):
    page = opened("training")
    page.locator("td a").first.click()
    assert page.evaluate("document.querySelector(':target').textContent").count("all-reduce")


@pytest.mark.slow
def test_browser_prints_light_and_unfolded(opened):
    page = opened("searched", 720, "dark")
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("main>details:not([open])").count() == 0
    assert page.evaluate(BRIGHTNESS) == 3 * 255
    assert page.locator("input:visible").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("main>details:not([open])").count() > 0


def test_page_has_collectives_before_arguments_and_who_chose_beside_the_strategy():
    page = parsed("training")
    titles = list(page.sections)
    first = [
        next(i for i, title in enumerate(titles) if title.startswith(name)) for name in ("Collectives", "Arguments")
    ]
    assert first == sorted(first)
    heads = page.sections[titles[first[1]]][0]
    assert heads.index("chosen by") == heads.index("strategy") + 1


def test_full_report_has_a_parameter_and_its_moments_in_one_row():
    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((x @ p["up"] @ p["down"]) ** 2))(params)
        state = {
            "mu": jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads),
            "nu": jax.tree.map(jnp.add, state["nu"], grads),
        }
        return jax.tree.map(lambda p, m, v: p - m / v, params, state["mu"], state["nu"]), state

    params = {"up": shape(256, 1024), "down": shape(1024, 256)}
    entries = {"*/up": (1, 8), "*/down": (8, 1), "x": (1, 1)}
    full = shardfn.explain(step, params, {"mu": params, "nu": params}, shape(512, 256), parameter_plan=entries,
                           device="tpu-v5e:2x4", detail="full")  # fmt: skip
    (table,) = (part for part in full.parts if part.title.startswith("Arguments"))
    assert [(row[0], row[table.columns.index("count")]) for row in table.rows] == [
        ("params/down and 2 alike", "3"), ("params/up and 2 alike", "3"), ("x", ""),
    ]  # fmt: skip
    assert table.rows[0][0].members == ("params/down", "state/mu/down", "state/nu/down")
