"""The chat itself: message view, Markdown, code blocks, composer."""
