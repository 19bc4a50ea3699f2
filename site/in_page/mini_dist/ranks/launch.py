"""Refuse to start processes, which a web page cannot do. Everything else can be imported."""


class RankError(RuntimeError):
    pass


class RankTimeout(RankError):
    pass


def launch(*_, **__):
    raise RankError("a web page cannot start processes")
