"""Claims about distributed training as learners meet them, and the quiz of the lab `claims`.

The sentences are here. A cell of lessons/labs/claims.md decides each of them.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from mini_dist.plan.fields import checks_kinds
from mini_dist.plan.tables import Table

from .language import said

DRAWN = 10  # claims of a quiz


class Claim(NamedTuple):
    """A sentence, and why people believe it (or doubt it, where it is true)."""

    sentence: str
    why: str


CLAIMS = (
    Claim(
        "ZeRO-1 shards the optimizer states and the gradients, ZeRO-2 also the parameters.",
        "Many summaries shift the stages by one. ZeRO-2 adds the gradients, ZeRO-3 the parameters.",
    ),
    Claim(
        "With Adam in mixed precision, n ranks and P parameters, ZeRO-1 holds 2P + 14P/n bytes "
        "per rank, and ZeRO-2 holds 4P + 12P/n.",
        "The formulas are swapped. It looks plausible, because each is right for the other stage.",
    ),
    Claim(
        "ZeRO is model parallelism: each rank computes with its shard of the weights.",
        "The weights are sharded, but only in storage. Each rank gathers a whole layer and "
        "applies it to its own samples.",
    ),
    Claim(
        "ZeRO-1 sends no more bytes than data parallelism.",
        "It sounds too good, because it saves memory. But a reduce-scatter and an all-gather "
        "are what an all-reduce consists of.",
    ),
    Claim(
        "In a step with one micro-batch, ZeRO-3 sends at most 1.5 times as many bytes as data "
        "parallelism.",
        "It gathers the parameters twice and scatters the gradients once, which sounds like "
        "three times. But data parallelism sends two of the three already. (The root unit is "
        "gathered only once here, so the factor is a bit smaller.)",
    ),
    Claim(
        "Below 10B parameters, plain data parallelism fits on 80 GB GPUs.",
        "Every GPU holds all model states: 16 to 18 bytes per parameter with Adam, and the "
        "activations.",
    ),
    Claim(
        "Full recomputation of activations costs about a third more computation.",
        "It repeats the forward pass, which is a third of forward and backward together.",
    ),
    Claim(
        "With tensor parallelism over 8 GPUs, each GPU stores one eighth of the activations.",
        "The inputs of the attention and MLP regions and of the norms stay whole on every rank. "
        "Sequence parallelism shards them as well.",
    ),
    Claim(
        "DDP broadcasts the parameters in every step, so that the ranks stay equal.",
        "It does so once, at the start. After that, equal gradients keep the ranks equal. (The "
        "few bytes tell the other ranks how rank 0 has sorted its buckets.)",
    ),
    Claim(
        "Without `no_sync`, four micro-batches make DDP send about four times the bytes of one.",
        "Many expect accumulation to save messages. But DDP averages in every backward, unless "
        "`no_sync` holds it back.",
    ),
    Claim(
        "In a ring all-reduce, no rank sends more than twice the tensor, however many ranks "
        "there are.",
        "It sounds wrong, because there are more ranks to reach. But each rank sends 2(n-1)/n "
        "times the tensor.",
    ),
    Claim(
        "A ring all-reduce of a tensor sends twice the bytes of a ring all-gather of it.",
        "Every rank ends up with the whole tensor in both. But an all-reduce has to add first.",
    ),
    Claim(
        "`torch.nn.DataParallel` all-reduces the gradients.",
        "DistributedDataParallel does. DataParallel is one process: it copies the model to the "
        "other GPUs in every forward, and adds their gradients on the first one.",
    ),
    Claim(
        "If you set all but the largest 1 % of the gradients to zero, an all-reduce sends 1 % "
        "of the bytes.",
        "The zeros are sent as well. Sending less takes indices and values.",
    ),
    Claim(
        "Casting gradients from 32 to 16 bits halves the time of every all-reduce.",
        "It halves the bytes. But nearly all of a small message's time is latency.",
    ),
    Claim(
        "Megatron-core's sequence parallelism sends 25 % more bytes than tensor parallelism alone.",
        "A reduce-scatter and an all-gather send what an all-reduce sends. But Megatron-core "
        "(0.16.1) saves only a shard of each region's input and gathers it again in backward, "
        "while a matrix product runs (lesson 10).",
    ),
    Claim(
        "Pipeline parallelism is a form of model parallelism.",
        "Some texts use the words for different things. Each rank computes only its own layers, "
        "for every sample. (ZeRO-3 splits the storage, too, but not the computation.)",
    ),
    Claim(
        "With equally many micro-batches, 1F1B has a smaller bubble than GPipe.",
        "1F1B saves memory. That allows more micro-batches, and these shrink the bubble.",
    ),
    Claim(
        "With more micro-batches, 1F1B's bubble shrinks, and the largest number in flight stays "
        "the number of stages.",
        "One expects to pay for the smaller bubble with memory. GPipe does.",
    ),
    Claim(
        "Interleaving two chunks per rank halves the idle time and more than doubles the messages.",
        "It sounds like a free lunch, so some doubt it. The price is in the messages.",
    ),
    Claim(
        "An H100 multiplies dense bf16 matrices 1.5 times as fast as an A100.",
        "The ratio of the memory bandwidths is close to that.",
    ),
    Claim(
        "More GPUs can never give more than proportional speed.",
        "Speedup is usually below proportional. But with more GPUs a layout can fit that was "
        "too large before.",
    ),
    Claim(
        "On an H100, PyTorch does not use TF32 for float32 matrix products unless a program "
        "asks for it.",
        "It did by default from PyTorch 1.7 to 1.11. Since 1.12 a program has to ask.",
    ),
    Claim(
        "When scaled gradients are truncated to integers, the errors average out over the "
        "steps, as they do with rounding.",
        "The error of one step is at most one unit of the codes. But it always points to zero, so "
        "it adds up where gradients keep their sign.",
    ),
    Claim(
        "Adding 0.001 to a bf16 weight of 1 changes nothing.",
        "0.001 is well inside the range of bf16. But above 1 its numbers are 1/128 apart, and "
        "the sum is rounded back.",
    ),
    Claim(
        "In hand-written activation recomputation, backward may recompute from "
        "`x.detach()`, call `output.backward(gradient)` and return `None` for x.",
        "The block's own parameters get gradients, so it seems to work. Earlier layers get "
        "none, unless the detached input asks for its gradient and backward returns it.",
    ),
    Claim(
        "The statement `torch.autocast('cpu', enabled=True)` turns autocast on.",
        "It makes a context manager and drops it. Only `with`, or its use as a decorator, "
        "enters it.",
    ),
    Claim(
        "bf16 has more digits than fp16.",
        "It has more *range*. Of its 16 bits, eight are the exponent.",
    ),
    Claim(
        "If each rank averages over its own tokens, the mean over the ranks is the mean over "
        "all tokens.",
        "That holds only if all ranks have the same number of tokens.",
    ),
    Claim(
        "Two correct all-reduce algorithms can give different bits for the same input.",
        "Addition is associative on paper. In floating point the order of the terms matters.",
    ),
    Claim(
        'A DeepSpeed config with "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4 '
        'and "gradient_accumulation_steps": 2 runs under `--num_gpus 4`.',
        "Each number looks reasonable. But 4 times 2 times the number of GPUs has to be 64.",
    ),
    Claim(
        "In ring attention as published (Liu et al. 2023), keys and values travel, and queries "
        "stay where they are.",
        "An implementation could send the queries instead. Then partial results would have to "
        "travel as well.",
    ),
    Claim(
        "For a dense model that is fully trained with Adam, a checkpoint of only the changed "
        "numbers is much smaller than a full one.",
        "That works for ordinary files, for LoRA, and for tables of which few rows are used. "
        "Here nearly every parameter and every moment changes in each step.",
    ),
)


@checks_kinds
class Quiz:
    """Ask claims, and keep what decided them.

    drawn: 0 for all claims; any other number is the seed that draws ten of them. guesses: a letter
    for each claim in the order of the sheet, T, F or - for none. Raises ValueError for other
    letters, or more letters than claims.
    """

    def __init__(self, drawn: int = 0, guesses: str = "") -> None:
        numbers = range(1, len(CLAIMS) + 1)
        chosen = sorted(random.Random(drawn).sample(numbers, DRAWN)) if drawn else numbers
        letters = guesses.replace(" ", "").upper()
        if len(letters) > len(chosen) or set(letters) - set("TF-"):
            raise ValueError(
                f"guesses={guesses!r}: give a letter for each of the {len(chosen)} claims, "
                "T, F or - for none"
            )
        self.guesses = dict(zip(chosen, letters.ljust(len(chosen), "-")))
        self.verdicts: dict[int, tuple[bool, str]] = {}

    def sheet(self) -> Table:
        """Return the claims to guess."""
        asked = [(number, said(CLAIMS[number - 1].sentence)) for number in self.guesses]
        return Table(["", said("true or false?")], asked)

    def decide(self, number: int, is_true: bool, evidence: str) -> None:
        """Store and print a claim's verdict. Raises ValueError if the claim is decided already."""
        if number in self.verdicts or not 1 <= number <= len(CLAIMS):
            raise ValueError(f"number={number}: decide each of the {len(CLAIMS)} claims once")
        self.verdicts[number] = bool(is_true), evidence
        sentence, why = CLAIMS[number - 1]
        verdict = str(bool(is_true)).upper()
        print(said(f"{number}. {sentence}\n   {verdict}: {evidence}\n   {why}\n"))

    def table(self) -> Table:
        """Return the guess, the verdict and the evidence for each claim of the sheet.

        Raises RuntimeError if one has no verdict yet.
        """
        rows = []
        self._check_all_are_decided()
        for number, guess in self.guesses.items():
            is_true, evidence = self.verdicts[number]
            mark = "" if guess == "-" else "✓" if guess == "FT"[is_true] else "✗"
            rows.append((number, guess, "FT"[is_true], mark, evidence))
        heads = ("guess", "verdict", "", "decided by")
        return Table(["", *map(said, heads)], rows)

    def result(self) -> dict:
        """Return the score, and the numbers of the claims that were guessed wrong.

        Raises RuntimeError if a claim has no verdict yet.
        """
        self._check_all_are_decided()
        wrong = [
            number
            for number, guess in self.guesses.items()
            if guess in "TF" and guess != "FT"[self.verdicts[number][0]]
        ]
        guessed = sum(guess != "-" for guess in self.guesses.values())
        return {"guessed": guessed, "right": guessed - len(wrong), "wrong": wrong}

    def _check_all_are_decided(self) -> None:
        """Raise RuntimeError if a claim of the sheet has no verdict."""
        if missing := [str(number) for number in self.guesses if number not in self.verdicts]:
            raise RuntimeError(
                f"no cell has decided {', '.join(missing)} of the claims: run the cells above this"
            )
