"""From a question to a plan: mesh inference, `Plan`, constraints, diagnostics, what-if analysis."""
