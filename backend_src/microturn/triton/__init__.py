"""The Triton Python backend: requests to turns, answers to responses, sequence slots. Open `adapter` first.

    request ──▶ adapter ──▶ engine ──▶ response stream ──▶ responses (rate limit: answer_pace) ──▶ Triton

Only `adapter` imports Triton's module; `slot_keeper` and `reporting` get it, or a class of it, as an argument.
`sequence_slots` decides which of Triton's sequence slots to release, `slot_keeper` releases them.
"""
