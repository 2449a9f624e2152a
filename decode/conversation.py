"""Conversations as the target reads them: its own chat template around the turns said so far."""

from typing import Any

from dflash_kit.errors import KitError

Message = dict[str, str]


class Conversation:
    """User turns and the target's answers so far.

    Args:
        tokenizer: the target's.
        turns: user turns in order.
        name: for messages.
        template_args: further arguments of the chat template.
    """

    def __init__(self, tokenizer: Any, turns: tuple[str, ...], name: str, **template_args: Any) -> None:
        self.tokenizer, self.turns, self.name = tokenizer, turns, name
        self.template_args = template_args
        self.messages: list[Message] = []

    def ask(self, turn: int) -> list[int]:
        """Append a user turn; token ids of the whole conversation, ready for the answer.

        Raises:
            KitError: the template rejects the conversation; several turns for a target without one.
        """
        self.messages.append({"role": "user", "content": self.turns[turn]})
        if not self.tokenizer.chat_template:
            if len(self.turns) > 1:
                raise KitError(
                    f"prompt {self.name} has several turns, but the target has no chat template to join them"
                )
            return list(self.tokenizer(self.turns[0], verbose=False)["input_ids"])
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                self.messages, tokenize=False, add_generation_prompt=True, **self.template_args
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise KitError(f"the chat template rejects prompt {self.name}: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def answer(self, token_ids: list[int]) -> None:
        """Append the target's answer; the next turn follows it."""
        self.messages.append(
            {"role": "assistant", "content": self.tokenizer.decode(token_ids, skip_special_tokens=True)}
        )
