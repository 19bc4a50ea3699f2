"""Lesson 29: a plan for your own job, a strategy, a run that survives, and two faults at once."""

import os
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from mini_dist import check
from mini_dist.collectives import all_gather, all_reduce, begin_reduce_scatter
from mini_dist.course import capstone
from mini_dist.course.check import sick_runs, sick_twice
from mini_dist.plan.calculators import plan
from mini_dist.plan.config import Layout
from mini_dist.strategies.data_parallel import Naive, Overlapped
from mini_dist.strategies.train import train_step
from mini_dist.strategies.zero import ZeRO1, ZeRO2
from mini_dist.training.checkpoint import Training
from tests.course.exercises import solutions
from tests.course.exercises.registry import Right, Wrong

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no rank imports pytest
cloudpickle.register_pickle_by_value(solutions)

planned, strategy, trained, named = Wrong(), Wrong(), Wrong(), Wrong()
right_plan, right_strategy = Right("my_plan"), Right("my_strategy")
right_run, right_faults = Right("my_training"), Right("two_faults")

# ---- the plan -----------------------------------------------------------------------------------

ADAS = dict(dp=64, tp=2, sequence_parallel=True, zero=1, micro_batch_size=2, num_micro_batches=8)


@planned("Return three things")
def only_a_layout():
    return Layout(**ADAS)


@planned("The first value must be your name")
def without_a_name():
    return "  ", "B", Layout(**ADAS)


@planned('"A" or "B", and not')
def names_the_machine():
    return "Ada Lovelace", "h100-hf", Layout(**ADAS)


@planned("The third is a Layout(...)")
def a_dict():
    return "Ada Lovelace", "B", ADAS


@planned("there are 128 devices")
def too_few_devices():
    return "Ada Lovelace", "B", Layout(**ADAS | {"dp": 32, "num_micro_batches": 16})


@planned("A step has 1024")
def half_the_batch():
    return "Ada Lovelace", "B", Layout(**ADAS | {"num_micro_batches": 4})


@planned("It does not fit")
def no_zero():
    return "Ada Lovelace", "B", Layout(dp=128, num_micro_batches=8)


@planned("even the planner's best layout breaks a limit")
def the_other_offer():
    found = plan("llama3-8b", "a100-80", 128, 1024 * 8192)
    return "Ada Lovelace", "A", found.best.layout


@planned("Your largest extra cost is recomputed")
def recomputes():
    return "Ada Lovelace", "B", Layout(**ADAS | {"recompute": "full"})


@planned("tp=64 does not divide")
def cut_too_often():
    return "Ada Lovelace", "B", Layout(dp=2, tp=64, zero=1, num_micro_batches=512)


@planned("there are 64 devices")
def somebody_elses_layout():
    return "x", "B", Layout(**ADAS)


@right_plan
def asks_the_planner():
    job = capstone.job("Grace Hopper")
    for name in "AB":
        offer = job.offer(name)
        found = plan(job.model, offer.machine, offer.devices, job.batch_tokens)
        if capstone.bill(job, name, found.best.layout).keeps(job):
            return job.learner, name, found.best.layout


@right_plan
def not_the_best_layout():
    return ["ada  LOVELACE", "B", Layout(dp=128, zero=2, num_micro_batches=8)]


def test_a_layout_for_another_machine_or_batch_has_no_bill():
    job = capstone.job("Ada Lovelace")
    layout = Layout(**ADAS)
    with pytest.raises(ValueError, match=f"offer . has {job.offer('B').devices} GPUs"):
        capstone.bill(job, "B", layout.replace(dp=2 * layout.dp))
    with pytest.raises(ValueError, match=f"the job has {job.batch_tokens:,}"):
        capstone.bill(job, "B", layout.replace(num_micro_batches=2 * layout.num_micro_batches))


# ---- the strategy -------------------------------------------------------------------------------


def backward(model, batches, loss_of):
    for batch in batches:
        (loss_of(model, batch) / len(batches)).backward()


@strategy("the optimizer's states of all parameters")
def replicated(model, make_optimizer, loss_of, group):
    optimizer = make_optimizer(model.parameters())

    def step(batches):
        backward(model, batches, loss_of)
        for p in model.parameters():
            p.grad = all_reduce(p.grad, group, op="mean")
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(group, model, make_optimizer, loss_of, mean=True, clear=True, spread=True, wide=None):
    """Shard per parameter after backward: right but too slow; arguments can introduce mistakes."""
    rank, size = group.rank(), group.size()

    def flat(x):
        return torch.nn.functional.pad(x.detach().flatten(), (0, -x.numel() % size))

    parameters = list(model.parameters())
    shards = [flat(p).chunk(size)[rank].clone() for p in parameters]
    optimizer = make_optimizer(shards)

    def step(batches):
        backward(model, batches, loss_of)
        for p, shard in zip(parameters, shards):
            grad = flat(p.grad).to(wide or p.dtype)
            total = begin_reduce_scatter(grad, group).wait().to(p.dtype)
            shard.grad = total / size if mean else total
            if clear:
                p.grad = None
        optimizer.step()
        for p, shard in zip(parameters, shards):
            whole = all_gather(shard, group) if spread else shard.repeat(size)
            p.data.copy_(whole[: p.numel()].view_as(p))

    return step


def in_buckets_of(numbers: str):
    """Return the printed solution with buckets of another size."""
    cell = {"__name__": "__main__"}
    exec(check.my_strategy.answer().replace("100_000_000", numbers), cell)
    cell["my_strategy"].__name__ = f"in_buckets_of_{numbers}"
    return cell["my_strategy"]


strategy("complete late")(in_buckets_of("2_000_000_000"))
right_strategy(in_buckets_of("50_000_000"))


@strategy("Gradients leave when backward is over")
def after_backward(model, make_optimizer, loss_of, group):
    return sharded(group, model, make_optimizer, loss_of)


@strategy("The first step is right and a later one is not")
def keeps_the_old_gradients(model, make_optimizer, loss_of, group):
    return sharded(group, model, make_optimizer, loss_of, clear=False)


@strategy("The ranks hold different parameters")
def keeps_its_shard(model, make_optimizer, loss_of, group):
    return sharded(group, model, make_optimizer, loss_of, spread=False)


@strategy("sums over the ranks")
def adds(model, make_optimizer, loss_of, group):
    return sharded(group, model, make_optimizer, loss_of, mean=False)


@strategy("travels as float64")
def sends_doubles(model, make_optimizer, loss_of, group):
    return sharded(group, model, make_optimizer, loss_of, wide=torch.float64)


@strategy("have not changed")
def never_gathers(model, make_optimizer, loss_of, group):
    def step(batches):
        backward(model, batches, loss_of)
        for p in model.parameters():
            p.grad = None

    return step


@strategy("The ranks hold different parameters")
def trains_apart(model, make_optimizer, loss_of, group):
    optimizer = make_optimizer(model.parameters())

    def step(batches):
        optimizer.zero_grad()
        backward(model, batches, loss_of)
        optimizer.step()

    return step


@strategy("the optimizer does not keep its moments")
def a_new_optimizer_each_step(model, make_optimizer, loss_of, group):
    def step(batches):
        sharded(group, model, make_optimizer, loss_of)(batches)

    return step


@strategy("asks for a value")
def looks_at_the_loss(model, make_optimizer, loss_of, group):
    inner = solutions.my_strategy(model, make_optimizer, loss_of, group)

    def step(batches):
        inner(batches)
        assert next(model.parameters()).sum().item() < 1e9

    return step


@strategy("Each step adds hooks")
def leaves_its_hooks(model, make_optimizer, loss_of, group):
    inner = solutions.my_strategy(model, make_optimizer, loss_of, group)

    def step(batches):
        inner(batches)
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)

    return step


@strategy("small ones are nothing but latency")
def a_message_per_parameter(model, make_optimizer, loss_of, group):
    rank, size = group.rank(), group.size()

    def flat(x):
        return torch.nn.functional.pad(x.detach().flatten(), (0, -x.numel() % size))

    shards = {p: flat(p).chunk(size)[rank].clone() for p in model.parameters()}
    optimizer = make_optimizer(list(shards.values()))

    def step(batches):
        under_way = {}

        def leave(p):
            under_way[p] = begin_reduce_scatter(flat(p.grad), group)
            p.grad = None

        backward(model, batches[:-1], lambda *a: loss_of(*a) * (len(batches) - 1) / len(batches))
        hooks = [p.register_post_accumulate_grad_hook(leave) for p in shards]
        (loss_of(model, batches[-1]) / len(batches)).backward()
        for hook in hooks:
            hook.remove()
        for p, work in under_way.items():
            shards[p].grad = work.wait() / size
        optimizer.step()
        for p, shard in shards.items():
            p.data.copy_(all_gather(shard, group)[: p.numel()].view_as(p))

    return step


@right_strategy
def with_torchs_collectives(model, make_optimizer, loss_of, group):
    """Bucket by module, and divide the gradients before sending them."""
    rank, size = group.rank(), group.size()
    modules = [list(m.parameters(recurse=False)) for m in model.modules()]
    buckets, seen = [], set()
    for bucket in modules:
        bucket = [p for p in bucket if p not in seen]
        seen.update(bucket)
        if buckets and sum(p.numel() for p in buckets[-1]) < 5e7:
            buckets[-1] += bucket
        elif bucket:
            buckets.append(bucket)
    lengths = [-(-sum(p.numel() for p in bucket) // size) for bucket in buckets]
    wholes = []
    for bucket, length in zip(buckets, lengths):
        whole = bucket[0].new_zeros(length * size)
        torch.cat(
            [p.detach().flatten() for p in bucket], out=whole[: sum(map(torch.numel, bucket))]
        )
        wholes.append(whole)
    shards = [w[rank * n : (rank + 1) * n].clone() for w, n in zip(wholes, lengths)]
    del wholes
    optimizer = make_optimizer(shards)
    where = {p: number for number, bucket in enumerate(buckets) for p in bucket}

    def step(batches):
        waiting, works = {n: set(bucket) for n, bucket in enumerate(buckets)}, []

        def hook(p):
            number = where[p]
            waiting[number].discard(p)
            if waiting[number]:
                return
            bucket = buckets[number]
            whole = p.new_zeros(lengths[number] * size)
            whole[: sum(map(torch.numel, bucket))] = torch.cat([q.grad.flatten() for q in bucket])
            whole /= size * len(batches)
            for q in bucket:
                q.grad = None
            shards[number].grad = torch.empty_like(shards[number])
            works.append(
                dist.reduce_scatter_tensor(shards[number].grad, whole, group=group, async_op=True)
            )

        for number, batch in enumerate(batches):
            hooks = []
            if number == len(batches) - 1:
                hooks = [p.register_post_accumulate_grad_hook(hook) for p in where]
            loss_of(model, batch).backward()
            for each in hooks:
                each.remove()
        for work in works:
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        arriving = []
        for shard in shards:
            whole = shard.new_empty(len(shard) * size)
            arriving.append(
                (whole, dist.all_gather_into_tensor(whole, shard, group=group, async_op=True))
            )
        with torch.no_grad():
            for bucket, (whole, work) in zip(buckets, arriving):
                work.wait()
                start = 0
                for p in bucket:
                    p.copy_(whole[start : start + p.numel()].view_as(p))
                    start += p.numel()

    return step


# ---- the run ------------------------------------------------------------------------------------


@trained("the ranks train apart")
def each_for_itself(model, optimizer, batches, steps, every, folder, group):
    losses = {}
    for step in range(steps):
        done = train_step(model, optimizer, [batches.batch(step)])
        losses[step] = float(all_reduce(done.loss, group, op="mean"))
    return losses


@trained("not one process's")
def its_own_losses(model, optimizer, batches, steps, every, folder, group):
    losses, model = {}, Naive(model, group)
    for step in range(steps):
        inputs, targets = batches.batch(step)
        losses[step] = float(train_step(model, optimizer, [(inputs, targets)]).loss)
        losses[step] += group.rank()
    return losses


@trained("Nothing was saved")
def never_saves(model, optimizer, batches, steps, every, folder, group):
    model = Overlapped(model, group)
    return {s: train_step(model, optimizer, [batches.batch(s)]).loss.item() for s in range(steps)}


def with_training(
    model, optimizer, batches, steps, every, folder, group, resume=True, begin=0, keep=2
):
    model, losses = Overlapped(model, group), {}
    training = Training(model, optimizer, group)
    saved = training.resume(folder) if resume else None
    for step in range(saved.step + begin if saved else 0, steps):
        losses[step] = train_step(model, optimizer, [batches.batch(step)]).loss.item()
        if (step + 1) % every == 0:
            training.save(folder, step + 1, keep=keep)
    return losses


@trained("It started over at step 0")
def never_resumes(model, optimizer, batches, steps, every, folder, group):
    return with_training(model, optimizer, batches, steps, every, folder, group, resume=False)


@trained("was the first that nobody saved")
def skips_a_step(model, optimizer, batches, steps, every, folder, group):
    return with_training(model, optimizer, batches, steps, every, folder, group, begin=1)


@trained("It went on at step 5")
def repeats_a_step(model, optimizer, batches, steps, every, folder, group):
    return with_training(model, optimizer, batches, steps, every, folder, group, begin=-1)


@trained("did not go on from the checkpoint before")
def keeps_one_checkpoint(model, optimizer, batches, steps, every, folder, group):
    return with_training(model, optimizer, batches, steps, every, folder, group, keep=1)


def by_hand(model, optimizer, batches, steps, every, folder, group, lose="", checked=False):
    """Train with one torch.save file per rank and checkpoint."""
    model, losses, first = Naive(model, group), {}, 0
    for step in range(steps - steps % every, 0, -every):
        try:
            path = os.path.join(folder, f"{step}-{group.rank()}")
            whole = os.path.exists(path)
            saved = torch.load(path) if whole else None
        except Exception:
            if not checked:
                raise
            whole = False
        if all_reduce(torch.tensor(int(whole)), group) == group.size():
            model.module.load_state_dict(saved["model"])
            if lose != "optimizer":
                optimizer.load_state_dict(saved["optimizer"])
            if lose != "random":
                torch.set_rng_state(saved["random"])
            first = step
            break
    for step in range(first, steps):
        batch = batches.batch(step if lose != "position" else step - first)
        losses[step] = train_step(model, optimizer, [batch]).loss.item()
        if (step + 1) % every == 0:
            state = dict(model=model.module.state_dict(), optimizer=optimizer.state_dict())
            state["random"] = torch.get_rng_state()
            torch.save(state, os.path.join(folder, f"{step + 1}-{group.rank()}"))
    return losses


@trained("its states are lost")
def forgets_the_optimizer(*args):
    return by_hand(*args, lose="optimizer")


@trained("the random generators that draw the dropout masks")
def forgets_the_dice(*args):
    return by_hand(*args, lose="random")


@trained("the batch of that step")
def forgets_where_it_was(*args):
    return by_hand(*args, lose="position")


@trained("cut in half")
def believes_every_file(*args):
    return by_hand(*args)


@trained("Return a dict with the loss of each step")
def forgets_the_last_step(model, optimizer, batches, steps, every, folder, group):
    return with_training(model, optimizer, batches, steps - 1, every, folder, group)


@right_run
def with_a_file_per_rank(model, optimizer, batches, steps, every, folder, group):
    return by_hand(model, optimizer, batches, steps, every, folder, group, checked=True)


@right_run
def in_the_background(model, optimizer, batches, steps, every, folder, group):
    wrapped = Naive(model, group)
    training = Training(wrapped, optimizer, group, background=True)
    saved, losses = training.resume(folder), {}
    step = saved.step if saved else 0
    while step < steps:
        losses[step] = float(train_step(wrapped, optimizer, [batches.batch(step)]).loss)
        step += 1
        if not step % every:
            training.save(folder, step)
            training.wait()
    return losses


@right_run
def with_zero(model, optimizer, batches, steps, every, folder, group):
    def adamw(tensors):
        return torch.optim.AdamW(tensors, lr=optimizer.defaults["lr"])

    zero = ZeRO1(model, group, adamw, units=model.blocks)
    return with_zero_s_own(zero, batches, steps, every, folder, group)


def with_zero_s_own(zero, batches, steps, every, folder, group):
    training, losses = Training(zero, (), group), {}
    saved = training.resume(folder)
    for step in range(saved.step if saved else 0, steps):
        losses[step] = train_step(zero, zero.optimizer, [batches.batch(step)]).loss.item()
        if (step + 1) % every == 0:
            training.save(folder, step + 1)
    return losses


# ---- two faults ---------------------------------------------------------------------------------


@named("return a list of pairs")
def one_pair(record):
    return "straggler", 0


@named("return a list of pairs")
def a_dict_of_faults(record):
    return dict(solutions.two_faults(record))


@named("return an empty list")
def says_healthy(record):
    return solutions.two_faults(record) or [("healthy", None)]


@named("a disease is one of")
def another_name(record):
    return [("slow rank", rank) for _, rank in solutions.two_faults(record)]


@named("a rank is a number")
def ranks_as_text(record):
    return [(disease, str(rank)) for disease, rank in solutions.two_faults(record)]


@named("a fault is missing")
def the_first_that_it_finds(record):
    return solutions.two_faults(record)[:1]


@named("another fault explains it")
def everyone_who_is_waited_for(record):
    found, went = solutions.two_faults(record), record.went
    waits = [parts["waiting"] / step for parts, step in zip(went.seconds, went.step)]
    straggler = [("straggler", waits.index(min(waits)))] * (max(waits) > 0.15)
    return list(dict.fromkeys([*found, *straggler]))


@named("it is, but not there")
def the_neighbour(record):
    return [
        (disease, rank if rank is None else (rank + 1) % record.size)
        for disease, rank in solutions.two_faults(record)
    ]


@named("one fault too many")
def a_leak_in_every_run(record):
    return [*{*solutions.two_faults(record), ("memory leak", 0)}]


@named("a fault is missing")
def nothing_is_ever_wrong(record):
    return []


@right_faults
def as_a_set_with_other_limits(record):
    found, n = set(), record.size
    steps = record.steps
    owner = {}
    for rank in range(n):
        for step in steps[rank]:
            for sample in step.samples:
                owner.setdefault(sample, set()).add(rank)
    twice = [ranks for ranks in owner.values() if len(ranks) > 1]
    if twice:
        votes = [sum(rank in ranks for ranks in twice) for rank in range(n)]
        found.add(("unsynchronised seeds", max(range(n), key=votes.__getitem__)))
    for rank in range(n):
        losses = sorted(step.loss for step in steps[rank])
        if losses[-1] > 8 * losses[-2] and losses[-1] > 5:
            found.add(("bad shard", rank))
    leaks = {rank for rank in range(n) if steps[rank][-1].held >= 3 * steps[rank][0].held}
    found |= {("memory leak", None)} if len(leaks) == n else {("memory leak", r) for r in leaks}
    sizes = [len(mine[0].samples) for mine in steps]
    share = lambda rank, part: record.went.seconds[rank][part] / record.went.step[rank]  # noqa: E731
    stalls = [rank for rank in range(n) if share(rank, "data") > 0.1]
    waits = [share(rank, "waiting") for rank in range(n)]
    if len({*sizes}) > 1:
        found.add(("another batch size", min(range(n), key=lambda r: sizes.count(sizes[r]))))
    elif stalls:
        found.add(("input stall", None if len(stalls) == n else stalls[0]))
    elif record.messages(0) > 10:
        found.add(("buckets too small", None))
    elif max(waits) - min(waits) > 0.1:
        found.add(("straggler", waits.index(min(waits))))
    elif share(0, "host") > 0.13:
        found.add(("host sync", None))
    return found


CASES = [
    pytest.param(name, fn, says, id=f"{name}-{fn.__name__}")
    for name, wrong in (
        ("my_plan", planned),
        ("my_strategy", strategy),
        ("my_training", trained),
        ("two_faults", named),
    )
    for fn, says in wrong.answers
]
RIGHTS = [
    pytest.param(each.name, fn, id=f"{each.name}-{fn.__name__}")
    for each in (right_plan, right_strategy, right_run, right_faults)
    for fn in each.answers
]


@pytest.mark.parametrize("name, fn, says", CASES)
def test_a_known_mistake_is_refused_and_named(name, fn, says):
    verdict = check.exercises()[name].judge(fn)
    assert verdict.state == "wrong", verdict
    assert says in verdict.hint, verdict.hint


@pytest.mark.parametrize("name, fn", RIGHTS)
def test_a_right_answer_may_look_otherwise(name, fn):
    verdict = check.exercises()[name].judge(fn)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize("name", ["my_plan", "my_strategy", "my_training", "two_faults"])
def test_the_printed_solution_is_right(name):
    verdict = check.exercises()[name].judge(getattr(solutions, name))
    assert verdict.state == "right", verdict


def by_the_librarys_zero(model, make_optimizer, loss_of, group):
    zero = ZeRO2(model, group, make_optimizer)

    def step(batches):
        for batch in batches:
            (loss_of(zero.module, batch) / len(batches)).backward()
        zero.step()
        zero.zero_grad()

    return step


def test_the_librarys_zero_is_not_the_learners_strategy():
    verdict = check.my_strategy.judge(by_the_librarys_zero)
    assert verdict.state == "wrong" and "write that part yourself" in verdict.hint, verdict


def test_a_bucket_that_never_leaves_is_missed_where_there_are_several():
    """Each bucket's parameters count down another bucket; with one bucket, nothing changes."""
    exercise, right = check.exercises()["my_strategy"], "bucket_of[p] = len(buckets) - 1"
    text = exercise.answer()
    assert right in text
    cell = {"__name__": "__main__"}
    exec(text.replace(right, "bucket_of[p] = len(buckets) - 2"), cell)
    verdict = exercise.judge(cell["my_strategy"])
    assert verdict.state == "wrong" and "never leave rank 0" in verdict.hint, verdict


def test_whatever_run_a_learner_draws_has_one_diagnosis():
    runs = sick_twice.of_learners()
    sick_runs.run_all(runs)
    for sick in runs:
        found = solutions.two_faults(sick_runs.run(sick))
        assert {*found} == sick_twice.faults(sick) and len(found) == 2, sick


def test_a_fault_that_is_named_on_a_second_rank_as_well_is_refused_with_its_name():
    (sick,) = [s for s in sick_twice.unseen().values() if s.disease == "host sync" and not s.also]
    said = sick_twice.mistake(sick, [("host sync", None), ("host sync", 1)])
    assert said.startswith("host sync it is, but not there")
