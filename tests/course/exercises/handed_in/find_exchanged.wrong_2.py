# WRONG: neighbors: places where both in and out are odd; for adjacent a, b four places are not where they were.
def find_exchanged(traffic):
    n = len(traffic)
    to = [max(range(n), key=row.__getitem__) for row in traffic]
    odd = [p for p in range(n) if to[p] != (p + 1) % n and to[p - 1] != p]
    return (odd[0], odd[-1]) if odd else None
