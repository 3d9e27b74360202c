import pytest

from server.text import TextStream


def decode(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


def pieces(data: bytes, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, stop)
    out = []
    for byte in data:
        out.append(stream.push(byte))
        if stream.stopped_by is not None:
            break
    return [*out, stream.finish()], stream


def test_whole_characters_only() -> None:
    # e acute is 2 bytes, the rocket 4: their text comes with the last of them
    out, _ = pieces("é🚀 ok".encode())
    assert out == ["", "é", "", "", "", "🚀", " ", "o", "k", ""]


@pytest.mark.parametrize("text", ["plain", "日本語のテキスト", "a🚀b👩‍🚀c", "é" * 20, "क्षि \n\t x"])
def test_pieces_join_to_the_whole(text: str) -> None:
    out, _ = pieces(text.encode())
    assert "".join(out) == text
    assert not any("�" in piece for piece in out)


def test_a_true_replacement_character_is_kept() -> None:
    # 0xff is never valid: the whole text has U+FFFD, so its pieces must have it too, at the end as well
    for data in (b"a\xffb", b"a\xff", b"\xe6\x97", b"\xff\xfeok"):
        assert "".join(pieces(data)[0]) == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    "text, stop, kept, by",
    [
        ("hello END world", ("END",), "hello ", "END"),
        ("hello EN world", ("END",), "hello EN world", None),
        ("aab", ("ab",), "a", "ab"),  # the first a is held back, then let go
        ("xEND", ("D", "END"), "x", "END"),  # the one that begins first
        ("ends with EN", ("END",), "ends with EN", None),  # held back at the end, and given
        ("日本。語", ("。",), "日本", "。"),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], kept: str, by: str | None) -> None:
    out, stream = pieces(text.encode(), stop)
    assert ("".join(out), stream.stopped_by) == (kept, by)


def test_a_tokenizer_that_decodes_a_token_differently_beside_others() -> None:
    words = ["▁He", "llo", "▁wor", "ld", "▁", "!"]

    def sentencepiece(ids: list[int]) -> str:  # drops the blank in front of the first word
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(sentencepiece)
    assert "".join([*(stream.push(i) for i in range(len(words))), stream.finish()]) == "Hello world !"
