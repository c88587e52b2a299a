"""Speculative decoding: cheap guesses at the next tokens, verified by the model in one step."""
