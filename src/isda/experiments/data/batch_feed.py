"""Batches of images that are not on the device, copied to it ahead of the steps.

A thread copies or decodes the images of the next batches into pinned buffers. It does not call
CUDA, so that it cannot disturb the capture of a graph. The training thread copies the buffers to
the device on a separate stream, one batch ahead, and from there to tensors with fixed
addresses, which captured steps read.
"""

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isda.experiments.data.decoding import ImageFiles
from isda.experiments.data.resized_crop import PackedImages

__all__ = ["BatchFeed"]

_SLOTS = 3  # batches in use, on their way, and in preparation
_THREADS = 4  # threads that copy from memory or a file

_Batch = tuple[int, list[int]]  # place of the first image in the batch of all ranks, and the images
_OFFSET, _SIZE, _TARGET = 0, slice(1, 3), 3  # columns of the table of a batch


class BatchFeed:
    """Batches of a run, at fixed addresses: ``images`` and ``target``.

    Args:
        images: images on the CPU or in files.
        target: classes of the images.
        batch_size: largest number of images in a batch.
        device: device to copy the batches to.
    """

    _epoch: "_Epoch | None" = None

    def __init__(
        self,
        images: PackedImages | ImageFiles,
        target: Tensor,
        *,
        batch_size: int,
        device: torch.device,
    ) -> None:
        area = images.size.prod(1)
        capacity = int(area.topk(min(batch_size, len(area))).values.sum())
        self._source, self._source_target = images, target.cpu()
        self._slots = [_Slot.create(capacity, batch_size, device) for _ in range(_SLOTS)]
        self._pixels = torch.empty(capacity, 3, dtype=torch.uint8, device=device)
        self._table = torch.zeros(batch_size, 4, dtype=torch.int64, device=device)
        self.images = PackedImages(self._pixels, self._table[:, _OFFSET], self._table[:, _SIZE])
        self.target = self._table[:, _TARGET]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead: _Slot | None = None  # on its way to the device
        self._last: _Slot | None = None  # was copied to the fixed addresses

    def begin(self, batches: Sequence[_Batch]) -> None:
        """Prepare these batches, instead of those that have not been loaded so far."""
        if self._epoch is not None:
            self._epoch.stop()
        if self._stream is not None:
            self._stream.synchronize()
        self._ahead = self._last = None
        self._epoch = _Epoch(self._source, self._source_target, batches, self._slots)

    def load(self) -> None:
        """Copy the next batch to the fixed addresses.

        Raises:
            InputError: one of its images cannot be decoded.
        """
        epoch = self._epoch
        assert epoch is not None, "begin() comes first"
        slot = self._ahead or self._send(epoch.take())
        if self._last is not None:
            if self._last.sent is not None:
                self._last.sent.synchronize()  # long done: its buffers can be filled again
            epoch.free.put(self._last)
        if slot.sent is not None:
            torch.cuda.current_stream().wait_event(slot.sent)
        self._pixels[: slot.length].copy_(slot.pixels[: slot.length])
        self._table.copy_(slot.table)
        if slot.used is not None:
            slot.used.record()
        self._last, self._ahead = slot, None
        if self._stream is not None and not epoch.ready.empty():
            self._ahead = self._send(epoch.take())

    def __del__(self) -> None:
        if self._epoch is not None:
            self._epoch.stop()

    def _send(self, slot: "_Slot") -> "_Slot":
        """Start to copy a slot to the device."""
        if self._stream is not None and slot.sent is not None and slot.used is not None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(slot.used)  # by the batch before it
                slot.pixels[: slot.length].copy_(slot.buffer[: slot.length], non_blocking=True)
                slot.table.copy_(slot.table_buffer, non_blocking=True)
                slot.sent.record()
        return slot


@dataclass(eq=False)
class _Slot:
    """Buffers of a batch on the host and on the device; on a CPU they are the same."""

    buffer: Tensor  # uint8 (P, 3)
    table_buffer: Tensor  # int64 (N, 4)
    pixels: Tensor
    table: Tensor
    length: int = 0  # pixels in use
    sent: torch.cuda.Event | None = None  # copied to the device
    used: torch.cuda.Event | None = None  # copied to the fixed addresses

    @classmethod
    def create(cls, capacity: int, batch_size: int, device: torch.device) -> "_Slot":
        on_gpu = device.type == "cuda"
        buffer = torch.empty(capacity, 3, dtype=torch.uint8, pin_memory=on_gpu)
        table = torch.zeros(batch_size, 4, dtype=torch.int64, pin_memory=on_gpu)
        if not on_gpu:
            return cls(buffer, table, buffer, table)
        copies = torch.empty_like(buffer, device=device), torch.empty_like(table, device=device)
        return cls(buffer, table, *copies, sent=torch.cuda.Event(), used=torch.cuda.Event())


class _Epoch:
    """The thread that prepares the batches of an epoch; it holds no reference to the feed."""

    def __init__(
        self,
        images: PackedImages | ImageFiles,
        target: Tensor,
        batches: Sequence[_Batch],
        slots: Sequence[_Slot],
    ) -> None:
        self._images, self._target, self._batches = images, target, batches
        self.free: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[_Slot | Exception] = queue.SimpleQueue()
        for slot in slots:
            self.free.put(slot)
        self._thread = threading.Thread(target=self._prepare, daemon=True)
        self._thread.start()

    def take(self) -> _Slot:
        """The next batch that is ready; waits for it."""
        slot = self.ready.get()
        if isinstance(slot, Exception):
            raise slot
        return slot

    def stop(self) -> None:
        """End the thread after the batch that it prepares."""
        while not self.free.empty():
            self.free.get()
        self.free.put(None)
        self._thread.join()

    def _prepare(self) -> None:
        """Fill one slot after the other."""
        images = self._images
        threads = max(1, images.threads) if isinstance(images, ImageFiles) else _THREADS
        try:
            with ThreadPoolExecutor(threads) as pool:
                for start, numbers in self._batches:
                    slot = self.free.get()
                    if slot is None:
                        return
                    self._fill(slot, start, numbers, pool, threads)
                    self.ready.put(slot)
        except Exception as error:
            self.ready.put(error)

    def _fill(
        self, slot: _Slot, start: int, numbers: list[int], pool: ThreadPoolExecutor, threads: int
    ) -> None:
        """Copy or decode the images of a batch, several at a time."""
        images = self._images
        size = images.size[numbers].numpy()  # (n, 2)
        ends = size.prod(1).cumsum()
        begins = ends - size.prod(1)
        table = slot.table_buffer[start : start + len(numbers)].numpy()
        table[:, _OFFSET], table[:, _SIZE] = begins, size
        table[:, _TARGET] = self._target[numbers].numpy()
        slot.length = int(ends[-1]) if numbers else 0

        def read(places: range) -> None:
            for place in places:
                pixels = slot.buffer[begins[place] : ends[place]]
                if isinstance(images, ImageFiles):
                    images.read(numbers[place], pixels)
                else:
                    first = int(images.offset[numbers[place]])
                    np.copyto(pixels.numpy(), images.pixels[first : first + len(pixels)].numpy())

        for _ in pool.map(read, [range(i, len(numbers), threads) for i in range(threads)]):
            pass
