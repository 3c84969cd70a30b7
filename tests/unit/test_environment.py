"""What `px.environment` shows, beside what torch's own dump prints."""

from __future__ import annotations

import pytest
from torch.nn.parallel import distributed

import phalanx as px


def test_it_has_what_torchs_dump_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    distributed._dump_DDP_relevant_env_vars()
    names = [line.removeprefix("env:").partition("=")[0] for line in capsys.readouterr().out.split()]
    assert "NCCL_SOCKET_NTHREADS" in names and len(names) > 40
    for name in names:
        monkeypatch.setenv(name, f"value of {name}")
    found = px.environment()
    assert {name: found.get(name) for name in names} == {name: f"value of {name}" for name in names}


def test_only_what_is_set_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("PHALANX_X", "1")
    monkeypatch.setenv("SECRET_TOKEN", "s")
    found = px.environment()
    assert found["PHALANX_X"] == "1" and "MASTER_ADDR" not in found and "SECRET_TOKEN" not in found
