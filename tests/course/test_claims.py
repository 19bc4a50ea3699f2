"""The quiz of the lab `claims`: which claims it asks and how it counts guesses."""

import pytest

from mini_dist.course.claims import CLAIMS, DRAWN, Quiz


def decided(quiz):
    for number in range(1, len(CLAIMS) + 1):
        quiz.decide(number, number % 2 == 0, "even")  # Even-numbered claims are true.
    return quiz


def test_all_claims_are_asked_or_ten_that_the_number_draws():
    everything = Quiz().sheet()
    assert len(everything.rows) == len(CLAIMS) >= 30
    sheets = [tuple(Quiz(seed).guesses) for seed in (1, 2, 1)]
    assert all(len(sheet) == DRAWN for sheet in sheets)
    assert sheets[0] == sheets[2] != sheets[1]


def test_guesses_are_counted_in_the_order_of_the_sheet(capsys):
    quiz = decided(Quiz(guesses="TT-fF"))
    assert quiz.result() == {"guessed": 4, "right": 2, "wrong": [1, 4]}
    rows = quiz.table().rows
    assert [row[3] for row in rows[:6]] == ["✗", "✓", "", "✗", "✓", ""]
    assert CLAIMS[0].sentence in capsys.readouterr().out


@pytest.mark.parametrize("guesses", ["yes", "T" * (len(CLAIMS) + 1), "1"])
def test_other_guesses_are_refused(guesses):
    with pytest.raises(ValueError, match="T, F or -"):
        Quiz(guesses=guesses)


def test_a_sheet_with_a_claim_that_no_cell_has_decided_says_which():
    quiz = decided(Quiz())
    del quiz.verdicts[3]
    for ask in (quiz.table, quiz.result):
        with pytest.raises(RuntimeError, match="no cell has decided 3 of the claims"):
            ask()


def test_a_claim_is_decided_once():
    quiz = decided(Quiz())
    with pytest.raises(ValueError, match="once"):
        quiz.decide(1, True, "again")
