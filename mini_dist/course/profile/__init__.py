"""Why is it slow? What each rank did with every moment of a step, and whom it waited for.

    def train(group):
        with profiled(group) as profile:
            for _ in range(3):
                with profile.step():
                    with profile.region("data"):
                        inputs, targets = next(batches)
                    with profile.region("forward"):
                        loss = token_loss(model(inputs), targets).mean()
                    ...
        return profile.spans

    run = launch(train, 4)
    timeline = Timeline.of(run.ledger, run.results)
    where_it_went(timeline)                            # a row a rank, adding up to the step
    run.ledger.to_chrome_trace("trace.json", run.results)

Read in this order:
    spans.py       what a rank did when, and the arithmetic of intervals
    profiled.py    on a rank: torch.profiler, steps, named regions
    where.py       where the step went
    arrivals.py    who comes last to a collective, how often; collectives' bandwidth
    diagnose.py    what is wrong with a run, from its record
    noise.py       the gradient noise scale, from two squares a step
"""

from .arrivals import bandwidths, stragglers
from .diagnose import diagnose_slow
from .noise import NoiseScale
from .profiled import profiled
from .spans import Span, Timeline
from .where import PARTS, where_it_went

__all__ = [
    "PARTS",
    "NoiseScale",
    "Span",
    "Timeline",
    "bandwidths",
    "diagnose_slow",
    "profiled",
    "stragglers",
    "where_it_went",
]
