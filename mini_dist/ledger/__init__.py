"""What was sent, by whom, to whom, when: the scoreboard of every run."""

from __future__ import annotations


class Ledger:
    @classmethod
    def from_ranks(cls, exports):
        ledger = cls()
        ledger.exports = exports
        return ledger
