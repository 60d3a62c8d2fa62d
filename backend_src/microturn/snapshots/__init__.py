"""Sessions that outlive their process: saved to files, taken up by another server of the same model.

    session ──at rest──▶ Snapshot ──▶ file ──claimed by a rename──▶ Snapshot ──▶ session, its KV computed again

What a session is made of is in `session_state`, what a file looks like in `file`, who may take one up in `arrivals`.
"""
