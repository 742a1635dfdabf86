"""How long collectives take, depending on which nodes their ranks are on. Pure.

Rings (Thakur et al. 2005): an all-reduce of n ranks moves ``2 (n - 1) / n`` of the bytes through
each link, an all-gather or a reduce-scatter half of that, an all-to-all ``(n - 1) / n`` of what a
rank holds. Ranks on several nodes share their node's network: a group that has k ranks on each
node uses k devices' share of it at once, as NCCL's rings do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigtrain.planner.layout import Layout
from bigtrain.planner.tables.hardware import Device


@dataclass(frozen=True)
class Group:
    """A group of communicating ranks: its size, and how many of them share a node."""

    size: int
    per_node: int

    def bandwidth(self, device: Device) -> float:
        """Bytes a second that a ring through the group moves in one direction."""
        link = device.link_bandwidth * device.reach.link
        if self.size <= self.per_node:
            return link
        network = device.network_bandwidth * device.reach.network * max(1, self.per_node)
        return min(link, network)

    def latency(self, device: Device) -> float:
        """Seconds of an empty message: the start, and a hop for each further rank."""
        if self.size == 1:
            return 0.0
        inside = min(self.size, self.per_node)
        outside = math.ceil(self.size / max(1, self.per_node))
        hops = device.reach.start_seconds + device.reach.link_seconds * (inside - 1)
        return hops + device.reach.network_seconds * (outside - 1)

    def all_reduce(self, device: Device, num_bytes: float) -> float:
        """Seconds to all-reduce `num_bytes`."""
        return 2 * self.all_gather(device, num_bytes)

    def all_gather(self, device: Device, num_bytes: float) -> float:
        """Seconds until each rank has all `num_bytes`; a reduce-scatter takes the same."""
        if self.size == 1:
            return 0.0
        return self.sent_bytes(num_bytes) / self.bandwidth(device) + self.latency(device)

    def sent_bytes(self, num_bytes: float) -> float:
        """What of the `num_bytes` that a rank holds, or will have, others send or are sent."""
        return (self.size - 1) / self.size * num_bytes

    def all_to_all(self, device: Device, num_bytes: float) -> float:
        """Seconds to exchange the `num_bytes` that each rank holds."""
        return self.all_gather(device, num_bytes)

    def send(self, device: Device, num_bytes: float) -> float:
        """Seconds from one rank to the next."""
        if self.size == 1:
            return 0.0
        if self.size > self.per_node and self.per_node <= 1:
            bandwidth = device.network_bandwidth * device.reach.network
            return num_bytes / bandwidth + device.reach.network_seconds
        return num_bytes / (device.link_bandwidth * device.reach.link) + device.reach.link_seconds


def place(world_size: int, inner: int, size: int, devices_per_node: int) -> Group:
    """The group of `size` ranks with a stride of `inner` ranks."""
    if world_size <= devices_per_node:
        return Group(size, size)
    return Group(size, max(1, min(size, devices_per_node // inner)))


@dataclass(frozen=True)
class Groups:
    """The groups of a layout on nodes of a given size, from innermost to outermost."""

    tensor: Group
    sequence: Group
    pipeline: Group
    data: Group
    partition: Group
    expert: Group
    expert_replicas: Group


def groups_of(layout: Layout, devices_per_node: int, *, pipeline_outermost: bool = False) -> Groups:
    """The groups of `layout`, tensor innermost and data outermost as bigtrain has them
    (`bigtrain.settings.topology.AXES`), or the pipeline outermost."""
    world = layout.world_size
    t, s, p = layout.tensor_size, layout.sequence_size, layout.pipeline_size

    def group(inner: int, size: int) -> Group:
        return place(world, inner, size, devices_per_node)

    data = group(t * s * (1 if pipeline_outermost else p), layout.data_size)
    partition = Group(
        layout.partition_size,
        max(1, min(layout.partition_size, data.per_node * (min(s, max(1, devices_per_node // t))))),
    )
    if world <= devices_per_node:
        partition = Group(layout.partition_size, layout.partition_size)
    return Groups(
        group(1, t),
        group(t, s),
        group(t * s * (layout.data_size if pipeline_outermost else 1), p),
        data,
        partition,
        Group(layout.expert_size, min(layout.expert_size, partition.per_node)),
        Group(layout.expert_replicas, max(1, partition.per_node // layout.expert_size)),
    )
