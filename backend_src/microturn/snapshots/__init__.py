"""Snapshots: sessions saved to files, and restored by this or another server of the same model.

    session ──quiesced──▶ Snapshot ──▶ file ──claimed by a rename──▶ Snapshot ──▶ session, with or without its KV
       └── KV ──copied──▶ KVCopy ──▶ end of the file ─────────────▶ KVPart ──read by the next turn──▶ pages

Open `session_state` (content of a session) first, then `file` (format), `kv_part`, `directory`, and `arrivals` (restore
on START).
"""
