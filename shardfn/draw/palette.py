"""The colours of pictures, for light and dark pages. A page that has a theme of its own decides; else the system does."""

from __future__ import annotations

from collections.abc import Iterable

COLOURS = 8
"""How many hues there are."""

PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#15191e"),
    "ink": ("#1b2128", "#e8ebee"),
    "muted": ("#4d5864", "#b3bcc6"),
    "rule": ("#d5dae0", "#39424c"),
    "grey": ("#7b8794", "#8793a0"),
    "pale": ("#e9ecf0", "#2a323b"),
    "limit": ("#c02626", "#ff8a80"),
    "strong0": ("#2b6cb0", "#6aa9f4"),
    "strong1": ("#c2570c", "#f2a154"),
    "strong2": ("#0f766e", "#4cc9bf"),
    "strong3": ("#7c3aad", "#c49bf5"),
    "strong4": ("#b5286f", "#f58abd"),
    "strong5": ("#4d7c0f", "#a3cf5a"),
    "strong6": ("#946200", "#e0bd4a"),
    "strong7": ("#475a8f", "#a5b4e8"),
    "soft0": ("#cfe2f8", "#1c3f68"),
    "soft1": ("#fbdcc2", "#663910"),
    "soft2": ("#c6ebe6", "#114f4a"),
    "soft3": ("#e6d7f7", "#4a2c6d"),
    "soft4": ("#f8d2e5", "#6d2450"),
    "soft5": ("#dcebc0", "#395313"),
    "soft6": ("#f4e2ae", "#57460c"),
    "soft7": ("#d8def2", "#37446e"),
}
"""Each colour on a light and on a dark page. `strong` ones have a contrast of 3 to `paper`; texts read on `soft` ones."""

_LIGHT = ("[data-theme=light]", '[data-jp-theme-light="true"]', ".vscode-light")
_DARK = ("[data-theme=dark]", '[data-jp-theme-light="false"]', ".vscode-dark")
"""How pages say their theme: Sphinx (furo) and others, JupyterLab, notebooks in VS Code."""


def strong(number: int) -> str:
    """The name of a hue for bars and lines."""
    return f"strong{number % COLOURS}"


def soft(number: int) -> str:
    """The name of a hue below text."""
    return f"soft{number % COLOURS}"


def style_sheet(used: Iterable[str]) -> str:
    """The CSS of a picture: a variable and a rule for each colour used, by the name of its class.

    A class `line-x` draws lines in colour `x`. Readers of SVG that know no variables show the colours for light pages.

    >>> "prefers-color-scheme:dark" in style_sheet(["ink"])
    True
    """
    used = sorted(used)
    colours = sorted({name.removeprefix("line-") for name in used})
    light, dark = (";".join(f"--{name}:{PALETTE[name][is_dark]}" for name in colours) for is_dark in (0, 1))
    own = ".shardfn-picture"
    rules = [
        f"{own}{{color-scheme:light dark;{light}}}",
        f"@media (prefers-color-scheme:dark){{{own}{{{dark}}}}}",
        f"{','.join(f'{theme} {own}' for theme in _LIGHT)}{{{light}}}",
        f"{','.join(f'{theme} {own}' for theme in _DARK)}{{{dark}}}",
        f"@media print{{{own},:root {own}{{{light}}}}}",
    ]
    for name in used:
        colour = name.removeprefix("line-")
        what = "stroke" if name.startswith("line-") else "fill"
        rules.append(f"{own} .{name}{{{what}:{PALETTE[colour][0]};{what}:var(--{colour})}}")
    return "".join(rules)
