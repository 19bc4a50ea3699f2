"""Let a fixture prepare only what the selected tests of a file ask for."""


def cases_to_run(request, argument: str) -> set:
    """Return the values of a parametrized argument in the tests of this file that were selected."""
    here = [item for item in request.session.items if item.path == request.path]
    calls = [item.callspec.params for item in here if hasattr(item, "callspec")]
    return {params[argument] for params in calls if argument in params}
