"""Ranks of a case that are traced together, each in a process: they exchange what hosts exchange
through files, and their collectives are compared. Nothing travels between fake devices."""

from __future__ import annotations

import io
import os
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import TENSOR_META_SIZE, PipelineEngine

from benchmarks.gpu_proof.trace import Tracer
from bigtrain.engine.optimizers.matrix_exchange import MatrixBox, MatrixExchange

_TIMEOUT_SECONDS = 600


class Peers:
    """Exchange of Python values between the processes of `ranks`, through files in `folder`. A
    tensor arrives as one of its shape, dtype and need of a gradient, on the CPU."""

    def __init__(self, folder: Path, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.ranks = rank, tuple(ranks)
        self._folder = folder
        self._counts: Counter[tuple[str, str]] = Counter()

    def send(self, value: Any, channel: str) -> None:
        """Send `value` to whoever receives as often from `channel`."""
        path = self._next(channel, "sent")
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        partial = path.with_suffix(".partial")
        partial.write_bytes(buffer.getvalue())
        partial.rename(path)

    def receive(self, channel: str) -> Any:
        """Return the next value of `channel`. Raises RuntimeError if a process has failed, or none
        sends."""
        path, begun = self._next(channel, "received"), time.monotonic()
        while not path.exists():
            failure = self._folder / "failure"
            if failure.exists():
                raise RuntimeError(failure.read_text())
            if time.monotonic() - begun > _TIMEOUT_SECONDS:
                raise RuntimeError(f"nobody sends {path.name}")
            time.sleep(0.02)
        return _Unpickler(io.BytesIO(path.read_bytes())).load()

    def all_gather(self, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the values of `ranks`, in their order. Collective over these ranks."""
        name = "-".join(map(str, ranks))
        self.send(value, f"of{self.rank}.in{name}")
        return [self.receive(f"of{rank}.in{name}") for rank in ranks]

    def fail(self, text: str) -> None:
        """Let the other processes fail, too."""
        (self._folder / "failure").write_text(f"rank {self.rank}: {text}")

    def _next(self, channel: str, direction: str) -> Path:
        self._counts[channel, direction] += 1
        return self._folder / f"{channel}.{self._counts[channel, direction]}"


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), value.dtype, value.requires_grad
        return None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, description: Any) -> torch.Tensor:
        shape, dtype, requires_grad = description
        return torch.empty(shape, dtype=dtype).requires_grad_(requires_grad)


def exchange_among(peers: Peers, tracer: Tracer) -> None:
    """Let what bigtrain and DeepSpeed exchange among `peers` by value be exchanged, for the rest of
    this process: objects, the plan of Muon's exchange, and the shapes that stages send."""

    def broadcast(box: list[Any], src: int, group: Any = None, device: Any = None) -> None:
        _require(peers, dist.get_process_group_ranks(group))
        channel = f"objects{src}"
        if src == peers.rank:
            peers.send(list(box), channel)
        else:
            box[:] = peers.receive(channel)

    def announce(exchange: Any, lists: Sequence[Sequence[Any]]) -> list[list[MatrixBox]]:
        ranks = dist.get_process_group_ranks(exchange._group)
        _require(peers, ranks)
        boxes = [[MatrixBox(item.matrix, item.box) for item in items] for items in lists]
        number = ranks.index(peers.rank)
        return [of_peer[number] for of_peer in peers.all_gather(boxes, ranks)]

    send_shapes = PipelineEngine._send_tensor_meta

    def send_meta(engine: Any, buffer: Any, stage: int) -> None:
        send_shapes(engine, buffer, stage)
        tensors = [buffer] if isinstance(buffer, torch.Tensor) else list(buffer)
        shapes = [(list(tensor.shape), tensor.dtype) for tensor in tensors]
        receiver = engine.grid.stage_to_global(stage)
        peers.send((shapes, isinstance(buffer, tuple)), f"shapes{peers.rank}to{receiver}")

    def receive_meta(engine: Any, stage: int) -> Any:
        buffer = torch.empty(TENSOR_META_SIZE, dtype=torch.int32, device=engine.device)
        p2p.recv(buffer, stage)
        sender = engine.grid.stage_to_global(stage)
        shapes, is_tuple = peers.receive(f"shapes{sender}to{peers.rank}")
        # The kind, then of each tensor dtype and number of dimensions are read by `item`.
        for _ in range(1 + is_tuple + 2 * len(shapes)):
            tracer.waited("item")
        buffers = []
        for number, (shape, dtype) in enumerate(shapes):
            tracer.waited("list")
            buffers.append(engine._allocate_or_extend_buffers(number, shape, dtype))
        return tuple(buffers) if is_tuple else buffers[0]

    dist.broadcast_object_list = broadcast
    MatrixExchange._announce = announce  # type: ignore[method-assign]
    PipelineEngine._send_tensor_meta = send_meta
    PipelineEngine._recv_tensor_meta = receive_meta


def _require(peers: Peers, ranks: Sequence[int]) -> None:
    if not set(ranks) <= set(peers.ranks):
        raise RuntimeError(f"ranks {ranks} exchange values, and only {peers.ranks} are traced")


def forked(ranks: Sequence[int], traced_rank: int) -> tuple[int, list[int]]:
    """Fork a process for each rank of `ranks` but `traced_rank`, which this process is. Returns the
    rank of the process that returns, and the processes that it has forked."""
    children = []
    for rank in ranks:
        if rank != traced_rank:
            child = os.fork()
            if child == 0:
                return rank, []
            children.append(child)
    return traced_rank, children
