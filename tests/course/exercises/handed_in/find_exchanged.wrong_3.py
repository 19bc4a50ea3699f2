# WRONG: fixed threshold of 500 kB: a smaller job is "healthy" / finds nothing. No number is in the statement.
def find_exchanged(traffic):
    n = len(traffic)
    to = {p: q for p in range(n) for q in range(n) if traffic[p][q] > 500_000}
    def ring(a, b):
        at = list(range(n)); at[a], at[b] = at[b], at[a]
        return {at[i]: at[(i + 1) % n] for i in range(n)}
    for a in range(n):
        for b in range(a + 1, n):
            if ring(a, b) == to:
                return a, b
