"""From logits to tokens: adjust, filter, draw."""
