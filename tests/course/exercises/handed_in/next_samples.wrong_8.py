# WRONG: mutates what order returns (pops from it): order may return a list that others use; second call gets less.
def next_samples(position, batch_size, num_samples, order, group):
    r, n = group.rank(), group.size()
    epoch, at = divmod(position, num_samples)
    rows, left = [], order(epoch)
    del left[:at]
    while len(rows) < batch_size:
        if not left:
            epoch += 1
            left = order(epoch)
        rows.append(left.pop(0))
    return rows[batch_size * r // n : batch_size * (r + 1) // n], position + batch_size
