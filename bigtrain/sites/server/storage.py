"""What an outer server keeps on disk, so that a restart loses nothing.

::

    run.json                  the run: facts, parameters, how steps are made
    active.json               the sites that are waited for
    holders.json              by site the run that takes part as it
    state-000012.safetensors  weights, momentum and rounding error after outer step 12
    pending/SITE/ATTEMPT/     messages of a site for the next step, as they came
    pending/SITE/delivered.json   the attempt that is complete
    steps.jsonl               one line for each outer step
    events.json               what has happened since the last one
    set_aside/SITE/           the newest delivery of a site that no step could be made with

Files appear whole: written under another name, synced and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bigtrain.system.files import sync_to_disk

_KEPT = 2


@dataclass(frozen=True)
class Delivery:
    """What a site has delivered for an outer step.

    base: the outer step that its change is relative to. step: its optimizer steps. tokens: that it
    has trained on since `base`. num_messages: of all its ranks.
    """

    attempt: str
    base: int
    step: int
    tokens: int
    num_messages: int


class Storage:
    """The directory of an outer server. Every method returns when what it wrote is on disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pending = directory / "pending"
        self._pending.mkdir(parents=True, exist_ok=True)

    def read_run(self) -> dict[str, Any] | None:
        """What `write_run` wrote; None in a new directory."""
        try:
            tree: dict[str, Any] = json.loads((self.directory / "run.json").read_text())
        except FileNotFoundError:
            return None
        return tree

    def write_run(self, tree: Mapping[str, Any]) -> None:
        """Keep what the run is."""
        _write(self.directory / "run.json", json.dumps(tree).encode())

    def read_active(self) -> set[int]:
        """What `write_active` wrote."""
        try:
            return set(json.loads((self.directory / "active.json").read_text()))
        except FileNotFoundError:
            return set()

    def write_active(self, sites: set[int]) -> None:
        """Keep which sites are waited for."""
        _write(self.directory / "active.json", json.dumps(sorted(sites)).encode())

    def read_holders(self) -> dict[int, str]:
        """What `write_holders` wrote."""
        try:
            tree = json.loads((self.directory / "holders.json").read_text())
        except FileNotFoundError:
            return {}
        return {int(site): str(run) for site, run in tree.items()}

    def write_holders(self, runs: Mapping[int, str]) -> None:
        """Keep which run each site is."""
        _write(self.directory / "holders.json", json.dumps(runs).encode())

    def read_state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
        """The newest state that can be read; None if there is none."""
        for path in sorted(self.directory.glob("state-*.safetensors"), reverse=True):
            try:
                with safe_open(path, framework="pt") as file:
                    record = json.loads((file.metadata() or {})["record"])
                    return {name: file.get_tensor(name) for name in file.keys()}, record
            except (SafetensorError, OSError, KeyError, ValueError):
                continue
        return None

    def write_state(self, tensors: dict[str, torch.Tensor], record: Mapping[str, Any]) -> None:
        """Keep the state after an outer step; the one before it stays, older ones go."""
        path = self.directory / f"state-{record['number']:06d}.safetensors"
        partial = path.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata={"record": json.dumps(record)})
            sync_to_disk(partial)
            self._write_line(json.dumps(record))
            partial.rename(path)
            sync_to_disk(self.directory)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        for old in sorted(self.directory.glob("state-*.safetensors"))[:-_KEPT]:
            old.unlink()

    def _write_line(self, line: str) -> None:
        """Add a line to `steps.jsonl`, entire or not at all."""
        with (self.directory / "steps.jsonl").open("ab") as file:
            length = file.seek(0, os.SEEK_END)
            begin = "\n" if length and not self._ends_a_line() else ""
            try:
                file.write(f"{begin}{line}\n".encode())
                file.flush()
            except OSError:
                file.truncate(length)
                raise

    def _ends_a_line(self) -> bool:
        with (self.directory / "steps.jsonl").open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def events(self, record: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What was told with outer steps up to that of `record`, the newest state's."""
        found: dict[int, list[dict[str, Any]]] = {}
        with suppress(FileNotFoundError), (self.directory / "steps.jsonl").open("rb") as file:
            for line in file:
                with suppress(ValueError, KeyError):  # the last line may not be whole
                    one = json.loads(line)
                    found[one["number"]] = one.get("events", [])
        # Its line may be of a step that did not reach the disk, and was made again.
        found[record["number"]] = record.get("events", [])
        numbers = sorted(number for number in found if number <= record["number"])
        return [event for number in numbers for event in found[number]]

    def write_events(self, number: int, events: Sequence[Mapping[str, Any]]) -> None:
        """Keep what has happened since outer step `number`."""
        document = {"number": number, "events": list(events)}
        _write(self.directory / "events.json", json.dumps(document).encode())

    def read_events(self, number: int) -> list[dict[str, Any]]:
        """What `write_events` kept since outer step `number`; nothing of an earlier one."""
        try:
            document = json.loads((self.directory / "events.json").read_text())
            return list(document["events"]) if document["number"] == number else []
        except (FileNotFoundError, ValueError, KeyError):
            return []

    def write_message(self, site: int, attempt: str, name: str, body: bytes | bytearray) -> None:
        """Keep a message of a site for the next outer step."""
        directory = self._pending / str(site) / attempt
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / name, body)

    def messages(self, site: int, attempt: str) -> list[Path]:
        """The messages of an attempt that are there."""
        directory = self._pending / str(site) / attempt
        return sorted(p for p in directory.glob("*") if p.suffix != ".partial")

    def deliver(self, site: int, delivery: Delivery) -> None:
        """Keep that an attempt is complete; an earlier one of the site goes."""
        directory = self._pending / str(site)
        _write(directory / "delivered.json", json.dumps(asdict(delivery)).encode())
        for other in directory.iterdir():
            if other.is_dir() and other.name != delivery.attempt:
                shutil.rmtree(other)

    def deliveries(self) -> Iterator[tuple[int, Delivery | Exception]]:
        """By site what it has delivered, in the order of the sites; an error for what is no
        delivery."""
        paths = [p for p in self._pending.glob("*/delivered.json") if p.parts[-2].isdecimal()]
        for path in sorted(paths, key=lambda p: int(p.parts[-2])):
            found: Delivery | Exception
            try:
                found = Delivery(**json.loads(path.read_text()))
            except (OSError, TypeError, ValueError) as error:
                found = error
            yield int(path.parts[-2]), found

    def set_aside(self, site: int) -> Path:
        """Keep what a site has sent for whoever looks for the cause, out of the next outer step;
        returns where. What was set aside of the site before goes."""
        place = self.directory / "set_aside" / str(site)
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        (self._pending / str(site)).rename(place)
        sync_to_disk(place.parent)
        sync_to_disk(self._pending)
        return place

    def forget(self, site: int) -> None:
        """Remove all that a site has sent for the next outer step."""
        shutil.rmtree(self._pending / str(site), ignore_errors=True)


def _write(path: Path, content: bytes | bytearray) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_to_disk(path.parent)
