import dataclasses
import html.parser
import re

import pytest

from shardfn.render.html import to_html
from shardfn.render.parts import Drawing, Placed, Table, Text
from shardfn.render.text import Shown, to_text

DRAWING = Drawing(
    "Shards by device",
    (("a", 2), ("b", 2)),
    (0, 1, 2, 3),
    (Placed("x", ("[0:2, :]",) * 2 + ("[2:4, :]",) * 2), Placed("w", ("[:, :]",) * 4)),
    "all devices are shown",
)
PATH = "params/blocks/*/attention/output/projection/kernel"
PARTS = (
    Text("", ("dense on 8 devices", "a long line that has to fold because it is wider than most terminals are: " * 2)),
    Table(
        "Arguments",
        ("array", "shape", "B/device", "share", "chosen"),
        (
            ("x", "float32[64,32]", "2 KiB", "<0.1%", "(4, 1): in_strategy[0]"),
            ("[red]w[/red]", "bf16[32,128]", "8", "12.5%", ":smile: & <b>bold</b>"),
            (PATH, "int8[]", "1e-05", "-", ""),
        ),
        "one device has 16 GiB",
    ),
    DRAWING,
    Text("Diagnostics", ("none",)),
)


def test_to_text_at_80_columns(golden):
    golden("render_80", to_text(PARTS, 80))


@pytest.mark.parametrize("width", range(60, 130, 3))
def test_to_text_at_any_width_breaks_no_shape_and_no_path(width):
    text = to_text(PARTS, width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("float32[64,32]", "bf16[32,128]", "int8[]", "(4, 1)", "in_strategy[0]"):
        assert word in text
    assert PATH in text or re.search(r"\B…/\S*kernel|params/…/\S*kernel", text)


def test_to_text_without_a_width_wraps_nothing():
    assert len(to_text(PARTS).splitlines()) == 13
    assert PATH in to_text(PARTS)


def test_to_text_leaves_out_colours_and_markup():
    text = to_text(PARTS)
    assert "\x1b" not in text
    assert "[red]w[/red]" in text  # brackets are text, not markup
    assert ":smile:" in text
    assert not re.search(r"[\u2500-\u257f]", text)


def test_shown_on_a_terminal_has_bold_titles():
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=100)
    with console.capture() as capture:
        console.print(Shown(PARTS))
    assert "\x1b[1mArguments" in capture.get()


class Balanced(html.parser.HTMLParser):
    """Fails on a tag that is not closed; gathers the tags, the texts and the attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_to_html_needs_no_other_file():
    text = to_html(PARTS, "a <plan>")
    found = Balanced(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert not any(name.startswith("on") or name in ("src", "href") for each in found.attributes for name in each)
    assert "http" not in text and "url(" not in text and "@import" not in text


def test_to_html_escapes_everything():
    evil = '<script>alert("1")</script>\'"&'
    parts = (
        Text(evil, (evil,)),
        Table(evil, (evil, evil), ((evil, evil),), evil),
        Drawing(evil, ((evil, 1),), (0,), (Placed(evil, (evil,)),), evil),
    )
    found = Balanced(to_html(parts, evil))
    assert "script" not in found.tags
    assert sum(evil in text for text in found.texts) >= 9


def test_to_html_is_accessible():
    found = Balanced(to_html(PARTS, "a plan"))
    heads = [a for tag, a in zip(found.tags, found.attributes, strict=True) if tag == "th"]
    assert all(a.get("scope") in ("row", "col") for a in heads)
    regions = [a for a in found.attributes if a.get("role") == "region"]
    assert regions and all(a.get("aria-label") and a.get("tabindex") == "0" for a in regions)
    assert "caption" in found.tags
    # What the colour says, the text says too; and text keeps the page's colour on translucent cells.
    assert any("[2:4, :]" in text for text in found.texts)
    css = "".join(found.texts)
    assert not re.search(r"[{;]color:", css)
    assert all("/.28)" in a["style"] for a in found.attributes if "style" in a)


def cells(text):
    return re.findall(r'<td style="background:hsl\((\d+) [^"]*"><small>(\d+)</small> ([^<]*)</td>', text)


def test_to_html_of_a_drawing_colours_by_shard():
    found = cells(to_html((DRAWING,), ""))
    assert [(device, shard) for _, device, shard in found[:4]] == [
        ("0", "[0:2, :]"), ("1", "[0:2, :]"), ("2", "[2:4, :]"), ("3", "[2:4, :]"),
    ]  # fmt: skip
    hues = [hue for hue, _, _ in found]
    assert hues[0] == hues[1] != hues[2] == hues[3]
    assert len(set(hues[4:])) == 1


@pytest.mark.parametrize("axes", [(("a", 8),), (("a", 2), ("b", 2), ("c", 2))])
def test_to_html_of_a_drawing_has_a_row_for_all_but_the_last_axis(axes):
    drawing = Drawing("", axes, tuple(range(8)), (Placed("x", tuple(f"[{i}:{i + 1}]" for i in range(8))),))
    text = to_html((drawing,), "")
    assert [int(device) for _, device, _ in cells(text)] == list(range(8))
    assert text.count("<tr>") == 1 + 8 // axes[-1][1]
    assert ("a=1 b=0" in text) is (len(axes) == 3)


def test_to_html_closes_long_tables_and_tables_of_detail():
    short, long = (Table("t", ("a",), (("1",),) * n) for n in (24, 25))
    assert "<details>" in to_html((dataclasses.replace(short, is_open=False),), "")
    assert "<details open>" in to_html((short,), "")
    assert "<details>" in to_html((long,), "")


def test_no_parts_render_as_nothing():
    assert to_text(()) == ""
    Balanced(to_html((), "nothing"))
