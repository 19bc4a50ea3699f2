# WRONG: extends the caller's table in place AND returns it; the second call with the old arguments sees a longer table. The
# statement: "Return the new table". (values right)
def place_tokens(table, free, written, new, block_size):
    while len(table) * block_size < written + new:
        table.append(free.pop(0))
    return table, [table[t // block_size] * block_size + t % block_size for t in range(written, written + new)]
