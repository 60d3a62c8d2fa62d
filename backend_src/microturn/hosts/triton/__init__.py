"""The Triton Python backend. Open `adapter` first.

    request ──▶ adapter ──▶ engine ──▶ response stream ──▶ responses (rate limit: answer_pace) ──▶ Triton

Only `adapter` imports Triton's module; `slot_keeper` gets it as an argument. `sequence_slots` decides which of Triton's
sequence slots to release, `slot_keeper` releases them.
"""
