"""Other people's libraries: collected by `make ecosystem` only, in an environment that has them all."""


def pytest_ignore_collect(collection_path, config):
    return None if "ecosystem" in (config.option.markexpr or "") else True
