import pytest
import torch
from transformers import AutoTokenizer, pipeline

from longstride.transformers import ByteTokenizer
from tests.transformers.small import wrapped

TEXT = "Größe 漢字 🙂\n\ttab  two spaces , and <s> </s>\x00\x7f"


def test_ids_are_bytes(tmp_path):
    tokenizer = ByteTokenizer()
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    assert (len(tokenizer), tokenizer.vocab_size, tokenizer.all_special_ids) == (256, 256, [])
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    for byte in range(256):
        assert tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(byte)) == byte
    assert tokenizer.decode([72, 255, 105]) == "H\ufffdi"


def test_it_is_saved_and_read(tmp_path):
    wrapped().save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(again, ByteTokenizer)
    assert again.encode(TEXT) == list(TEXT.encode())


def test_there_is_no_padding():
    assert ByteTokenizer()(["abc", "def"], return_tensors="pt")["input_ids"].shape == (2, 3)
    with pytest.raises(ValueError, match="padding token"):
        ByteTokenizer()(["abc", "d"], padding=True)


@pytest.mark.parametrize(
    "add",
    [
        lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "<pad>"}),
        lambda tokenizer: tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]}),
        lambda tokenizer: tokenizer.add_tokens(["<pad>"]),
        lambda tokenizer: tokenizer.add_tokens(["ÿ"]),
        lambda tokenizer: setattr(tokenizer, "pad_token", "<pad>"),
        lambda tokenizer: setattr(tokenizer, "pad_token_id", 200),
        lambda tokenizer: setattr(tokenizer, "extra_special_tokens_ids", [65, 200]),
        lambda _: ByteTokenizer(pad_token="<pad>"),
    ],
)
def test_no_token_is_added(add):
    tokenizer = ByteTokenizer()
    with pytest.raises(ValueError, match=r"ByteTokenizer: '.*' cannot be a token; ids are the 256 bytes.*pad_token="):
        add(tokenizer)
    assert (len(tokenizer), tokenizer.all_special_tokens) == (256, [])
    assert tokenizer.decode(tokenizer.encode("a<pad>ÿ"), skip_special_tokens=True) == "a<pad>ÿ"


@pytest.mark.parametrize("pad", [("pad_token", "\0"), ("pad_token_id", 0)])
def test_a_byte_may_pad(tmp_path, pad):
    tokenizer = ByteTokenizer()
    setattr(tokenizer, *pad)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, ByteTokenizer.from_pretrained(tmp_path)):
        found = one(["abc", "d"], padding=True)
        assert found["input_ids"] == [[97, 98, 99], [100, 0, 0]]
        assert found["attention_mask"] == [[1, 1, 1], [1, 0, 0]]
        assert (len(one), one.pad_token_id) == (256, 0)
        assert one.decode([100, 0, 0], skip_special_tokens=True) == "d"


def test_what_is_no_byte_is_named():
    with pytest.raises(ValueError, match="256 is no id; ids are the 256 bytes, 0 to 255"):
        ByteTokenizer().decode([97, 256])
    with pytest.raises(ValueError, match="'<pad>' is no token"):
        ByteTokenizer().convert_tokens_to_ids("<pad>")
    with pytest.raises(ValueError, match="300 is no id"):
        ByteTokenizer().pad_token_id = 300
    with pytest.raises(ValueError, match="pad_token_id must be a whole number of at least 0, got 'x'"):
        ByteTokenizer().pad_token_id = "x"


def test_text_that_utf_8_cannot_encode_is_named():
    with pytest.raises(ValueError, match=r"'\\ud800' is half of a character, which UTF-8 cannot encode; give text.encode\("):
        ByteTokenizer()("ab\ud800")


def test_generation_takes_stop_strings():
    model, tokenizer = wrapped(), ByteTokenizer()
    given = tokenizer("The cat", return_tensors="pt")
    whole = model.generate(**given, max_new_tokens=20, do_sample=False)[0]
    stops = [tokenizer.decode(whole[10:11])]
    found = model.generate(**given, max_new_tokens=20, do_sample=False, stop_strings=stops, tokenizer=tokenizer)[0]
    assert 7 < len(found) <= 11
    assert torch.equal(found, whole[: len(found)])


def test_a_pipeline_generates_text(tmp_path):
    wrapped().save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    (found,) = generator("The cat", max_new_tokens=20, do_sample=False, return_full_text=False)
    model, tokenizer = wrapped(), ByteTokenizer()
    given = tokenizer("The cat", return_tensors="pt")
    new = model.generate(**given, max_new_tokens=20, do_sample=False)[0, 7:]
    assert found["generated_text"] == tokenizer.decode(new)
