import xml.etree.ElementTree as ET

import pytest

from shardfn.draw import svg
from shardfn.draw.scale import Scale

NAMES = (
    "params/encoder/layers/attention/query/kernel",
    "x" * 300,
    "W",
    "",
    "模型/权重/层" * 9,
    "a/" * 80,
    "☃" * 40,
    "__init__",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", (3, 20, 90, 400))
def test_fitted_text_is_never_wider_than_its_room(name, width):
    short = svg.fitted(name, width)
    assert svg.text_width(short) <= width
    assert short == name or svg.text_width(name) > width


@pytest.mark.parametrize("width", (30, 120, 500))
def test_wrapped_lines_fit_and_keep_the_words(width):
    words = ["every", "device", "holds", "all", "of", "it", "and", "nothing", "is", "sent"]
    lines = svg.wrapped(" ".join(words), width, most=20)
    assert all(svg.text_width(line) <= width for line in lines)
    if width > 60:
        assert " ".join(lines).split() == words


def test_wrapped_ends_after_the_most_lines():
    assert len(svg.wrapped("word " * 100, 50, most=3)) == 3


def test_page_is_xml_whatever_the_texts_are():
    nasty = "<b>&\"'\x00\x1f\ud800\ufffe]]>é模"
    root = ET.fromstring(
        svg.page(
            100, 50, [svg.text(1, 1, nasty, title=nasty), svg.rectangle(0, 0, 1, 1, "ink", title=nasty)], nasty, nasty
        )
    )
    texts = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith(("text", "title"))]
    assert all("<b>&" in text for text in texts)
    assert root.get("role") == "img" and "<b>&" in root.get("aria-label")


def test_shapes_have_tooltips_only_where_asked():
    assert "<title>" not in svg.circle(0, 0, 1, "ink") + svg.line([(0, 0), (1, 1)], "ink") + svg.text(0, 0, "a")
    assert svg.circle(0, 0, 1, "ink", title="a").endswith("<title>a</title></circle>")


@pytest.mark.parametrize(
    ("low", "high", "is_log"),
    ((0, 1, False), (0, 0, False), (5, 5, False), (3e9, 4e9, False), (1, 2**40, True), (7, 7, True)),
)
def test_scale_keeps_its_ticks_and_values_within_its_pixels(low, high, is_log):
    scale = Scale(low, high, 10, 90, is_log)
    for value in (low, high, *scale.ticks()):
        assert 10 <= scale(value) <= 90
    assert len(scale.ticks()) <= 7


def test_scale_has_zero_before_the_lowest_value_of_a_logarithm():
    scale = Scale(1024, 2**30, 0, 100, is_log=True)
    assert scale(0) == 0 < scale(1024) < scale(2**20) < scale(2**30) == 100
