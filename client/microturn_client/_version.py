"""The version of the distribution; `pyproject.toml` reads it here. Asking the installed metadata would take 30 ms."""

__version__ = "0.1.0"
