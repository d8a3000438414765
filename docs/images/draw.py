"""Draw the pictures of the README and the site: `python docs/images/draw.py` writes each as SVG.

Those of a plan are drawn by the library, from the plan of `docs/reference/pictures.md`; the others come light and dark.
"""

import pathlib
from collections.abc import Callable

FOLDER = pathlib.Path(__file__).parent
THEMES = {
    "light": {"text": "#1f2328", "faint": "#59636e", "line": "#8c959f", "box": "#f6f8fa", "accent": "#9a3412"},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "line": "#6e7681", "box": "#161b22", "accent": "#fdba74"},
}
ROWS = ("#4c8dd6", "#8fbcea")
"""Shards along mesh axis a."""
COLUMNS = ("#e0a030", "#cf6a3c", "#b85c93", "#3f9d78")
"""Shards along mesh axis b."""
MONO, SANS = (
    "ui-monospace, 'SF Mono', Menlo, Consolas, monospace",
    "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
)


class Canvas:
    """Elements of one SVG in the colours of a theme."""

    def __init__(self, width: int, height: int, title: str, theme: dict[str, str]):
        self.theme = theme
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{theme["accent"]}"/></marker></defs>',
        ]

    def text(self, x, y, text, size=13, colour="text", anchor="middle", mono=False, bold=False):
        style = f'font-family="{MONO if mono else SANS}" font-size="{size}"' + (' font-weight="600"' if bold else "")
        self.parts.append(
            f'<text x="{x}" y="{y}" {style} fill="{self.theme[colour]}" text-anchor="{anchor}">{text}</text>'
        )

    def box(self, x, y, width, height, fill="box", line="line", radius=0):
        fill, line = self.theme.get(fill, fill), self.theme.get(line, line)
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{line}"/>'
        )

    def arrow(self, x1, y1, x2, y2, both=False):
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{self.theme["accent"]}" stroke-width="1.6"'
            f'{start} marker-end="url(#tip)"/>'
        )

    def done(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def mlp(theme: dict[str, str]) -> str:
    """The sharded MLP: integers, the shards of every device of a 2 x 4 mesh, and the one all-reduce."""
    c = Canvas(960, 372, "relu(x @ w1) @ w2 sharded by integers over a 2 x 4 mesh, with one all-reduce", theme)
    c.text(112, 26, "integers in", 15, bold=True)
    for name, strategy, top, (width, height), shards in (
        ("x", "(2, 1)", 46, (64, 64), [(0, i * 32, 64, 32, ROWS[i]) for i in range(2)]),
        ("w1", "(1, 4)", 148, (88, 64), [(i * 22, 0, 22, 64, COLUMNS[i]) for i in range(4)]),
        ("w2", "(4, 1)", 250, (64, 88), [(0, i * 22, 64, 22, COLUMNS[i]) for i in range(4)]),
    ):
        left = 150 - width // 2
        for x, y, w, h, colour in shards:
            c.box(left + x, top + y, w, h, colour)
        c.text(94, top + height / 2 - 3, name, 14, anchor="end", mono=True)
        c.text(94, top + height / 2 + 15, strategy, 13, "faint", "end", mono=True)
    c.arrow(212, 186, 250, 186)

    c.text(520, 26, "shards on a mesh, a=2 x b=4", 15, bold=True)
    for column in range(4):
        c.text(328 + column * 128, 46, f"b={column}", 12, "faint", mono=True)
    for row in range(2):
        for column in range(4):
            x, y = 272 + column * 128, 52 + row * 158
            c.box(x, y, 112, 96, radius=6)
            c.text(x + 8, y + 16, f"device {4 * row + column}", 11, "faint", "start")
            c.box(x + 12, y + 36, 28, 14, ROWS[row])
            c.box(x + 52, y + 28, 10, 30, COLUMNS[column])
            c.box(x + 74, y + 38, 28, 10, COLUMNS[column])
            for at, name in ((26, "x"), (57, "w1"), (88, "w2")):
                c.text(x + at, y + 82, name, 11, "faint", mono=True)
        c.arrow(280, 166 + row * 158, 760, 166 + row * 158, both=True)
        c.text(520, 184 + row * 158, "all-reduce over b: 1.5 KiB sent by each device", 12, "accent")
    c.text(258, 104, "a=0", 12, "faint", "end", mono=True)
    c.text(258, 262, "a=1", 12, "faint", "end", mono=True)

    c.arrow(790, 186, 828, 186)
    c.text(872, 26, "result", 15, bold=True)
    for i in range(2):
        c.box(840, 154 + i * 32, 64, 32, ROWS[i])
    c.text(872, 240, "y", 14, mono=True)
    c.text(872, 258, "(2, 1)", 13, "faint", mono=True)
    c.text(872, 276, "propagated", 12, "faint")
    return c.done()


def search(theme: dict[str, str]) -> str:
    """The stages of the search."""
    c = Canvas(880, 310, "From a traced function to a plan", theme)
    stages = [
        (20, 40, "your function", "traced once; entries stand"),
        (240, 40, "meshes", "16, 8x2, 2x8, 4x4"),
        (460, 40, "labels and costs", "shardings of each op"),
        (680, 40, "solver", "a proof or a gap"),
        (680, 190, "candidates", "solutions and baselines"),
        (460, 190, "partitioned programs", "collectives, memory, time"),
        (240, 190, "compiled candidates", "only if you ask for them"),
        (20, 190, "plan", "cheapest that fits"),
    ]
    for x, y, title, below in stages:
        c.box(x, y, 180, 70, radius=8)
        c.text(x + 90, y + 31, title, 14, bold=True)
        c.text(x + 90, y + 52, below, 12, "faint")
    for x in (200, 420, 640):
        c.arrow(x + 3, 75, x + 37, 75)
        c.arrow(x + 37, 225, x + 3, 225)
    c.arrow(770, 114, 770, 186)
    c.text(760, 155, "the best few meshes", 12, "faint", "end")
    c.parts.append(
        f'<path d="M550 264 C550 292 770 292 770 266" fill="none" stroke="{theme["accent"]}" stroke-width="1.6" '
        'marker-end="url(#tip)"/>'
    )
    c.text(660, 302, "local search: change one array", 12, "faint")
    return c.done()


def halo(theme: dict[str, str]) -> str:
    """An array in 2 x 4 shards, and one shard with the row and the columns that its device receives."""
    c = Canvas(760, 268, "The halo of one shard: a row and two columns of its neighbours", theme)
    cell, left, top = 12, 40, 52
    c.text(left + 8 * cell, 26, "u, strategy (2, 4)", 14, mono=True)
    for row in range(2):
        for column in range(4):
            c.box(left + column * 4 * cell, top + row * 8 * cell, 4 * cell, 8 * cell, COLUMNS[column])
    x, y = left + 4 * cell, top
    read = [(x - cell, y, cell, 8 * cell), (x + 4 * cell, y, cell, 8 * cell), (x, y + 8 * cell, 4 * cell, cell)]
    for each in read:
        c.box(*each, ROWS[0], "text")
    c.text(x + 2 * cell, y + 4 * cell + 5, "device 1", 11, "text")
    c.arrow(270, 148, 320, 148)
    c.text(460, 26, "what device 1 computes with", 14, bold=True)
    x, y, cell = 412, 52, 24
    c.box(x, y, 4 * cell, 8 * cell * 0.9, COLUMNS[1])
    tall = 8 * cell * 0.9
    for left_side in (x - cell, x + 4 * cell):
        c.box(left_side, y, cell, tall, ROWS[0], "text")
    c.box(x, y + tall, 4 * cell, cell * 0.9, ROWS[0], "text")
    c.text(x + 2 * cell, y + tall / 2, "its shard", 13)
    for height, text in ((86, "a column from device 0"), (116, "a column from device 2"), (146, "a row from device 5")):
        c.box(560, height - 11, 12, 12, ROWS[0], "text")
        c.text(582, height, text, 13, anchor="start")
    c.text(560, 186, "one collective-permute", 12, "accent", "start")
    c.text(560, 204, "for each direction", 12, "accent", "start")
    return c.done()


def draw_a_plan() -> None:
    """The pictures that a plan draws of itself: they follow the page's theme."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from examples.models import abstract, gpt2
    from shardfn import plan
    from shardfn.draw import KINDS

    step, arguments = abstract(gpt2.make, gpt2.small())
    made = plan(step, *arguments, device="h100:8", donate_argnums=(0, 1))
    for kind in KINDS:
        made.draw(kind).save(FOLDER / f"plan-{kind}.svg")


PICTURES: dict[str, Callable[[dict[str, str]], str]] = {"mlp": mlp, "search": search, "halo": halo}


def main() -> None:
    """Write every picture in every theme."""
    draw_a_plan()
    for name, draw in PICTURES.items():
        for theme, colours in THEMES.items():
            (FOLDER / f"{name}-{theme}.svg").write_text(draw(colours), encoding="utf-8")


if __name__ == "__main__":
    main()
