"""Several runs side by side, each step of all of them captured in one CUDA graph.

Small networks leave a large GPU idle, so the steps of several lanes are captured on forked streams
of one graph. On a CPU, and where a step cannot be captured, the same functions run as they are.
"""

from functools import partial
from typing import Any

import torch

from isda import distributed
from isda.experiments.data import ImageArrays
from isda.experiments.folder import FolderImages
from isda.experiments.step import Lane

__all__ = ["Company"]


class Company:
    """Lanes that take every step together.

    Args:
        lanes: runs with the same data, batch size and number of epochs.
        capture: capture the steps of all lanes in CUDA graphs.
    """

    def __init__(self, lanes: list[Lane], *, capture: bool) -> None:
        self.lanes = lanes
        self.capture = capture
        self._graphs: dict[int | str, torch.cuda.CUDAGraph] = {}

    def train_epoch(self) -> None:
        """Train every lane for an epoch."""
        for lane in self.lanes:
            lane.begin_epoch()
        if isinstance(self.lanes[0].data, ImageArrays):
            for size in self.lanes[0].batch_sizes():
                self._run(size, partial(Lane.step, size=size))
            return
        batches = [
            lane.data.train_batches(
                batch_size=lane.recipe.batch_size,
                seed=lane.seed,
                epoch=lane.epoch,
                rank=lane.rank,
                world=lane.world,
            )
            for lane in self.lanes
            if isinstance(lane.data, FolderImages)
        ]
        for size, *loaded in zip(self.lanes[0].batch_sizes(), *batches, strict=True):
            for lane, (images, target) in zip(self.lanes, loaded, strict=True):
                lane.load(images, target)
            self._run(size, partial(Lane.step, size=size))

    def evaluate(self) -> list[list[float]]:
        """Training loss of the epoch and ``Lane.results`` of every lane; waits for the device."""
        if isinstance(self.lanes[0].data, ImageArrays):
            self._run("evaluate", Lane.evaluate)
        else:
            for lane in self.lanes:
                lane.evaluate()
        rows = []
        for lane in self.lanes:
            loss = distributed.sum_over_ranks(lane.total_loss.clone()) / lane.world
            rows.append(torch.cat([loss[None] / lane.num_images, lane.results]))
        return torch.stack(rows).tolist()

    def _run(self, name: int | str, function: Any) -> None:
        if not self.capture:
            for lane in self.lanes:
                function(lane)
            return
        if name not in self._graphs:
            self._graphs[name] = self._record(function)
        self._graphs[name].replay()

    def _record(self, function: Any) -> torch.cuda.CUDAGraph:
        """Capture a function of all lanes, each on its stream; undo what warming up changed."""
        torch.cuda.synchronize()
        for lane in self.lanes:
            before = [tensor.detach().clone() for tensor in lane.tensors()]
            torch.cuda.synchronize()
            with torch.cuda.stream(lane.stream):
                for _ in range(3):  # compiles, chooses kernels, allocates
                    function(lane)
                    with torch.no_grad():  # each time: past the last batch are no images
                        for tensor, saved in zip(lane.tensors(), before, strict=True):
                            tensor.copy_(saved)
            lane.forget_gradients()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            main = torch.cuda.current_stream()
            for lane in self.lanes:
                lane.stream.wait_stream(main)
                with torch.cuda.stream(lane.stream):
                    function(lane)
            for lane in self.lanes:
                main.wait_stream(lane.stream)
        return graph
