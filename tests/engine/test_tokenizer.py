"""The tokenizer and the incremental detokenizer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from shotcast.engine import tokenizer as tokenizer_module
from shotcast.engine.detokenizer import IncrementalDetokenizer
from shotcast.engine.tokenizer import GgufVocabulary, Tokenizer
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.models.gguf_header import GgufHeader

SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"
)


def save(folder: Path, backend: Backend, **options: Any) -> Path:
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | options))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return folder


def byte_level() -> Backend:
    """Make a tokenizer like GPT-2, Llama 3 and Qwen: every byte has a token, so characters may be split anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("a", "b"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ģ", "ð"), ("Ġ", "Ġ")]
    pieces = SPECIAL + alphabet + ["".join(pair) for pair in merges]
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece() -> Backend:
    """Make a tokenizer like Llama 2 and Mistral.

    Spaces are "▁", one precedes a text, and unknown characters are spelled in bytes.
    """
    pieces = (
        SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + list("▁abAé\N{REPLACEMENT CHARACTER}") + ["▁a", "▁▁"]
    )
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, [("▁", "a"), ("▁", "▁")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte level": Tokenizer.load(str(save(folder / "bytes", byte_level(), chat_template=TEMPLATE))),
        "sentencepiece": Tokenizer.load(str(save(folder / "pieces", sentencepiece()))),
    }


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load("smollm2")


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    decoder = IncrementalDetokenizer(tokenizer, skip_special)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


KINDS = ["byte level", "sentencepiece"]


@pytest.mark.every(2)
@settings(max_examples=300)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_make_the_whole(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    """This holds for any tokens: special and unknown ones, and bytes that are no text."""
    tokenizer = tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.vocabulary()) + 2), max_size=60))
    skip_special = data.draw(st.booleans())
    text = "".join(streamed(tokenizer, ids, skip_special))
    assert text == tokenizer.decode_continuation(ids, skip_special)
    if kind == "byte level" or "\N{REPLACEMENT CHARACTER}" not in text:  # there the library decides otherwise
        prompt = tokenizer.encode("a b")
        assert tokenizer.decode(prompt, skip_special) + text == tokenizer.decode([*prompt, *ids], skip_special)


@given(
    st.lists(
        st.one_of(st.binary(min_size=1, max_size=1), st.text(st.characters(exclude_categories=["Cs"])).map(str.encode))
    )
)
def test_runs_of_byte_tokens_are_utf_8(tokenizers: dict[str, Tokenizer], parts: list[bytes]) -> None:
    """Bytes that are no text take no characters beside them along."""
    tokenizer = tokenizers["sentencepiece"]
    run = b"".join(parts)
    ids = [tokenizer._tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in run]
    expected = run.decode(errors="replace")
    assert tokenizer.decode_continuation(ids) == "".join(streamed(tokenizer, ids)) == expected


@settings(max_examples=300)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_text_are_whole_characters(tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizers[kind]
    text = data.draw(st.text(st.sampled_from("ab A é😀😃\N{ZERO WIDTH JOINER}中\n"), max_size=30))
    pieces = streamed(tokenizer, tokenizer.encode(text))
    # sentencepiece adds a space before a text
    assert "".join(pieces) == (" " if kind == "sentencepiece" and text else "") + text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@pytest.mark.full
@given(st.lists(st.integers(0, 49155), max_size=60), st.booleans())
def test_pieces_make_the_whole_for_a_real_tokenizer(smollm2: Tokenizer, ids: list[int], skip_special: bool) -> None:
    assert "".join(streamed(smollm2, ids, skip_special)) == smollm2.decode(ids, skip_special)


def test_text_is_released_as_soon_as_it_is_known(tokenizers: dict[str, Tokenizer]) -> None:
    byte_level, sentencepiece = (tokenizers[kind] for kind in KINDS)
    assert streamed(byte_level, byte_level.encode("ab a")) == ["ab", " a", ""]
    # é is one token; the emoji are a token of three bytes and one of the last
    assert streamed(byte_level, byte_level.encode("é😀😀")) == ["é", "", "😀", "", "😀", ""]
    # a character spelled in bytes is known at its last byte
    assert streamed(sentencepiece, sentencepiece.encode("a😀😀b")) == [" a", *["", "", "", "😀"] * 2, "b", ""]
    assert streamed(sentencepiece, sentencepiece.encode("a\n\n")) == [" a", "\n", "\n", ""]


def count_decoded(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Count the tokens that are decoded in total while ids arrive one by one."""
    decoded = 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer._tokenizer, name)

        def __len__(self) -> int:
            return len(tokenizer._tokenizer)

        def decode(self, ids: list[int], **options: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            text: str = tokenizer._tokenizer.decode(ids, **options)
            return text

    counting = Tokenizer(Counting())
    for token in set(ids):
        counting.decode_token(token)
    decoded = 0
    streamed(counting, ids)
    return decoded


@pytest.mark.parametrize(
    ("kind", "piece"), [("byte level", "a"), ("byte level", "Ģ"), ("byte level", "ð"), ("sentencepiece", "<0x80>")]
)
def test_a_token_takes_constant_time(tokenizers: dict[str, Tokenizer], kind: str, piece: str) -> None:
    """This holds for bytes that never become text too: a run of them is not decoded again and again."""
    tokenizer = tokenizers[kind]
    token = tokenizer._tokenizer.convert_tokens_to_ids(piece)
    few, many = (count_decoded(tokenizer, [token] * count) for count in (100, 1000))
    assert many <= 12 * few


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_was_decoded_before_is_known(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    few, many = (count_decoded(tokenizer, tokenizer.encode("ab a" * count)) for count in (1, 50))
    assert few == many < 4


def test_text_that_is_not_unicode_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"the text is not valid Unicode: .*surrogates not allowed"):
        smollm2.encode("a\udcffb")


def test_a_gguf_file_has_its_tokenizer(smollm2: Tokenizer) -> None:
    assert len(smollm2.vocabulary()) == 49152
    assert smollm2.eos == (2,)
    text = "Once upon a time, été 😀  two spaces"
    assert smollm2.decode(smollm2.encode(text)) == text
    # each digit is a token, as in the model's training
    assert [smollm2.decode([token]) for token in smollm2.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]


def test_smollm2_is_read_without_transformers_and_torch() -> None:
    code = """
import sys
from shotcast.engine.tokenizer import GgufVocabulary, is_smollm
from pathlib import Path
path = Path(sys.argv[1])
assert is_smollm(path) and len(GgufVocabulary(path)) == 49152
print(sorted({"transformers", "torch", "gguf"} & set(sys.modules)))
"""
    path = str(Tokenizer.find("smollm2"))
    assert subprocess.run([sys.executable, "-c", code, path], check=True, capture_output=True).stdout == b"[]\n"


def test_smollm2_has_the_vocabulary_that_transformers_reads(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(smollm2._tokenizer, GgufVocabulary)
    monkeypatch.setattr(tokenizer_module, "is_smollm", lambda path: False)
    wanted = Tokenizer.load("smollm2")
    assert isinstance(wanted._tokenizer, transformers.PreTrainedTokenizerFast)
    assert json.loads(smollm2.to_json()) == json.loads(wanted.to_json())
    for name in ("eos", "chat_template", "special_tokens", "byte_tokens"):
        assert getattr(smollm2, name) == getattr(wanted, name)
    assert smollm2.vocabulary() == wanted.vocabulary()
    text = "<|im_start|>in 2024\nété 😀  two"
    for special in (False, True):
        ids = smollm2.encode(text, special)
        assert ids == wanted.encode(text, special)
        assert smollm2.decode(ids, special) == wanted.decode(ids, special)
    messages = [{"role": "user", "content": "Hello"}]
    assert smollm2.apply_chat_template(messages) == wanted.apply_chat_template(messages)
    with pytest.raises(ConfigError, match="no variable tokenize"):
        smollm2.check_template_variables(["tokenize"])


def test_the_configuration_of_a_gguf_file_is_not_read_with_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers takes ten times as long for it as for the vocabulary."""
    monkeypatch.setattr(tokenizer_module, "is_smollm", lambda path: False)
    monkeypatch.setattr(transformers.AutoConfig, "for_model", lambda *_, **__: pytest.fail("it was read"))
    assert len(Tokenizer.load("smollm2").vocabulary()) == 49152


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.model": "llama"},
        {"tokenizer.ggml.add_bos_token": True},
        {"tokenizer.ggml.model": None},
        {"tokenizer.ggml.model": None, "tokenizer.ggml.token_type": [1, 4]},
    ],
)
def test_vocabularies_of_pieces_or_with_a_first_token_have_their_own_class(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = GgufHeader.read(Tokenizer.find("smollm2"))
    changed = dataclasses.replace(header, metadata=dict(header.metadata) | changes)
    monkeypatch.setattr(GgufHeader, "read", lambda path: changed)
    asked: list[str] = []
    read = transformers.AutoTokenizer.from_pretrained

    def noted(folder: Any, **options: Any) -> Any:
        asked.append(options["gguf_file"])
        return read(folder, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", noted)
    assert len(Tokenizer.load("smollm2").vocabulary()) == 49152
    assert asked == [Tokenizer.find("smollm2").name]


def test_the_model_s_chat_template(smollm2: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ids = smollm2.apply_chat_template(messages)
    assert smollm2.decode(ids, skip_special=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    shorter = smollm2.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=False)
    assert smollm2.decode(shorter, skip_special=False).endswith("Hello<|im_end|>\n")


def test_the_chat_template_of_a_folder(tokenizers: dict[str, Tokenizer]) -> None:
    byte_level, sentencepiece = (tokenizers[kind] for kind in KINDS)
    ids = byte_level.apply_chat_template([{"role": "user", "content": "ab"}])
    assert byte_level.decode(ids, skip_special=False) == "<s>ab</s>"
    assert byte_level.eos == (2,)
    for messages in ("ab", ["ab"]):
        with pytest.raises(ConfigError, match=r"messages are a list such as .*; got .*ab"):
            byte_level.apply_chat_template(messages)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no chat template"):
        sentencepiece.apply_chat_template([{"role": "user", "content": "ab"}])


def test_messages_that_the_template_refuses(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer.load(str(save(tmp_path, byte_level(), chat_template=template)))
    with pytest.raises(ConfigError, match="roles must alternate"):
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])


def test_texts_without_special_tokens(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    start = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    tokenizer = Tokenizer.load(str(save(tmp_path, backend)))
    first, *rest = tokenizer.encode("ab")
    assert (first, rest) == (start[1], tokenizer.encode("ab", add_special=False))
    assert tokenizer.decode([first, *rest], skip_special=False) == "<s>ab"


def test_variables_of_a_chat_template(tmp_path: Path) -> None:
    template = "{% if enable_thinking %}</s>{% endif %}{{ messages[0].content }}{{ 1 / (share or 1) }}"
    tokenizer = Tokenizer.load(str(save(tmp_path, byte_level(), chat_template=template)))
    messages = [{"role": "user", "content": "ab"}]
    for variables, text in ((None, "ab1.0"), ({"enable_thinking": True}, "</s>ab1.0"), ({"share": 2}, "ab0.5")):
        assert tokenizer.decode(tokenizer.apply_chat_template(messages, variables), skip_special=False) == text
    with pytest.raises(ConfigError, match=r"template refuses these messages: .* 'list'"):
        tokenizer.apply_chat_template(messages, {"share": [1]})
    for name in ("messages", "chat_template", "tokenize", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=f"no variable {name}"):
            tokenizer.apply_chat_template(messages, {name: False})


def test_models_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"random:qwen3-8b has no tokenizer.*LLM takes token ids"):
        Tokenizer.load("random:qwen3-8b")
    with pytest.raises(ConfigError, match=r"it has no config.json"):
        Tokenizer.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    with pytest.raises(UnsupportedError, match=r"architecture BertModel is not supported"):
        Tokenizer.load(str(tmp_path))
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has none of tokenizer.json, .*"):
        Tokenizer.load(str(tmp_path))
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer of .* cannot be read"):
        Tokenizer.load(str(tmp_path))


def test_negative_tokens_are_refused(tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(ConfigError, match="-1"):
        tokenizers["byte level"].decode([5, -1])


def test_tools_of_a_chat_template(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{{ messages[0].content }}"
    tokenizer = Tokenizer.load(str(save(tmp_path, byte_level(), chat_template=template)))
    assert tokenizer.chat_template == template
    messages = [{"role": "user", "content": "ab"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages, tools=tools)) == "(f)ab"
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "ab"


def test_special_tokens_by_name(tokenizers: dict[str, Tokenizer]) -> None:
    assert tokenizers["byte level"].special_tokens == {name: number for number, name in enumerate(SPECIAL)}
    assert tokenizers["sentencepiece"].chat_template == ""


def test_a_tokenizer_as_json(tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        copied = Backend.from_str(tokenizer.to_json())
        assert copied.encode("ab a").ids == tokenizer.encode("ab a")
    slow = object.__new__(Tokenizer)
    slow._tokenizer = object()
    with pytest.raises(ConfigError, match="object is no tokenizer of Hugging Face's fast kind"):
        slow.to_json()
