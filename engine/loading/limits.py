"""How large a model may say it is. A file that lies is refused before memory is spent on what it claims."""

MAX_LAYERS = 4096
"""Thirty times as many as the deepest model published."""
MAX_LABELS = 1 << 20
"""Of a classifier; those of published ones are fewer than 100,000."""
MAX_CONTEXT = 1 << 24
"""Tokens; published models go up to 10 million."""
SMALL_TABLES = 64 << 20
"""Bytes that tables of rotary angles may take of any model; larger ones no more than its weights."""
MAX_EXPERTS = 1 << 17
"""Experts of all layers together; published models have up to 24,000."""
