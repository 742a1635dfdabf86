"""Files that ranks send each other arrive as they were, whatever their sizes, and what cannot be
read or written keeps no rank waiting."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigtrain.run.checkpointing.host_files import CHUNK_BYTES
from tests.support.lives import run_script

pytestmark = pytest.mark.distributed

WORKER = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from bigtrain.run.checkpointing.host_files import exchange_files, receive_file, send_file

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
group, rank = dist.group.WORLD, dist.get_rank()
errors = []
for case in ("sizes", "missing", "unwritable"):
    own, copy = folder / f"{case}-{rank}", folder / f"{case}-copy-of-{1 - rank}"
    errors.append(str(exchange_files(own, 1 - rank, copy, 1 - rank, group)))
size = (folder / "sizes-0").stat().st_size
if rank == 0:
    errors.append(str(send_file(folder / "sizes-0", size, 1, group)))
    errors.append(str(send_file(folder / "none", 100, 1, group)))
else:
    errors.append(str(receive_file(folder / "sent", size, 0, group)))
    errors.append(str(receive_file(folder / "sent-zeros", 100, 0, group)))
(folder / f"errors-{rank}.json").write_text(json.dumps(errors))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks have sent each other."""
    folder = tmp_path_factory.mktemp("files")
    script = folder / "worker.py"
    script.write_text(WORKER)
    content = bytes(range(256)) * (CHUNK_BYTES // 256)
    (folder / "sizes-0").write_bytes(content + content + b"tail")
    (folder / "sizes-1").write_bytes(b"short")
    (folder / "missing-0").write_bytes(b"there")
    for rank in (0, 1):
        (folder / f"unwritable-{rank}").write_bytes(b"x" * 10)
    (folder / "unwritable-copy-of-1").mkdir()
    run_script(2, script, folder)
    return folder


def test_files_of_different_sizes_are_exchanged(folder: Path) -> None:
    for rank in (0, 1):
        copy, own = folder / f"sizes-copy-of-{rank}", folder / f"sizes-{rank}"
        assert copy.read_bytes() == own.read_bytes()


def test_a_sent_file_is_the_same(folder: Path) -> None:
    assert (folder / "sent").read_bytes() == (folder / "sizes-0").read_bytes()


def test_errors_are_told_and_nobody_waits(folder: Path) -> None:
    first, second = (json.loads((folder / f"errors-{rank}.json").read_text()) for rank in (0, 1))
    assert first[0] == second[0] == "None"
    assert "No such file" in second[1]  # its own file was missing
    assert first[1] == "None"
    assert "Is a directory" in first[2]
    assert second[2] == "None"
    assert (folder / "unwritable-copy-of-0").read_bytes() == b"x" * 10
    assert first[3:] != ["None", "None"]
    assert "No such file" in first[4]
    assert (folder / "sent-zeros").read_bytes() == bytes(100)
