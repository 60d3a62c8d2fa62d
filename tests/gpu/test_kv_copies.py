"""Tests of gpu.kv_copier on a GPU: bits, order, and time. Its logic is tested without one in unit/gpu."""

from __future__ import annotations

import time

import pytest
import torch

from microturn.kv.layer_groups import LayerShape
from microturn.kv.tensors import KVTensors
from microturn.kv.transfer import Transfer
from support.tiers import contents_of

NUM_PAGES = 256
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
# Of Llama-3.1-8B; 8,192 tokens in bfloat16 are 1.07 GB.
LAYERS, PAGE_SIZE, NUM_LARGE = [LayerShape(8, 128)] * 32, 16, 512
LARGE_BYTES = NUM_LARGE * PAGE_SIZE * KVTensors.bytes_per_token(LAYERS, torch.bfloat16)


def make_kv(dtype: torch.dtype = torch.bfloat16) -> KVTensors:
    """Pages of some layers, filled with bits of any kind."""
    kv = KVTensors([LayerShape(4, 64)] * 3, NUM_PAGES, PAGE_SIZE, dtype, "cuda")
    for tensor in kv.tensors:
        tensor.view(torch.uint8).random_(256)
    return kv


@pytest.fixture(scope="module")
def large() -> KVTensors:
    """A pool of 17 GB, after a first copy of 1.07 GB each way."""
    kv = KVTensors(LAYERS, 16 * NUM_LARGE, PAGE_SIZE, torch.bfloat16, "cuda")
    for tensor in kv.tensors:
        tensor.view(torch.uint8).random_(256)
    kv.reserve_host_memory(2 * kv.image_bytes(NUM_LARGE))
    pages = spread(NUM_LARGE)
    kv.write(pages, kv.read(pages)).wait()
    return kv


def spread(num_pages: int, seed: int = 0) -> list[int]:
    """Pages anywhere among four times as many."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(4 * num_pages, generator=generator)[:num_pages].tolist()


def bits_of(kv: KVTensors, pages: list[int]) -> list[torch.Tensor]:
    """What stands in some pages, as of the steps handed over so far."""
    return [tensor.view(torch.uint8)[pages] for tensor in kv.tensors]


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def overwrite(kv: KVTensors, pages: list[int]) -> None:
    """A step that writes these pages."""
    for tensor in kv.tensors:
        tensor.view(torch.uint8)[pages] = 7


def keep_busy(for_s: float) -> None:
    """Hands over a step that takes so long, or twice."""
    torch.cuda._sleep(int(for_s * 2e9))


def seconds(transfer: Transfer, since_s: float) -> float:
    transfer.wait()
    return time.perf_counter() - since_s


@pytest.mark.parametrize("num_pages", [1, 7, 8, 61])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_come_back_bit_by_bit_beside_a_step(dtype: torch.dtype, num_pages: int) -> None:
    kv = make_kv(dtype)
    pages, others = spread(num_pages), [NUM_PAGES - 1 - page for page in range(num_pages)]
    keep_busy(0.05)
    before = bits_of(kv, pages)
    image = kv.read(pages)
    overwrite(kv, pages)
    keep_busy(0.05)
    kv.write(others, image).wait()
    assert are_equal(bits_of(kv, others), before)


def test_nothing_waits_for_a_step_on_the_host() -> None:
    kv = make_kv()
    pages = spread(60)
    kv.write(pages, kv.read(pages)).wait()
    keep_busy(0.5)
    begun_s = time.perf_counter()
    image = kv.read(pages)
    transfer = kv.write(pages, image)
    assert time.perf_counter() - begun_s < 0.1
    assert not transfer.is_done()
    assert not image.store_transfer.is_done()
    transfer.wait()


def test_an_image_is_that_of_the_pages_before_they_were_overwritten() -> None:
    kv = make_kv()
    pages = spread(60)
    expected = contents_of(kv.read(pages))
    keep_busy(0.1)
    image = kv.read(pages)
    overwrite(kv, pages)
    assert contents_of(image) == expected


def test_what_a_running_step_still_reads_is_written_behind_it() -> None:
    kv = make_kv()
    new, pages = spread(60), spread(60, seed=1)
    image, expected, before = kv.read(new), bits_of(kv, new), bits_of(kv, pages)
    image.store_transfer.wait()
    keep_busy(0.2)
    seen = bits_of(kv, pages)
    kv.write(pages, image).wait()
    assert are_equal(seen, before)
    assert are_equal(bits_of(kv, pages), expected)


def test_a_step_that_a_copy_precedes_comes_after_it(large: KVTensors) -> None:
    pages = spread(NUM_LARGE)
    image = large.read(pages)
    transfer = large.write(pages, image)
    transfer.precede_steps()
    overwrite(large, pages)
    transfer.wait()
    torch.cuda.synchronize()
    assert all(bool((tensor == 7).all()) for tensor in bits_of(large, pages))


def test_images_that_are_dropped_while_they_are_copied_do_no_harm(large: KVTensors) -> None:
    """Their memory goes to the next ones, but not before the copy is done."""
    pages = spread(NUM_LARGE)
    expected = bits_of(large, pages)
    transfer = large.write(pages, large.read(pages))
    for _ in range(4):
        for buffer in large.new_image(NUM_LARGE).buffers:
            buffer.zero_()
    transfer.wait()
    assert are_equal(bits_of(large, pages), expected)


def test_no_step_waits_where_as_much_leaves_as_can_wait(large: KVTensors) -> None:
    """The gathering is all that a step is behind."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    keep_busy(0.05)
    begin.record()
    image = large.read(spread(NUM_LARGE)[: large.share.for_later])
    end.record()
    end.synchronize()
    assert not image.store_transfer.is_done()
    assert begin.elapsed_time(end) < 2.0, "ms"
    image.store_transfer.wait()


def bandwidth(is_coming: bool) -> float:
    """Bytes per second of one large copy between pinned memory and the GPU."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    source, target = (host, device) if is_coming else (device, host)
    times_s = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - begun_s)
    return host.nbytes / min(times_s)


def test_a_gigabyte_comes_back_at_the_speed_of_the_bus(large: KVTensors) -> None:
    """And the engine's thread is busy with it for a small part of that."""
    image = large.read(spread(NUM_LARGE))
    image.store_transfer.wait()
    assert large.share.for_turns >= NUM_LARGE
    took_s, host_s = [], []
    for seed in range(5):
        pages = spread(NUM_LARGE, seed)
        begun_s = time.perf_counter()
        transfer = large.write(pages, image)
        host_s.append(time.perf_counter() - begun_s)
        took_s.append(seconds(transfer, begun_s))
    least_s = LARGE_BYTES / bandwidth(is_coming=True)
    print(f"{min(took_s) * 1e3:.1f} ms, of it {min(host_s) * 1e3:.1f} on the host; alone {least_s * 1e3:.1f} ms")
    assert min(took_s) < 1.4 * least_s
    assert min(host_s) < 0.3 * least_s


def test_a_gigabyte_leaves_at_the_speed_of_the_bus(large: KVTensors) -> None:
    took_s, host_s = [], []
    for seed in range(5):
        begun_s = time.perf_counter()
        image = large.read(spread(NUM_LARGE, seed))
        host_s.append(time.perf_counter() - begun_s)
        took_s.append(seconds(image.store_transfer, begun_s))
    least_s = LARGE_BYTES / bandwidth(is_coming=False)
    print(f"{min(took_s) * 1e3:.1f} ms, of it {min(host_s) * 1e3:.1f} on the host; alone {least_s * 1e3:.1f} ms")
    assert min(took_s) < 1.4 * least_s
    assert min(host_s) < 0.3 * least_s


def test_memory_that_was_reserved_is_there_at_once(large: KVTensors) -> None:
    begun_s = time.perf_counter()
    image = large.new_image(NUM_LARGE)
    assert time.perf_counter() - begun_s < 0.01
    assert all(buffer.is_pinned() for buffer in image.buffers)
