"""A plan as text, HTML and JSON."""
