"""torchtitan's Python configs, read without being run: the call, and assignments after it."""

from __future__ import annotations

import ast
import operator

SECTIONS = ("training", "parallelism", "activation_checkpoint")
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def sections_of_python(text: str) -> dict:
    """The sections of the one Trainer.Config(...) in a Python text, after the assignments to it.

    Read are assignments like `config.parallelism.pipeline_parallel_degree = 4` that stand below
    `config = Trainer.Config(...)` in the same function. Raises ValueError for a change that is made
    in another way, because only running the program could say what it comes to.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"the config is no Python: {error.msg} in line {error.lineno}.") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainers = [call for call in calls if ast.unparse(call.func).endswith("Trainer.Config")]
    if not trainers:
        raise ValueError("the config has no Trainer.Config(...): give the text that has.")
    if len(trainers) > 1:
        raise ValueError(
            f"the text has {len(trainers)} Trainer.Config(...): give the text of one of them."
        )
    config = {}
    for word in trainers[0].keywords:
        if word.arg is None:
            raise ValueError(
                f"**{ast.unparse(word.value)} is computed: give the fields of Trainer.Config(...) "
                "themselves."
            )
        _set(config, word.arg, word.value)
    for call in calls:
        for word in call.keywords:
            if call is not trainers[0] and word.arg in SECTIONS:
                raise _changed(call)
        is_setattr = ast.unparse(call.func) == "setattr" and len(call.args) == 3
        if is_setattr and ast.unparse(call.args[1]).strip("\"'") in SECTIONS:
            raise _changed(call)
    read = _assignments(tree, trainers[0])
    for target, value in read:
        name, *key = _path(target)[1:]
        if not key:
            _set(config, name, value)
        elif name == "activation_checkpoint":
            raise _changed(target)
        else:
            config.setdefault(name, {})[".".join(key)] = _literal(key[-1], value)
    _refuse_other_changes(tree, [target for target, _ in read])
    if "activation_checkpoint" not in config:
        config["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": "op"}
    return config


def _assignments(tree: ast.Module, call: ast.Call) -> list[tuple[ast.Attribute, ast.expr]]:
    """(target, value) of what is assigned to SECTIONS of the call's variable, in order.

    Only plain statements of the same body: not in a loop, nor under a condition.
    """
    for body in (
        node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", 0), list)
    ):
        found, name = [], None
        for statement in body:
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                continue
            (target,) = statement.targets
            if statement.value is call and isinstance(target, ast.Name):
                name = target.id
            path = _path(target)
            if name is not None and path[:1] == [name] and path[1:2] and path[1] in SECTIONS:
                found.append((target, statement.value))
        if name is not None:
            return found
    return []


def _refuse_other_changes(tree: ast.Module, read: list[ast.Attribute]) -> None:
    """ValueError for a section of any variable that is assigned elsewhere or handed on."""
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    known = {id(node) for node in read}
    for node in ast.walk(tree):
        path = _path(node)
        if len(path) < 2 or path[1] not in SECTIONS or id(node) in known or path[0] == "self":
            continue
        is_changed = not isinstance(node.ctx, ast.Load)
        # `config.parallelism` alone, not as the beginning of a longer name: others may change it.
        if is_changed or (len(path) == 2 and id(node) not in inside):
            raise _changed(node)


def _changed(node: ast.expr) -> ValueError:
    return ValueError(
        f"{ast.unparse(node)} in line {node.lineno} may change the config in a way that is not "
        "read: give the values inside Trainer.Config(...)."
    )


def _path(node: ast.AST) -> list[str]:
    """`config.training.steps` as a list of names; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) and names else []


def _set(config: dict, name: str, value: ast.expr) -> None:
    """A whole section: a call with its fields, or what recomputes."""
    if name in ("training", "parallelism"):
        if not isinstance(value, ast.Call):
            raise ValueError(
                f"{name}={ast.unparse(value)} is no call: give its fields, as in "
                f"{name}={name.capitalize()}Config(...)."
            )
        config[name] = {
            str(field.arg): _literal(field.arg, field.value) for field in value.keywords
        }
    elif name == "activation_checkpoint":
        config[name] = {"mode": _mode(value)}
        if config[name]["mode"] == "selective":
            config[name]["selective_ac_option"] = "op"
    else:
        config[name] = {}


def _mode(value: ast.expr) -> str:
    said = ast.unparse(value)
    for name, mode in (("None", "none"), ("FullAC", "full"), ("SelectiveAC", "selective")):
        if name in said.split(".")[:2]:
            return mode
    raise ValueError(
        f"activation_checkpoint={said} is not known: give None, FullAC.Config() or "
        "SelectiveAC.Config()."
    )


def _literal(name: str | None, value: ast.expr) -> object:
    """A constant, or whole numbers that are added, multiplied and so on."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        number = _number(value)
    if number is None:
        raise ValueError(
            f"{name or '**'}={ast.unparse(value)} is computed: give the number itself."
        )
    return number


def _number(value: ast.expr) -> int | None:
    if isinstance(value, ast.Constant):
        return value.value if type(value.value) is int else None
    if not isinstance(value, ast.BinOp) or type(value.op) not in ARITHMETIC:
        return None
    left, right = _number(value.left), _number(value.right)
    if None in (left, right) or (isinstance(value.op, ast.FloorDiv) and right == 0):
        return None
    return ARITHMETIC[type(value.op)](left, right)
