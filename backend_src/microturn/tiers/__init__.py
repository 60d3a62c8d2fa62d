"""Where the KV of sessions goes that have no turn, when the pool is full, and how it comes back."""
