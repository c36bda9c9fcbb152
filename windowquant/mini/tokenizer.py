"""The stand-ins' byte-level tokenizer: one token for each word of the mini world, whatever the architecture."""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from windowquant.mini import scenes as sc

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# an option's marker and an answer's letter are one token each; everything else splits into words, single digits and
# signs
PIECES = r"\n[A-E]\.| \([A-E]\)| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s"


def chat_template(image: str, video: str) -> str:
    """One line a turn; an item of a message that is no text stands before all of its text, as the given placeholder."""
    return (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        f"{{% for item in message['content'] %}}{{% if item['type'] == 'image' %}}{{{{ '{image}\n' }}}}"
        f"{{% elif item['type'] == 'video' %}}{{{{ '{video}\n' }}}}{{% endif %}}{{% endfor %}}"
        "{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}"
        "{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def _words() -> Iterator[str]:
    """The pieces of all that the model reads or says, each as often as the others, so that each becomes one token."""
    rng, texts = np.random.default_rng(0), ["system", "user", "assistant", "You are a helpful assistant.", "yes no"]
    for _ in range(200):
        story, main = sc.sample_story(rng), sc.sample_story(rng, main=str(rng.choice(sc.CONTENTS)))
        asked = [sc.ask(mix, story, rng) for mix in (sc.NEXTQA_MIX, sc.INTENTQA_MIX) for _ in range(4)]
        asked += [sc.ask_main(main, rng), sc.describe(story)]
        texts += [f"\n{sc.prompt(question, 'egoschema')} {question.reply}" for question in asked]
    texts += [f" {word}" for word in (*sc.PLACES, *sc.CONTENTS)]
    for piece in sorted({piece for text in texts for piece in re.findall(PIECES, text)}):
        yield from [piece] * 50


def build_tokenizer(
    image: str = "<image>",
    video: str = "<video>",
    separators: Sequence[str] = (),
    pieces: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
    vocabulary: int = 1024,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the mini world's words; any other text falls back to bytes.

    The ids of words, turns and the two placeholders are the same for every architecture; after them come its
    `separators` (special tokens) and `pieces` (text that is one token). `named` gives special tokens names on the
    tokenizer, as some processors want.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, TURN_START, TURN_END, image, video],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(), trainer)
    tokenizer.add_special_tokens(list(separators))
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    special = [TURN_START, image, video, *separators]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        extra_special_tokens=special if named is None else dict(named),
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
