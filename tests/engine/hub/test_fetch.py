"""Models fetched from a stand-in hub: what is asked for once, gone on with, and refused in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from engine.hub import fetch as fetching
from engine.hub.choice import HubError, HubFile
from engine.hub.fetch import LogLine, Told, fetch
from engine.hub.name import HubName, called
from worlds.hub import Hub, pointed_at, running

BIG = bytes(range(256)) * 400
REPO = "org/repo-GGUF"
NAME = HubName(REPO)
FILE = "a-Q4_K_M.gguf"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {"README.md": b"# a", FILE: BIG, "a-Q8_0.gguf": BIG * 2}
    checkpoint = {"config.json": b"{}", "model.safetensors": BIG, "README.md": b"# b"}
    with running(Hub({REPO: files, "org/plain": checkpoint})) as found:
        pointed_at(monkeypatch, found, tmp_path)
        # What has come of a piece when it breaks off is lost; pieces are of 10 MB.
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
        yield found


def blobs(home: Path) -> Path:
    return home / "hub" / "models--org--repo-GGUF" / "blobs"


def test_a_file_is_fetched_once(hub: Hub) -> None:
    place = fetch(NAME)
    assert place.name == FILE
    assert place.read_bytes() == BIG
    assert called(str(place)) == f"{REPO}:Q4_K_M"
    assert fetch(HubName(REPO, "q4_k_m")) == place
    assert hub.served == {FILE: [(0, len(BIG))]}


def test_a_checkpoint_becomes_a_folder(hub: Hub) -> None:
    place = fetch(HubName("org/plain"))
    assert sorted(each.name for each in place.iterdir()) == ["config.json", "model.safetensors"]
    assert called(str(place)) == "org/plain"
    assert hub.served.keys() == {"config.json", "model.safetensors"}


def test_parts_come_together_and_the_first_is_the_model(hub: Hub) -> None:
    parts = {f"b-Q8_0-0000{number}-of-00002.gguf": BIG * number for number in (1, 2)}
    hub.repos[REPO] = parts
    place = fetch(NAME)
    assert place.name == "b-Q8_0-00001-of-00002.gguf"
    assert {each.name: each.read_bytes() for each in place.parent.iterdir()} == parts


def broken_off(hub: Hub) -> None:
    """A download that broke off, on a hub that works again."""
    hub.breaks_at = 60_000
    with pytest.raises(HubError, match=r"broken off at 0\.06 MB of 0\.102 MB, .* goes on: "):
        fetch(NAME)
    hub.breaks_at, hub.is_broken = None, False


def test_what_broke_off_is_gone_on_with_at_the_next_start(hub: Hub, tmp_path: Path) -> None:
    broken_off(hub)
    assert fetch(NAME).read_bytes() == BIG
    assert hub.served[FILE] == [(0, 60_000), (60_000, len(BIG) - 60_000)]
    assert not [*blobs(tmp_path).glob("*.incomplete")]


def test_what_was_damaged_on_the_way_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    broken_off(hub)
    (part,) = blobs(tmp_path).glob("*.incomplete")
    part.write_bytes(bytes(60_000))
    with pytest.raises(HubError, match="damaged"):
        fetch(NAME)
    assert not part.exists()
    assert fetch(NAME).read_bytes() == BIG


@pytest.mark.usefixtures("hub")
def test_a_download_ends_where_nobody_waits_for_it() -> None:
    def stop(file: HubFile, done: int) -> None:
        assert (file.path, file.size) == (FILE, len(BIG))
        if done:
            raise InterruptedError

    with pytest.raises(HubError, match="InterruptedError"):
        fetch(NAME, told=stop)
    seen: list[int] = []
    watch: Told = lambda _, done: seen.append(done)  # noqa: E731
    assert fetch(NAME, told=watch).read_bytes() == BIG
    assert seen == sorted(seen)
    assert seen[-1] == len(BIG)


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        (
            HubName("org/none"),
            None,
            "there is no such model on the hub, or HF_TOKEN does not open it",
        ),
        (HubName(REPO, "Q2_K"), None, "there is no Q2_K in it; there are Q4_K_M (0.102 MB), Q8_0"),
        (HubName("org/gated"), None, "it is gated: accept its terms"),
        (NAME, "v2", "there is no such revision"),
    ],
)
def test_refusals_are_a_line(hub: Hub, name: HubName, revision: str | None, said: str) -> None:
    hub.repos["org/gated"] = {FILE: BIG}
    hub.gated.add("org/gated")
    with pytest.raises(HubError) as caught:
        fetch(name, revision)
    assert str(caught.value).startswith(f"{name}: {said}")
    assert "\n" not in str(caught.value)
    assert not hub.served


def test_a_token_opens_what_is_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(REPO)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert fetch(NAME).read_bytes() == BIG


@pytest.mark.usefixtures("hub")
def test_offline_the_cache_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = HubName(REPO, "Q8_0")
    place, folder = fetch(eight), fetch(HubName("org/plain"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(eight) == place
    assert fetch(NAME) == place, "the only one that is there"
    assert fetch(HubName("org/plain")) == folder
    with pytest.raises(HubError, match=r"Q2_K.*there are Q8_0 .*HF_HUB_OFFLINE is set"):
        fetch(HubName(REPO, "Q2_K"))
    with pytest.raises(HubError, match="^org/other: it is not in the cache, and HF_HUB_OFFLINE is"):
        fetch(HubName("org/other"))


@pytest.mark.usefixtures("hub")
def test_where_the_hub_does_not_answer_the_cache_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = fetch(NAME)
    gone = Hub({}, url="http://127.0.0.1:9")
    pointed_at(monkeypatch, gone, Path(constants.HF_HUB_CACHE).parent)
    caplog.clear()
    assert fetch(NAME) == place
    assert "served from the cache; the hub does not answer" in caplog.text
    with pytest.raises(HubError, match="not in the cache, and the hub does not answer: "):
        fetch(HubName("org/plain"))


def test_too_little_disk_is_said_before_anything_is_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": len(BIG) - 1})
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(HubError, match=r"0\.102 MB are to be fetched, and .* has 0\.102 MB left"):
        fetch(NAME)
    assert not hub.served
    monkeypatch.setattr(usage, "free", len(BIG))
    assert fetch(NAME).read_bytes() == BIG


def test_too_little_memory_is_said_with_what_would_fit(hub: Hub) -> None:
    needs = (
        r"Q8_0 needs 0\.205 MB of memory, and 0\.15 MB are left; Q4_K_M \(0\.102 MB\) would fit$"
    )
    with pytest.raises(HubError, match=needs):
        fetch(HubName(REPO, "Q8_0"), memory=150_000)
    assert not hub.served
    assert fetch(NAME, memory=150_000).name == FILE


def test_a_log_has_a_line_every_ten_seconds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now = 100.0
    monkeypatch.setattr("tqdm.std.time", lambda: now)
    line = LogLine(desc="a.gguf", total=4_000_000_000, initial=0, unit="B", unit_scale=True)
    assert not caplog.messages
    for now in (101.0, 109.0, 111.0, 115.0, 120.0, 122.0):  # noqa: B007
        line.update(500_000_000)
    assert caplog.messages == [
        "a.gguf: 1.50G of 4.00G, 136MB/s, 00:18 left",
        "a.gguf: 3.00G of 4.00G, 136MB/s, 00:07 left",
    ]
    line.close()


@pytest.mark.usefixtures("hub")
def test_where_nobody_watches_a_bar_a_download_writes_to_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    fetch(NAME)
    assert [each for each in caplog.messages if FILE in each or "fetching 0.102 MB" in each]
    assert "%|" not in capfd.readouterr().err
