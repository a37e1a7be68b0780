"""Verdicts on cases, judged from the exit status and the output of commands."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from attack.children import Ended

VERDICTS = {
    "ran": "a configuration that was run, and may be",
    "equal": "after a kill or a fault the run ended with the bits of one that was left alone",
    "harmless": "a damaged file that changed nothing",
    "refused": "refused in a sentence with key or value, or the file's name",
    "unclear": "refused in other words, or at length",
    "traceback": "ended in a traceback, or died",
    "hang": "gave no answer in time",
    "meaningless": "accepted though it can mean nothing",
    "different": "did not end as the run that was left alone",
    "littered": "ended so, but left files that the other run did not",
    "recorded": "a damaged file of data whose content was used, and of which the run has another digest",
    "used": "a damaged file whose content was used",
}
"""Verdict -> its meaning."""
FAILURES = frozenset({"traceback", "hang", "different", "littered", "used"})
"""Verdicts with which the attack fails."""
LONGEST_SENTENCE = 2000
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Outcome:
    """The verdict on one case.

    Attributes:
        name: name of the case, with its kind: ``kills/17-FOT``.
        verdict: one of VERDICTS.
        detail: the reason, in a line or a few.
        command: the attacked command, which can be repeated by hand.
    """

    name: str
    verdict: str
    detail: str = ""
    command: str = ""

    @property
    def kind(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]


def failure(ended: Ended) -> tuple[str, str] | None:
    """A verdict and its detail for a command that hung, died or ended in a traceback; None for any other."""
    if ended.status is None:
        return "hang", f"no answer in time{_where(ended.said)}{_last_words(ended)}"
    if _TRACEBACK in ended.said:
        after = ended.said.rpartition(_TRACEBACK)[2].strip("\n").splitlines()
        raised = next((line for line in after if line and not line.startswith(" ")), "")
        return "traceback", f"{raised[:300]}{_where(ended.said)}"
    if ended.status < 0 or ended.status == 99:
        return "traceback", f"died of {died_of(ended.status)}{_last_words(ended)}"
    return None


def _where(said: str) -> str:
    """The innermost line of the package in a printed stack; empty if there is none."""
    places = re.findall(r'File "[^"]*/((?:cfl|callbacks)/[^"]+)", line (\d+)', said.rpartition(_TRACEBACK)[2])
    if not places:
        return ""
    file, line = places[-1 if _TRACEBACK in said else 0]
    return f" in {file}, line {line}"


def died_of(status: int) -> str:
    """Name of the signal that a negative status stands for; ``status N`` for others."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


def _last_words(ended: Ended) -> str:
    lines = [line for line in ended.said.splitlines() if line.strip() and not line.startswith((" ", "Current thread"))]
    return f", after: {lines[-1][:200]}" if lines else ", without a word"


def sentence(ended: Ended) -> str:
    """The error that a command ended with; empty if it printed none."""
    found = re.search(r"^(error: .*|usage: .*)", ended.said, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else ""


def refusal(ended: Ended, names: list[str]) -> tuple[str, str]:
    """Return ``refused`` or ``unclear``, and the error.

    Args:
        ended: a command that has failed without a traceback.
        names: words of which one has to stand on standard error.
    """
    said = sentence(ended)
    if not said:
        return "unclear", f"status {ended.status} without an error{_last_words(ended)}"
    if len(said) > LONGEST_SENTENCE:
        return "unclear", f"{len(said)} characters: {said[:150]} ..."
    named = any(name.lower() in ended.said.lower() for name in names)
    return ("refused" if named else "unclear"), said[:600]
