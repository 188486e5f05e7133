# SPDX-License-Identifier: Apache-2.0
"""Makes tests/tokenizer/goldens: small tokenizers, trained on this repository's texts in the shapes of the
supported model families, each with the tokens that PyPI `tokenizers` or `sentencepiece` finds in texts.json.

    python -m venv venv && venv/bin/pip install tokenizers sentencepiece
    venv/bin/python tests/tokenizer/make_goldens.py [--out tests/tokenizer/goldens]

texts.json has the texts as bytes, each byte one character (Latin-1), because some are not UTF-8. Each folder
has the tokenizer and golden.json: `tokens` and `decoded` of each text, null where two unigram segmentations
are equally likely.
"""
import argparse
import io
import json
import pathlib

import mixed_text
import sentencepiece
from compare import ties
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

VOCABULARY = 700
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(pre_tokenizer, normalizer=None, special=(), ignore_merges=False, post=None, vocabulary=VOCABULARY):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                          special_tokens=list(special), show_progress=False), post


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece_like(pre_tokenizer, normalizer, decoder, vocabulary=VOCABULARY):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    return tokenizer, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, limit_alphabet=100, show_progress=False), "<s>"


def metaspace_decoder():
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


CASES = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), special=["<|endoftext|>"]),
    "smollm": lambda: byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
                                 special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama3": lambda: byte_level(split(LLAMA3), special=["<|begin_of_text|>", "<|eot_id|>"], ignore_merges=True, post="<|begin_of_text|>"),
    "qwen2": lambda: byte_level(split(QWEN2), normalizers.NFC(), special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama2": lambda: sentencepiece_like(None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), metaspace_decoder()),
    "metaspace": lambda: sentencepiece_like(pre_tokenizers.Metaspace(prepend_scheme="first", split=True), None, metaspace_decoder()),
}


def train(out, name, corpus):
    tokenizer, trainer, bos = CASES[name]()
    tokenizer.train_from_iterator(corpus, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                                                 special_tokens=[(bos, tokenizer.token_to_id(bos))])
    if name in ("llama2", "metaspace"):
        # Bytes are in the vocabulary, but they are not special, and no text spells them.
        data = json.loads(tokenizer.to_str())
        data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    if name == "qwen2":
        tokenizer.add_tokens([AddedToken("fox", single_word=True), AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False)])
    (out / name / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":")) + "\n")
    return (lambda text: tokenizer.encode(text).ids), (lambda ids: tokenizer.decode(ids))


SENTENCEPIECE = {
    # Llama 2's own settings, and the library's defaults.
    "sentencepiece_bpe": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
                              split_digits=True, allow_whitespace_only_pieces=True),
    "sentencepiece_unigram": dict(model_type="unigram"),
}


def train_sentencepiece(out, name, corpus):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(corpus), model_writer=model, vocab_size=VOCABULARY, character_coverage=0.995,
                                             minloglevel=2, **SENTENCEPIECE[name])
    (out / name / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    # What a GGUF file has of such a model.
    kinds = [(processor.is_unknown, 2), (processor.is_control, 3), (processor.is_byte, 6)]
    ids = range(processor.get_piece_size())
    (out / name / "gguf.json").write_text(json.dumps({
        "tokens": [processor.id_to_piece(i) for i in ids], "scores": [processor.get_score(i) for i in ids],
        "types": [next((kind for test, kind in kinds if test(i)), 1) for i in ids]}) + "\n")
    return (lambda text: None if ties(processor, text) else [processor.bos_id()] + processor.encode(text)), (lambda ids: processor.decode(ids))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "goldens")
    parser.add_argument("--texts", type=int, default=150)
    out = parser.parse_args().out
    texts = [text.encode() for text in mixed_text.SENTENCES] + ["the fox foxes <mask> <mask>x".encode()]
    texts += list(mixed_text.texts(1000, seed=7))[: parser.parse_args().texts - len(texts)]
    corpus = [sentence + "\n" for sentence in mixed_text.SENTENCES] + (mixed_text.REPOSITORY / "LICENSE").read_text().splitlines()
    out.mkdir(parents=True, exist_ok=True)
    (out / "texts.json").write_text(json.dumps([text.decode("latin-1") for text in texts], indent=0, ensure_ascii=True) + "\n")
    for name in [*CASES, *SENTENCEPIECE]:
        (out / name).mkdir(exist_ok=True)
        encode, decode = (train if name in CASES else train_sentencepiece)(out, name, corpus)
        tokens = [encode(text.decode(errors="replace")) for text in texts]
        golden = {"tokens": tokens, "decoded": [ids and decode(ids) for ids in tokens]}
        (out / name / "golden.json").write_text("{" + ",\n".join(f'"{key}":' + json.dumps(value, separators=(",", ":")) for key, value in golden.items()) + "}\n")


if __name__ == "__main__":
    main()
