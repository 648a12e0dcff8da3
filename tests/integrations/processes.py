"""Two processes with the environment of torchrun."""

import os

from helpers.meshes import finish, start


def run_in_two_processes(folder, work, *args):
    """Call `work(folder, *args)` in two processes, and check that both end without an error."""
    codes = finish(start(2, folder / "output", _work, work, folder, *args), seconds=240)
    assert codes == [0, 0], "\n".join(path.read_text()[-3000:] for path in (folder / "output").iterdir())


def _work(work, folder, *args):
    os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    work(folder, *args)
