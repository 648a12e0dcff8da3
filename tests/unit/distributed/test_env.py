"""The environment variables of torchrun."""

from featureflock.distributed.env import is_rank_zero, launched_by_torchrun, restarted_by_torchrun


def test_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (is_rank_zero(), launched_by_torchrun(), restarted_by_torchrun()) == (True, False, False)


def test_as_a_restarted_worker(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (is_rank_zero(), launched_by_torchrun(), restarted_by_torchrun()) == (False, True, True)
