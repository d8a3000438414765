import ast
import importlib.metadata
import pathlib
import shutil

project = "shardfn"
author = "The shardfn authors"
copyright = author
version = release = importlib.metadata.version("shardfn")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = f"shardfn {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings write code in single backticks
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # `Attributes` beside annotated fields would describe them twice

myst_heading_anchors = 3  # links such as search.md#search-modes
nb_execution_mode = "off"  # notebooks are stored with their outputs, which the tests compare

DOCS = pathlib.Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
PAGES = DOCS / "_examples"  # git ignores it

INDEX = """# Examples

Notebooks, and scripts to start from. `python examples/01_matmul.py` runs one; the tests run all of them.

```{{toctree}}
:caption: Notebooks
:maxdepth: 1

{notebooks}
```

```{{toctree}}
:caption: Scripts
:maxdepth: 1

{scripts}
```
"""
SCRIPT = """# {title}

{text}

```{{literalinclude}} ../../examples/{name}.py
:language: python
```
"""
OUTPUT = """
It prints:

```{{literalinclude}} ../../examples/outputs/{name}.txt
:language: text
```
"""


def make_example_pages():
    """Copy the notebooks of examples/ to where Sphinx reads them, and write a page for each script."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    notebooks, scripts = sorted((EXAMPLES / "notebooks").glob("*.ipynb")), sorted(EXAMPLES.glob("[0-9]*.py"))
    for path in notebooks:
        shutil.copy(path, PAGES)
    for path in scripts:
        first, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem).partition("\n")
        title, _, more = first.rstrip(".").partition(": ")
        page = SCRIPT.format(title=title, text="\n".join(filter(None, [more and more[0].upper() + more[1:] + ".", rest])),
                             name=path.stem)  # fmt: skip
        if (EXAMPLES / "outputs" / f"{path.stem}.txt").exists():
            page += OUTPUT.format(name=path.stem)
        (PAGES / f"{path.stem}.md").write_text(page, encoding="utf-8")
    names = {"notebooks": notebooks, "scripts": scripts}
    lists = {kind: "\n".join(path.stem for path in paths) for kind, paths in names.items()}
    (PAGES / "index.md").write_text(INDEX.format(**lists), encoding="utf-8")


make_example_pages()


def without_module_docstring(app, what, name, obj, options, lines):
    """Drop the docstring of a package: it lists the modules inside, and the page has its own introduction."""
    if what == "module":
        lines.clear()


def without_notebooks_in_search(app, doctree):
    """Let the search find a notebook by its title only: its cells and outputs are code."""
    if (PAGES / f"{pathlib.Path(app.env.docname).name}.ipynb").exists():
        app.env.metadata[app.env.docname]["nosearch"] = True


def setup(app):
    """Register the hooks."""
    app.connect("autodoc-process-docstring", without_module_docstring)
    app.connect("doctree-read", without_notebooks_in_search)
