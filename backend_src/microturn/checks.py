"""What a turn says, checked when it arrives: all that does not depend on its session."""

from __future__ import annotations

from microturn.errors import InvalidArgument
from microturn.runner import Runner
from microturn.turn import EmbedInput, TextInput, TokenInput, TurnRequest

# A negative id arrives as what it would be without its sign.
_END_OF_IDS = 2**63


def check_request(request: TurnRequest, runner: Runner) -> None:
    """Checks a turn against what the model takes.

    Raises:
        MicroturnError: why the turn must not run.
    """
    if request.refusal is not None:
        raise request.refusal
    if isinstance(request.session_id, int) and request.session_id >= _END_OF_IDS:
        raise InvalidArgument("a session id is an integer in [1, 2^63), or a text of 1 to 128 bytes")
    match request.input:
        case TokenInput(token_ids):
            if not all(0 <= token_id < runner.vocab_size for token_id in token_ids):
                raise InvalidArgument(f"input_ids are from 0 to {runner.vocab_size - 1}")
        case EmbedInput(embeds):
            if not runner.accepts_embeds:
                raise InvalidArgument("this model takes no input_embeds: send ids or text")
            if embeds.shape[1] != runner.hidden_size:
                raise InvalidArgument(f"input_embeds are [1, n, {runner.hidden_size}], not [1, n, {embeds.shape[1]}]")
            if not bool(embeds.isfinite().all()):
                raise InvalidArgument("input_embeds hold a value that is not finite")
        case TextInput():
            pass  # any text becomes tokens
    if any(token_id >= runner.vocab_size for token_id in request.options.get("stop_token_ids", ())):
        raise InvalidArgument(f"stop_token_ids are from 0 to {runner.vocab_size - 1}")
