"""How large a model may say it is. A file that lies is refused before memory is spent on what it claims."""

MAX_LAYERS = 4096
"""Thirty times as many as the deepest model published."""
MAX_CONTEXT = 1 << 24
"""Tokens; published models go up to 10 million."""
