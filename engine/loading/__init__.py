"""Reads model files from disk: GGUF and safetensors."""
