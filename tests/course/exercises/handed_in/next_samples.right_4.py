# draws the order of the epoch after the batch's last sample too (once each): the statement only says "at most once per epoch"
def next_samples(position, batch_size, num_samples, order, group):
    r, n, end = group.rank(), group.size(), position + batch_size
    epochs = range(position // num_samples, end // num_samples + 1)
    rows = [s for e in epochs for s in order(e)]
    skip = position - epochs[0] * num_samples
    return rows[skip + batch_size * r // n : skip + batch_size * (r + 1) // n], end
