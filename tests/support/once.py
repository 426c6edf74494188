"""Work that is done once for all tests, whichever process of pytest-xdist needs it first."""

import json
import os

from filelock import FileLock  # which torch brings


def once(tmp_path_factory, name, launch):
    """The folder that `launch(folder)` filled. It returns (exit status, words); all who need it fail if it failed."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    ended = folder / "ended.json"
    with FileLock(f"{folder}.lock"):
        if not ended.exists():
            folder.mkdir()
            ended.write_text(json.dumps(launch(folder)))
    code, said = json.loads(ended.read_text())
    assert code == 0, said
    return folder
