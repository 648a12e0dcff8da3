"""The environment variables of torchrun."""

from featureflock.distributed.env import is_rank_zero, launched_by_torchrun, launcher_id, restarted_by_torchrun


def test_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (is_rank_zero(), launched_by_torchrun(), restarted_by_torchrun()) == (True, False, False)


def test_as_a_restarted_worker(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (is_rank_zero(), launched_by_torchrun(), restarted_by_torchrun()) == (False, True, True)


def test_the_id_of_a_launcher_is_the_same_for_its_processes_and_restarts_only(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert launcher_id() == 0
    ids = []
    for file in (
        "logs/none_a/attempt_0/0",
        "logs/none_a/attempt_0/1",
        "logs/none_a/attempt_2/0",
        "logs/none_b/attempt_0/0",
    ):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"logs/none_{file}/error.json")
        ids.append(launcher_id())
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert 0 < min(ids) <= max(ids) <= 2**48
