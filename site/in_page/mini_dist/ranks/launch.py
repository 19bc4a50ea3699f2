"""A web page starts no processes. What asks for them is told so; all else can be imported."""


class RankError(RuntimeError):
    pass


class RankTimeout(RankError):
    pass


def launch(*_, **__):
    raise RankError("a web page cannot start processes")
