import pytest
from ranks import Ranks


def ranks(count):
    @pytest.fixture(scope="session")
    def fixture(tmp_path_factory):
        ranks = Ranks(count, tmp_path_factory.mktemp("group") / "store")
        yield ranks
        ranks.close()

    return fixture


two_ranks, three_ranks = ranks(2), ranks(3)
