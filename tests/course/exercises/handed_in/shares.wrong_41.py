# WRONG: "Split the whole batch so that the step ends as early as possible." Shown by: shares(4, [1.0, 5.0, 5.0]): gives [3, 1, 0], 5 s; [4, 0, 0] takes 4 s. (What remains after rounding down goes to different devices, one sample each.)
def shares(batch_size, seconds):
    speeds = [1 / each for each in seconds]
    taken = [int(batch_size * speed / sum(speeds)) for speed in speeds]
    rest = batch_size - sum(taken)
    first = sorted(range(len(seconds)), key=lambda d: (taken[d] + 1) * seconds[d])
    for device in first[:rest]:
        taken[device] += 1
    return taken
