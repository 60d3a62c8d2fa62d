"""The tiers behind the KV pool: host memory and files. Offloads the KV of sessions, loads it back, forecasts turns.

    tiers (which session, when) ──▶ storage (which copy, where) ──▶ host_store │ disk_store ──▶ file_thread │ incoming

The scheduler calls it through its protocol `Memory`. Open `tiers` first.
"""
