"""Claims about distributed training as learners meet them, and the quiz of the lab `claims`.

The sentences are here; what decides each of them is a cell of lessons/labs/claims.md.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from mini_dist.plan.tables import Table

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
        "With Adam in mixed precision, n ranks and P parameters, ZeRO-1 holds 2P + 14P/n bytes per "
        "rank, and ZeRO-2 holds 4P + 12P/n.",
        "Both formulas are right, but swapped.",
    ),
    Claim(
        "ZeRO is model parallelism: each rank computes with its shard of the weights.",
        "The weights are sharded, but only in storage. Each rank gathers a whole layer before it "
        "computes, and computes it for its own samples.",
    ),
    Claim(
        "ZeRO-3 sends three times as many bytes as data parallelism.",
        "It gathers the parameters twice and scatters the gradients once. But an all-reduce is a "
        "reduce-scatter and an all-gather, so data parallelism sends two of the three already.",
    ),
    Claim(
        "Below 10B parameters plain data parallelism is enough; from 10B to 100B combine tensor "
        "and pipeline parallelism; above that use all three.",
        "A rule of thumb without batch, memory and optimizer. Plain data parallelism holds all 16 "
        "bytes per parameter on every GPU.",
    ),
    Claim(
        "Full recomputation of activations costs about a third more computation.",
        "It repeats the forward pass, which is a third of forward and backward together.",
    ),
    Claim(
        "With tensor parallelism over 8 GPUs, each saves an eighth of the activations.",
        "The inputs of the regions and the norms stay whole on every rank. Sequence parallelism "
        "shards them as well.",
    ),
    Claim(
        "DDP broadcasts the parameters in every step, so that the ranks stay equal.",
        "It does so once, at the start. After that, equal gradients keep the ranks equal.",
    ),
    Claim(
        "Gradient accumulation makes DDP send less.",
        "Only inside `no_sync`. Without it, DDP averages the gradients of every micro-batch.",
    ),
    Claim(
        "In a ring all-reduce, a rank of a large group sends about as many bytes as a rank of a "
        "small one.",
        "It sounds wrong, because there are more ranks to reach. But each rank sends 2(n-1)/n "
        "times the tensor, which stays below 2.",
    ),
    Claim(
        "An all-gather of a tensor costs as many bytes as an all-reduce of it.",
        "Every rank ends up with the whole tensor in both. But an all-reduce has to add first.",
    ),
    Claim(
        "`torch.nn.DataParallel` all-reduces the gradients.",
        "DistributedDataParallel does. DataParallel is one process: it copies the model to the "
        "other GPUs in every forward, and adds their gradients on one of them.",
    ),
    Claim(
        "If you set all but the largest 1 % of the gradients to zero, an all-reduce sends 1 % of "
        "the bytes.",
        "The zeros are sent as well. Sending less takes indices and values.",
    ),
    Claim(
        "Casting gradients to 16 bits halves the time of every all-reduce.",
        "It halves the bytes. A small message is all latency.",
    ),
    Claim(
        "Megatron's sequence parallelism sends more than tensor parallelism alone.",
        "The paper counts as many bytes as an all-reduce has: a reduce-scatter and an all-gather. "
        "But backward gathers the inputs once more instead of saving them (lesson 10).",
    ),
    Claim(
        "Pipeline parallelism is a form of model parallelism.",
        "Some texts keep the words apart. Each rank holds other layers, so the model is split.",
    ),
    Claim(
        "1F1B has a smaller bubble than GPipe.",
        "1F1B saves memory. With equal stages its bubble is GPipe's.",
    ),
    Claim(
        "Interleaving v chunks per rank divides the bubble by v and multiplies the messages.",
        "It sounds like a free lunch, so some doubt it. The price is in the messages.",
    ),
    Claim(
        "An H100 is 1.5 times as fast as an A100 in dense bf16.",
        "The ratio of the memory bandwidths is close to that.",
    ),
    Claim(
        "More GPUs can never give more than proportional speed.",
        "In most cases they do not. But freed memory can allow a better layout.",
    ),
    Claim(
        "On an H100, PyTorch multiplies float32 matrices in TF32 by default.",
        "It did on the A100 until PyTorch 1.12. Since then TF32 has to be asked for.",
    ),
    Claim(
        "Cutting off the fraction when gradients are quantized is harmless if they are scaled "
        "first.",
        "The error of one step is small. But it always points to zero, so it adds up.",
    ),
    Claim(
        "In a hand-written checkpoint, it is enough that backward recomputes the output and calls "
        "`output.backward(gradient)`.",
        "The parameters inside do get their gradients. What came before the block gets none, "
        "unless the input was detached and asked for its gradient.",
    ),
    Claim(
        "The statement `torch.autocast('cpu', enabled=True)` turns autocast on.",
        "It makes a context manager and drops it. Only `with` enters it.",
    ),
    Claim(
        "bf16 has more digits than fp16.",
        "It has more *range*. Of its 16 bits, eight are the exponent.",
    ),
    Claim(
        "If each rank averages over its own tokens, the mean over the ranks is the mean over all "
        "tokens.",
        "It is, as long as all ranks have equally many.",
    ),
    Claim(
        "The result of an all-reduce can depend on the algorithm, even without any error.",
        "Addition is associative on paper. In floating point the order of the terms matters.",
    ),
    Claim(
        'A DeepSpeed config with "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4 and '
        '"gradient_accumulation_steps": 2 runs under `--num_gpus 4`.',
        "Each number looks reasonable. Their product has to be the batch.",
    ),
    Claim(
        "Ring attention sends keys and values; queries stay where they are.",
        "One could send the queries instead. Then partial results would have to travel as well.",
    ),
    Claim(
        "An incremental checkpoint, which saves only what has changed, saves most of the bytes.",
        "It does for files. Under Adam every parameter and both moments change in every step.",
    ),
)


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
        """The claims to guess."""
        return Table(["", "true or false?"], [(n, CLAIMS[n - 1].sentence) for n in self.guesses])

    def decide(self, number: int, is_true: bool, evidence: str) -> None:
        """Keep and print what was found of a claim."""
        if number in self.verdicts or not 1 <= number <= len(CLAIMS):
            raise ValueError(f"number={number}: decide each of the {len(CLAIMS)} claims once")
        self.verdicts[number] = bool(is_true), evidence
        sentence, why = CLAIMS[number - 1]
        print(f"{number}. {sentence}\n   {str(bool(is_true)).upper()}: {evidence}\n   {why}\n")

    def table(self) -> Table:
        """Of each claim of the sheet the guess, the verdict, and what decided it."""
        rows = []
        for number, guess in self.guesses.items():
            is_true, evidence = self.verdicts[number]
            mark = "" if guess == "-" else "✓" if guess == "FT"[is_true] else "✗"
            rows.append((number, guess, "FT"[is_true], mark, evidence))
        return Table(["", "guess", "verdict", "", "decided by"], rows)

    def result(self) -> dict:
        """The score, and the numbers of the claims that were guessed wrong."""
        wrong = [
            number
            for number, guess in self.guesses.items()
            if guess in "TF" and guess != "FT"[self.verdicts[number][0]]
        ]
        guessed = sum(guess != "-" for guess in self.guesses.values())
        return {"guessed": guessed, "right": guessed - len(wrong), "wrong": wrong}
