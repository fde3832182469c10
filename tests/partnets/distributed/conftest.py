import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("group") / "store")
    yield ranks
    ranks.close()
