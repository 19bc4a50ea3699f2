"""The same function on a machine that is not here: `launch(fn, 1024, simulate="h100")`.

    run = launch(train, world_size=1024, args=(config, layout), simulate="h100")
    run.seconds, run.step_seconds, run.ledger.table(), run.peak_memory, draw.timeline(run)

Read in this order:
    simulate.py    the way from a function to a Run
    one_rank.py    be one rank of any world, without storage (../without_storage.py)
    kinds.py       which ranks do the same, found by what they do
    shortcut.py    collectives of a large world, without their messages
    native.py      collectives of ours, message by message, as one event
    player.py      all ranks in virtual time
    by_kind.py     the same where one rank of each kind stands for others
    calculated.py  how long a kernel and a message take, by the planner's rooflines and links

What a simulation does not know:
    values         `pretend` states those that a program asks for
    fusion         every operator of torch is a kernel, as in eager mode
    the host       kernels are launched at once, unless `host_us` says how long a launch takes
    DDP of torch   its C++ reducer reads a map of used parameters on the host, and stops
    torch's pipelining stops, too: a stage asks another one for the shapes that it will send
"""
