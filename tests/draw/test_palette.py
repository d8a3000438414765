import re

import pytest

from shardfn.draw.palette import PALETTE, style_sheet


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, two):
    """WCAG 2.2's contrast ratio."""
    dark, light = sorted((luminance(one), luminance(two)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", (0, 1), ids=("light", "dark"))
def test_texts_and_shapes_have_accessible_contrast(theme):
    colour = {name: both[theme] for name, both in PALETTE.items()}
    assert contrast(colour["ink"], colour["paper"]) >= 7
    assert contrast(colour["muted"], colour["paper"]) >= 4.5
    assert contrast(colour["limit"], colour["paper"]) >= 4.5
    for name in colour:
        if name.startswith(("strong", "grey")):
            assert contrast(colour[name], colour["paper"]) >= 3, name
        if name.startswith(("soft", "pale")):
            assert contrast(colour["ink"], colour[name]) >= 7, name
            assert contrast(colour["muted"], colour[name]) >= 4.5, name


def test_style_sheet_holds_only_what_is_used():
    css = style_sheet({"ink", "line-rule"})
    assert set(re.findall(r"--(\w+):", css)) == {"ink", "rule"}
    assert "strong0" not in css


def test_style_sheet_follows_the_theme_of_the_page_before_that_of_the_system():
    css = style_sheet({"ink"})
    light, dark = PALETTE["ink"]
    assert css.count(f"--ink:{dark}") == 2
    order = ("prefers-color-scheme:dark", "[data-theme=light]", "[data-theme=dark]", "@media print")
    assert sorted(map(css.index, order)) == list(map(css.index, order))
    assert css.index(f"--ink:{light}", css.index("@media print"))  # paper is light


def test_style_sheet_has_a_colour_for_readers_without_variables():
    assert f"fill:{PALETTE['ink'][0]};fill:var(--ink)" in style_sheet({"ink"})
