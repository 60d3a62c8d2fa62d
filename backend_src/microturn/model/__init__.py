"""The model: loads it, checks it against transformers, runs batches over KV pages, and samples tokens.

Sessions and text are above it. Open `runner` first (a batch through the model), then `batch` (its input),
`paged_attention` and `sampler`. `probe*` and `rotary_fit` are the checks at load, `tracing` and `traits` say what a
model's layers are like, `cpu/` and `gpu/` are the layers, attention kernels and loading for each device, `parallel/` is
a model over several processes.
"""
