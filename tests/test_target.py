"""Addresses, keys and proxies: what reaches the server, and what never leaves."""

import pytest

from loadgen.options import Options, UsageError
from loadgen.target import base_url, is_loopback, make_target


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("localhost:8000/v1", "http://localhost:8000"),
        ("https://host/llm/v1", "https://host/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_base_url_with_or_without_v1(given: str, base: str) -> None:
    assert base_url(given) == base


@pytest.mark.parametrize("wrong", ["", "ftp://x", "http://", "http://h:99999", "http://h:port", "http://h/?a=1"])
def test_wrong_addresses_name_the_flag(wrong: str) -> None:
    with pytest.raises(UsageError, match="--url must be like"):
        base_url(wrong)


def test_a_password_in_the_address_is_refused() -> None:
    with pytest.raises(UsageError, match="OPENAI_API_KEY"):
        base_url("http://user:secret@host:1")


def test_the_key_comes_from_the_environment_and_a_header_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert make_target(Options()).headers == {"Authorization": "Bearer sk-1"}
    own = make_target(Options(headers={"authorization": "Bearer other"}))
    assert own.headers == {"authorization": "Bearer other"}


def test_a_header_cannot_smuggle_a_line() -> None:
    with pytest.raises(UsageError, match="one line"):
        make_target(Options(headers={"X": "a\r\nHost: evil"}))


def test_loopback_never_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for url in ("http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:1", "http://127.8.9.1"):
        assert is_loopback(base_url(url)) and make_target(Options(url=url)).proxy is None
    assert make_target(Options(url="http://example.test")).proxy == "http://127.0.0.1:9"
    monkeypatch.setenv("no_proxy", "example.test")
    assert make_target(Options(url="http://example.test")).proxy is None
