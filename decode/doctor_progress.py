"""Progress of the doctor on stderr: a live bar on a terminal, a line per form and per stage elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dflash_kit.live_bar import LiveBar
from dflash_kit.time_words import RATE_MEMORY_S


class DoctorProgress(LiveBar):
    """Shows answers taken and replays done.

    Args:
        num_forms: forms in which the target answers the prompts.
        num_replays: of the race.
    """

    def __init__(self, num_forms: int, num_replays: int) -> None:
        self._console = Console(stderr=True)
        self._num_forms = num_forms
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            speed_estimate_period=RATE_MEMORY_S,
        )
        self._forms = self._bar.add_task("answers", total=num_forms, completed=-1, what="")
        self._replays = self._bar.add_task("replays", total=num_replays, completed=-1, what="")
        self._tokens = 0

    def begin_form(self, form: str) -> None:
        """The target starts to answer the prompts in one form."""
        self._bar.update(self._forms, advance=1, what=form)
        self._say(f"answers of the target, {form}")

    def begin_replay(self, tokens: int, name: str) -> None:
        """One replay starts."""
        self._bar.update(self._forms, completed=self._num_forms)
        self._bar.update(self._replays, advance=1, what=name)
        if tokens != self._tokens:
            self._tokens = tokens
            self._say(f"replays of the first {tokens} tokens of each answer")

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"doctor: {line}", highlight=False, soft_wrap=True)
