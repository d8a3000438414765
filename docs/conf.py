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
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
