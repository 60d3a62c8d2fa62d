"""Parameters of the model's config that clients read before they open a session: name, fingerprint, limits.

They come from the model's files within milliseconds, before the model is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from microturn.model.fingerprint import model_fingerprint
from microturn.model.positions import num_positions
from microturn.serve.errors import ServeError
from microturn.settings import MAX_IDLE_TIMEOUT_S, Settings

# Names of the config's parameters that are for clients, beside `protocol_version`.
PUBLISHED = ("model_name", "model_fingerprint", "limits")


def published_parameters(model: str, model_dir: Path, settings: Settings) -> dict[str, str]:
    """The parameters named in `PUBLISHED`.

    Args:
        model: an embedded model's name, a file or a directory, as the user gave it.
        model_dir: its directory.
        settings: of the engine that will run it.

    Raises:
        ServeError: the model cannot be read.
    """
    try:
        limits = {
            "max_context": settings.max_context or _trained_context(model_dir),
            "max_sessions": settings.max_sessions,
            "max_queued_turns": settings.max_queued_turns,
            "window_slack": settings.window_slack,
            "idle_timeout_s": settings.idle_timeout_s,
            "max_idle_timeout_s": MAX_IDLE_TIMEOUT_S,
        }
        return {
            "model_name": Path(model).name,
            "model_fingerprint": model_fingerprint(model_dir),
            "limits": json.dumps({name: limit for name, limit in limits.items() if limit is not None}),
        }
    except (OSError, ValueError) as error:
        raise ServeError(f"the model in {model_dir} cannot be read: {error}") from error


def _trained_context(model_dir: Path) -> int | None:
    """The longest context that the model can have; None where its config does not say."""
    config = json.loads((model_dir / "config.json").read_text())
    return num_positions(config.get("text_config", config).get)
