"""Snapshots: sessions saved to files, and restored by this or another server of the same model.

    session ──quiesced──▶ Snapshot ──▶ file ──claimed once──────────▶ Snapshot ──▶ session, with or without its KV
       └── KV ──copied──▶ KVCopy ──▶ end of the file ─────────────▶ KVPart ──read by the next turn──▶ pages

Open `session_state` (content of a session) first, then `file` (format), `kv_part`, `directory`, and `arrivals` (restore
on START). What keeps the files is a `storage`: `file_storage`, `s3_storage`, `encrypted_storage` around one of them.
"""
