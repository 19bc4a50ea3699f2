# WRONG: "Every running text needs blocks for all its tokens". Shown by: running a (12 tokens, 1 block), free=1, block_size=4: it needs two more blocks, but in decode a text grows by one token, so this counts one; a stays.
def who_runs(running, waiting, free, block_size):
    def grows(text):  # its next token does not fit into what it holds
        return 1 if text.tokens > text.blocks * block_size else 0

    stay, leave = list(running), []
    while stay and sum(map(grows, stay)) > free:
        last = stay.pop()
        leave.append(last.name)
        free += last.blocks
    if leave:
        return leave, []
    free -= sum(map(grows, stay))
    come = []
    for text in waiting:
        needs = -(-text.tokens // block_size) - text.blocks
        if needs > free:
            break
        come.append(text.name)
        free -= needs
    return [], come
