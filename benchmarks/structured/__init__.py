"""Structured outputs: do answers keep to what was asked, what is let in, and what it costs."""
