import importlib.metadata

project = "shardfn"
author = "The shardfn authors"
copyright = author
version = release = importlib.metadata.version("shardfn")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = f"shardfn {release}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings write code in single backticks
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # `Attributes` beside annotated fields would describe them twice

myst_heading_anchors = 3  # links such as planner.md#what-is-kept
nb_execution_mode = "auto"  # notebooks with stored outputs are not run again
nb_execution_raise_on_error = True
nb_execution_timeout = 300


def without_module_docstring(app, what, name, obj, options, lines):
    """Drop the docstring of a package: it lists the modules inside, and the page has its own introduction."""
    if what == "module":
        lines.clear()


def setup(app):
    """Register the hook."""
    app.connect("autodoc-process-docstring", without_module_docstring)
