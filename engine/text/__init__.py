"""Text to tokens and back: templates, tokenizers, incremental decoding, stop strings."""
