# WRONG: "so that the step ends as early as possible". Shown by: shares(3, [0.0001, 0.0002]): bisected to a millisecond only, [3, 0] takes 0.3 ms, [2, 1] takes 0.2 ms (right if a sample takes many milliseconds).
def shares(batch_size, seconds):
    def within(end):
        return [int(end / each + 1e-9) for each in seconds]

    low, high = 0.0, batch_size * min(seconds)
    while high - low > 1e-3:
        middle = (low + high) / 2
        if sum(within(middle)) >= batch_size:
            high = middle
        else:
            low = middle
    taken = within(high)
    for device in reversed(range(len(taken))):  # give back what is too much
        surplus = sum(taken) - batch_size
        taken[device] -= min(surplus, taken[device])
    return taken
