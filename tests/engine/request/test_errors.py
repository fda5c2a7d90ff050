import pickle

import pytest

from engine.request.errors import DeadlineExceededError, EngineError, TenantLimitError


@pytest.mark.parametrize(
    "error", [TenantLimitError("rate_limited", "text", 3.0), DeadlineExceededError(7)]
)
def test_errors_survive_the_way_between_processes(error: EngineError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (vars(found), str(found)) == (vars(error), str(error))
