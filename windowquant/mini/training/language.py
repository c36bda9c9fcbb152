"""The text side of a model under training."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from windowquant.mini import scenes as sc
from windowquant.mini.architectures import Architecture
from windowquant.mini.training.rows import IGNORE, Asked, Rows, visible

TURN = "<|im_end|><|im_start|>assistant\n"


class Language:
    """Language model, head and temporary read-outs; the word embeddings are not trained here."""

    def __init__(self, architecture: Architecture, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.architecture = architecture
        self.model, self.lm, self.tokenizer = model, model.model.language_model, tokenizer
        width = model.config.text_config.hidden_size
        torch.manual_seed(0)
        # temporary read-outs, thrown away with the training: of the first layer (an option: which letter?) and of the
        # second (a visual token: which scene came before?)
        self.readouts = nn.ModuleDict({name: nn.Linear(width, width) for name in ("letter", "before")})
        self.place_ids = torch.tensor([tokenizer.convert_tokens_to_ids(f"Ġ{w}") for w in sc.PLACES])
        self.letter_ids = {letter: tokenizer.convert_tokens_to_ids(f"Ġ({letter})") for letter in sc.LETTERS}
        self.end, self.comma = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(",")

    def parameters(self) -> dict[str, nn.Parameter]:
        # the word embeddings stay as the vision stage left them: the window search relies on the shared space
        named = {f"lm.{n}": p for n, p in self.lm.named_parameters() if n != "embed_tokens.weight"}
        named |= {f"readouts.{n}": p for n, p in self.readouts.named_parameters()}
        named |= {f"head.{n}": p for n, p in self.model.lm_head.named_parameters()}
        return named | dict(self.architecture.emitted(self.model))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def hint_logits(self, hidden: Tensor, readout: str) -> Tensor:
        return self.logits(self.readouts[readout](self.lm.norm(hidden)))

    def hidden(self, rows: Rows, embeddings: Tensor, shift: Tensor | int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """-> last hidden state, first layer's output, second layer's output; [B, T, 192] each."""
        out = self.lm(
            inputs_embeds=embeddings,
            attention_mask={"full_attention": visible(rows.part)[:, None]},
            position_ids=rows.positions + shift,
            output_hidden_states=True,
        )
        return out.last_hidden_state, *out.hidden_states[1:3]

    def segment(self, asked: Asked) -> tuple[list[int], list[int], list[int]]:
        """One question and its reply -> ids, labels (reply and end only), hints (an option's last token: that
        option's letter)."""
        lines = sc.prompt(asked.question, asked.task).split("\n")
        ids, hints = self.encode(self.architecture.after_video + lines[0]), []
        hints += [IGNORE] * len(ids)
        for k, line in enumerate(lines[1:]):
            tokens = self.encode("\n" + line)
            is_option = k < len(asked.question.options)
            hints += [IGNORE] * (len(tokens) - 1) + [self.letter_ids[sc.LETTERS[k]] if is_option else IGNORE]
            ids += tokens
        turn, reply = self.encode(TURN), [*self.encode(" " + asked.question.reply), self.end]
        labels = [IGNORE] * (len(ids) + len(turn)) + reply
        return ids + turn + reply, labels, hints + [IGNORE] * (len(turn) + len(reply))
