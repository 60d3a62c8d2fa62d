"""The paged KV cache: page pool, page tables, prefix cache, tensors, and copies of pages to and from host memory.

Knows layers, pages, positions and bytes; sessions, the scheduler and files are above it. Open `page_table` first.

* page: KV of `page_size` tokens for the layers of one group. A page table lists a session's pages.
* kind: layers with the same attention window. It is divided into *groups* of equally many layers; a group is what
  vLLM calls a KV cache group (see `layer_groups`). A *track* says which tokens of a session one kind keeps.
* window: of a session (attention sinks and evicted tokens, `window`), or a layer's own sliding window.
* image: a copy of pages in host memory. It is written by a store transfer and read by a load transfer.
"""
