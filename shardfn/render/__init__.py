"""Parts (texts, tables, drawings) as terminal text, plain text or HTML. This package knows nothing of plans."""
