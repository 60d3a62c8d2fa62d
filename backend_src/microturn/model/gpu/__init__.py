"""The model on a GPU: layers in torch operations, FlashInfer's attention, CUDA graphs.

Open `loading` first, then `runner` (steps, replayed from graphs), `layers` and `flashinfer_attention`.
"""
