r"""A word-level tokenizer for the language of `rltt.data.arithmetic`, built from its tables: no file, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rltt.data.arithmetic import vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

# What is one token: the opening of a box, a word, a single digit (so that numbers are read and written place by place,
# not looked up), or any other sign. Spaces are not tokens.
_TOKEN = r"\\boxed\{|[A-Za-z]+|\d|[^\sA-Za-z\d]"
# Decoding joins tokens with spaces and takes out those that the language never writes: before punctuation and a closing
# brace, inside a number, after an opening brace.
_NO_SPACE = r" (?=[.,?}])|(?<=\d) (?=\d)|(?<=\{) "


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    r"""A fast tokenizer with exactly the vocabulary of the arithmetic problems and `<pad>`, `<eos>`, `<unk>`.

    `\boxed{` and `}` are one token each and every digit is its own. Decoding the tokens of a prompt or
    a response gives its text back exactly. Pads on the left, adds no special token by itself, has no chat template.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, UNK, *vocabulary()]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_TOKEN), behavior="removed", invert=True)
    # The WordPiece decoder is the one that joins with spaces; the prefix of continued words never occurs.
    joined = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.decoder = decoders.Sequence([joined, decoders.Fuse(), decoders.Replace(Regex(_NO_SPACE), "")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        # No token_type_ids: a causal model's forward takes none.
        model_input_names=["input_ids", "attention_mask"],
    )
