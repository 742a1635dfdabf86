"""Seconds of collectives, depending on the nodes of their ranks. Pure.

Rings (Thakur et al. 2005): an all-reduce of n ranks moves ``2 (n - 1) / n`` of the bytes through
each link, an all-gather or a reduce-scatter half of that. Ranks on several nodes share their node's
network: a group that has k ranks on each node uses the network share of k devices at once, as
NCCL's rings do. In an all-to-all each rank sends data for other nodes through its own share only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigtrain.planner.layout import Layout
from bigtrain.planner.tables.hardware import Device
from bigtrain.settings.degrees import AXES, REPLICA_AXES, Axis

DIRECT = 0.9
"""Share of a network's bandwidth that messages from one rank to another reach, without the waits of
a ring: for InfiniBand from Calculon's tables (Isaev et al. 2023, systems/)."""


@dataclass(frozen=True)
class Group:
    """Group of communicating ranks: its size, and how many ranks share a node."""

    size: int
    per_node: int

    def bandwidth(self, device: Device) -> float:
        """Return the bytes per second that a ring through the group moves in one direction."""
        link = device.link_bandwidth * device.reach.link
        if self.size <= self.per_node:
            return link
        network = device.network_bandwidth * device.reach.network * max(1, self.per_node)
        return min(link, network)

    def latency(self, device: Device) -> float:
        """Return the seconds of an empty message: the start, and a hop for each additional rank."""
        if self.size == 1:
            return 0.0
        ranks_per_node = min(self.size, self.per_node)
        num_nodes = math.ceil(self.size / max(1, self.per_node))
        hops = device.reach.start_seconds + device.reach.link_seconds * (ranks_per_node - 1)
        return hops + device.reach.network_seconds * (num_nodes - 1)

    def all_reduce(self, device: Device, num_bytes: float) -> float:
        """Return the seconds to all-reduce `num_bytes`."""
        return 2 * self.all_gather(device, num_bytes)

    def all_gather(self, device: Device, num_bytes: float) -> float:
        """Return the seconds until each rank has all `num_bytes`; a reduce-scatter takes the
        same."""
        if self.size == 1:
            return 0.0
        return self.sent_bytes(num_bytes) / self.bandwidth(device) + self.latency(device)

    def sent_bytes(self, num_bytes: float) -> float:
        """Return how many of the `num_bytes` of a rank are exchanged with other ranks."""
        return (self.size - 1) / self.size * num_bytes

    def all_to_all(self, device: Device, num_bytes: float, far_bytes: float | None = None) -> float:
        """Return the seconds to exchange `num_bytes` per rank, equally many for each peer.
        `far_bytes`: bytes that leave a rank's node, if fewer than those for other nodes."""
        if self.size == 1:
            return 0.0
        near = self.sent_bytes(num_bytes) / (device.link_bandwidth * device.reach.link)
        if far_bytes is None:
            far_bytes = num_bytes * (self.size - self.inside) / self.size
        return max(near, far_bytes / (device.network_bandwidth * DIRECT)) + self.latency(device)

    def around(self, device: Device, num_bytes: float) -> float:
        """Return the seconds until `num_bytes` per rank have passed through all ranks."""
        if self.size <= self.per_node:
            return (self.size - 1) * self.send(device, num_bytes)
        bandwidth = device.network_bandwidth * DIRECT
        return (self.size - 1) * (num_bytes / bandwidth + device.reach.network_seconds)

    @property
    def inside(self) -> int:
        """Ranks per node."""
        return max(1, min(self.size, self.per_node))

    def far_nodes(self, num_chosen: float) -> float:
        """Return the expected number of other nodes that `num_chosen` random ranks are on."""
        nodes = self.size / self.inside
        return float((nodes - 1) * (1 - (1 - 1 / nodes) ** num_chosen))

    def send(self, device: Device, num_bytes: float) -> float:
        """Return the seconds of a message from one rank to the next."""
        if self.size == 1:
            return 0.0
        if self.size > self.per_node and self.per_node <= 1:
            bandwidth = device.network_bandwidth * device.reach.network
            return num_bytes / bandwidth + device.reach.network_seconds
        return num_bytes / (device.link_bandwidth * device.reach.link) + device.reach.link_seconds


def place(world_size: int, inner: int, size: int, devices_per_node: int) -> Group:
    """Return the group of `size` ranks with a stride of `inner` ranks."""
    if world_size <= devices_per_node:
        return Group(size, size)
    return Group(size, max(1, min(size, devices_per_node // inner)))


@dataclass(frozen=True)
class Groups:
    """Groups of a layout on nodes of a given size, from innermost to outermost."""

    tensor: Group
    ulysses: Group
    ring: Group
    pipeline: Group
    data: Group
    partition: Group
    expert: Group
    expert_replicas: Group

    def gather(self, device: Device, dense: float, expert: float, element_bytes: int) -> float:
        """Return the seconds to all-gather `dense` elements over all replicas, and `expert`
        elements over replicas with the same experts; a reduce-scatter takes as long."""
        if self.expert_replicas.size == self.partition.size:  # one collective for both
            return self.partition.all_gather(device, (dense + expert) * element_bytes)
        seconds = self.partition.all_gather(device, dense * element_bytes)
        return seconds + self.expert_replicas.all_gather(device, expert * element_bytes)


def groups_of(layout: Layout, devices_per_node: int, *, pipeline_outermost: bool = False) -> Groups:
    """Return the groups of `layout`, in the order of ranks of bigtrain
    (`bigtrain.settings.degrees.AXES`), or with the pipeline outermost."""
    order: tuple[Axis, ...] = AXES
    if pipeline_outermost:
        order = ("pipeline", *(axis for axis in AXES if axis != "pipeline"))
    # Ranks of an axis are as far apart as the product of the inner axes.
    inner = 1
    next_to: dict[Axis, int] = {}
    for axis in reversed(order):
        next_to[axis] = inner
        inner *= layout.size(axis)

    def group(inner: int, size: int) -> Group:
        return place(layout.world_size, inner, size, devices_per_node)

    # Groups, and how many ranks of a group a node has.
    along = {axis: group(next_to[axis], layout.size(axis)) for axis in AXES}
    u = layout.ulysses_size
    partition = Group(
        layout.partition_size, math.prod(along[axis].per_node for axis in REPLICA_AXES)
    )
    return Groups(
        along["tensor"],
        group(next_to["sequence"], u),
        group(next_to["sequence"] * u, layout.ring_size),
        along["pipeline"],
        along["data"],
        partition,
        Group(layout.expert_size, min(layout.expert_size, partition.per_node)),
        Group(layout.expert_replicas, max(1, partition.per_node // layout.expert_size)),
    )
