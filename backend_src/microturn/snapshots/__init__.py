"""Sessions that outlive their process: saved to files, taken up by another server of the same model.

    session ──at rest──▶ Snapshot ──▶ file ──claimed by a rename──▶ Snapshot ──▶ session, with its KV or without
       └── KV ──copied──▶ KVCopy ──▶ end of the file ─────────────▶ KVPart ──read by the next turn──▶ pages

What a session is made of is in `session_state`, what a file looks like in `file`, its KV in `kv_part` and, once it was
claimed, in `claimed_kv`; who may take one up is in `arrivals`.
"""
